"""The routed experts for many tokens (prefill): the same sums as `experts`, token-slots grouped by expert."""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["prefill_experts", "prefill_experts_bf16"]


def prefill_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """The sum over slots s of weights[:, s] * down(SiLU(gate(x)) * up(x)) of expert ids[:, s]: bfloat16 [T, H].

    x bfloat16 [T, H]; ids int32 and weights float32 [T, k]; INT4 weights and their scales as `experts.routed_experts`
    takes them. The inner values are rounded to bfloat16, all sums are float32. The call takes
    4 * T * k * H + 2 * T * k * I + 2 * T * H bytes of memory for itself.
    """
    chosen = implementation(__name__, x)
    result: Tensor = chosen.prefill_experts(x, ids, weights, gate_up, gate_up_scale, down, down_scale)
    return result


def prefill_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same for bfloat16 weights: gate_up [E, 2I, H], the gate's rows first, and down [E, H, I]."""
    result: Tensor = implementation(__name__, x).prefill_experts_bf16(x, ids, weights, gate_up, down)
    return result
