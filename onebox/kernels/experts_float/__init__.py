"""The routed experts for weights stored as FP8 or NVFP4, for a few rows (`routed_...`) and for many (`prefill_...`).

Weights stay as a checkpoint stores them, stacked over experts: the E matrices gate_up [2I, H], the gate's rows before
those of up, and down [H, I]. Activations are never quantised. The results are those of `experts.routed_experts_bf16`
and `experts_prefill.prefill_experts_bf16` for the same numbers as weights.

    FP8     gate_up float8_e4m3fn [E, 2I, H], down [E, H, I], and scales bfloat16 or float32, either one for each
            128x128 block, gate and up apart: [E, 2 * ceil(I/128), ceil(H/128)] and [E, ceil(H/128), ceil(I/128)],
            or one for each row: [E, 2I] and [E, H]
    NVFP4   gate_up uint8 [E, 2I, H/2] with scales float8_e4m3fn [E, 2I, H/16], down [E, H, I/2] with [E, H, I/16], and
            multipliers float32 [E, 3] of gate, up and down
"""

from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.experts_float.shapes import check_fp8, check_nvfp4, check_prefill, check_routed

__all__ = ["prefill_experts_fp8", "prefill_experts_nvfp4", "routed_experts_fp8", "routed_experts_nvfp4"]


def routed_experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """The sum over slots s of weights[:, s] * down(SiLU(gate(x)) * up(x)) of expert ids[:, s]: float32 [R, H].

    x bfloat16 or float32 [R, H]; ids int32 and weights float32 [R, k], R * k at most 1,024. Slots are added in their
    order.
    """
    check_routed(x, ids)
    check_fp8(x, gate_up, gate_up_scale, down, down_scale)
    chosen = implementation(__name__, x)
    result: Tensor = chosen.routed_experts_fp8(x, ids, weights, gate_up, gate_up_scale, down, down_scale)
    return result


def routed_experts_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    multipliers: Tensor,
) -> Tensor:
    """The same as `routed_experts_fp8` for NVFP4 weights: float32 [R, H]."""
    check_routed(x, ids)
    check_nvfp4(x, gate_up, gate_up_scale, down, down_scale, multipliers)
    chosen = implementation(__name__, x)
    result: Tensor = chosen.routed_experts_nvfp4(x, ids, weights, gate_up, gate_up_scale, down, down_scale, multipliers)
    return result


def prefill_experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """The same sum for x bfloat16 [T, H], ids and weights [T, k], with any number of tokens: bfloat16 [T, H].

    The inner values are rounded to bfloat16, all sums are float32. The call takes 4 * T * k * H + 2 * T * k * I bytes
    of memory for itself.
    """
    check_prefill(x)
    check_fp8(x, gate_up, gate_up_scale, down, down_scale)
    chosen = implementation(__name__, x)
    result: Tensor = chosen.prefill_experts_fp8(x, ids, weights, gate_up, gate_up_scale, down, down_scale)
    return result


def prefill_experts_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    multipliers: Tensor,
) -> Tensor:
    """The same as `prefill_experts_fp8` for NVFP4 weights: bfloat16 [T, H]."""
    check_prefill(x)
    check_nvfp4(x, gate_up, gate_up_scale, down, down_scale, multipliers)
    chosen = implementation(__name__, x)
    arguments = (x, ids, weights, gate_up, gate_up_scale, down, down_scale, multipliers)
    result: Tensor = chosen.prefill_experts_nvfp4(*arguments)
    return result
