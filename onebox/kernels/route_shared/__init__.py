"""The router's choice in a decode step and the shared expert's inner values, from the parts of their linears."""

import torch
from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["route_shared"]


def route_shared(
    router_parts: Tensor, gate_up_parts: Tensor, k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids int32 [R, k], weights float32 [R, k], share float32 [R], inner [R, I] of `dtype`).

    router_parts float32 [P, R, E + 1]: logits of the E experts and, last, of the shared expert's gate; gate_up_parts
    float32 [Q, R, 2I]: the shared expert's gate and up. Parts are added in their order. ids and weights are those of
    `router.route`; share = sigmoid(the last logit); inner = silu(gate) * up. I is a multiple of 128.
    """
    chosen = implementation(__name__, router_parts)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = chosen.route_shared(router_parts, gate_up_parts, k, dtype)
    return result
