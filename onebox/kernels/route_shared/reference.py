"""The plain twin of the router's choice with the shared expert's first linear."""

from torch import Tensor

from onebox.kernels.float_linear.tiles import FloatWeight
from onebox.kernels.float_parts.reference import float_parts
from onebox.kernels.invariant import sigmoid
from onebox.kernels.router.reference import route
from onebox.kernels.rows import FixedRows

__all__ = ["in_order", "route_shared"]


def route_shared(
    router_parts: Tensor, k: int, rows: FixedRows, gate_up: FloatWeight | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See `onebox.kernels.route_shared.route_shared`."""
    logits = in_order(router_parts)
    ids, weights = route(logits[:, :-1], k)
    return ids, weights, sigmoid(logits[:, -1]), None if gate_up is None else float_parts(rows, gate_up)


def in_order(parts: Tensor) -> Tensor:
    """[R, N]: the sum of parts [P, R, N], first to last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
