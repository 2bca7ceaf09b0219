"""The routed experts for a few rows (decode and verify): SwiGLU through each row's k experts, weighted and summed."""

from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.float_linear.tiles import FloatWeight
from onebox.kernels.rows import FixedRows

__all__ = ["expert_slots", "routed_experts", "routed_experts_bf16"]


def routed_experts(
    planes: Tensor,
    scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """The sum over slots s of weights[:, s] * down(SiLU(gate(x)) * up(x)) of expert ids[:, s]: float32 [R, H].

    x is fixed point: (256 * planes[r, 0] + planes[r, 1]) * scale, planes int8 [R, 2, H], scale float32 [R, H/128] for
    each group of 128. ids int32 and weights float32 [R, k], R * k at most 1,024. Weights are INT4 as in
    `onebox.formats.expert_tiles`: gate_up uint8 [E, 2I/16, H/128, 1024] with scales [E, 2I/16, H/128, 16], down
    [E, H/16, I/128, 1024] with [E, H/16, I/128, 16]; scales float16, bfloat16 or float32. Slots are
    added in their order.
    """
    chosen = implementation(__name__, planes)
    result: Tensor = chosen.routed_experts(planes, scale, ids, weights, gate_up, gate_up_scale, down, down_scale)
    return result


def expert_slots(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared: tuple[Tensor, FloatWeight | None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `routed_experts` adds up, float32 [R, k, H]: each slot's expert, weighted, for whoever comes next to add.

    `shared` has the parts of the shared expert's gate_up, float32 [Q, R, 2J], gates first, added in their order, and
    its down weight [H, J]. In the same launches come its inner values SiLU(gate) * up, [R, J] in the dtype of the rows'
    x, and the linear of these as the parts of `float_parts`, float32 [P, R, H]; this one if there is a float weight.
    """
    chosen = implementation(__name__, ids)
    result: tuple[Tensor, Tensor | None, Tensor | None] = chosen.expert_slots(
        rows, ids, weights, gate_up, gate_up_scale, down, down_scale, shared
    )
    return result


def routed_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same for bfloat16 weights: float32 [R, H].

    x bfloat16 [R, H]; ids int32 and weights float32 [R, k]; gate_up bfloat16 [E, 2I, H], the gate's rows first; down
    bfloat16 [E, H, I].
    """
    result: Tensor = implementation(__name__, x).routed_experts_bf16(x, ids, weights, gate_up, down)
    return result
