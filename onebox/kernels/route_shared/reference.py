"""The plain twin of the router's choice with the shared expert's inner values."""

import torch
from torch import Tensor

from onebox.kernels.gate.reference import swiglu
from onebox.kernels.invariant import sigmoid
from onebox.kernels.router.reference import route

__all__ = ["in_order", "route_shared"]


def route_shared(
    router_parts: Tensor, gate_up_parts: Tensor, k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `onebox.kernels.route_shared.route_shared`."""
    logits = in_order(router_parts)
    ids, weights = route(logits[:, :-1], k)
    return ids, weights, sigmoid(logits[:, -1]), swiglu(in_order(gate_up_parts)).to(dtype)


def in_order(parts: Tensor) -> Tensor:
    """[R, N]: the sum of parts [P, R, N], first to last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
