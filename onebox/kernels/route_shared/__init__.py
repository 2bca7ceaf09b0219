"""The router's choice in a decode step, and beside it the shared expert's first linear, which does not depend on it."""

from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.float_linear.tiles import FloatWeight
from onebox.kernels.rows import FixedRows

__all__ = ["route_shared"]


def route_shared(
    router_parts: Tensor, k: int, rows: FixedRows, gate_up: FloatWeight | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(ids int32 [R, k], weights float32 [R, k], share float32 [R], parts of the shared expert's gate_up or None).

    router_parts float32 [P, R, E + 1], added in their order: logits of the E experts and, last, of the shared expert's
    gate. ids and weights are those of `router.route`; share = sigmoid(the last logit). The parts of gate_up [2I, H],
    float32 [Q, R, 2I], are what `float_parts` makes of the rows [R, H]: choosing leaves a GPU's memory idle.
    """
    chosen = implementation(__name__, router_parts)
    result: tuple[Tensor, Tensor, Tensor, Tensor | None] = chosen.route_shared(router_parts, k, rows, gate_up)
    return result
