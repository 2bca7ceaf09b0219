"""What a decode step does between two halves of a layer: the residual's sum, and the norm but for its division."""

import torch
from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.rows import FixedRows

__all__ = ["add_norm"]


def add_norm(
    residual: Tensor | None,
    parts: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    shared: Tensor | None = None,
    share: Tensor | None = None,
) -> tuple[FixedRows, Tensor]:
    """(the rows total * (1 + weight), whose division by the row's root mean square is left to the linears; total).

    total = residual + parts[0] + parts[1] + ... + share * (shared[0] + shared[1] + ...), float32 [R, H], in this order.
    residual [R, H], any float dtype, or None for zeros; parts float32 [P, R, H] with any strides over P and R, at least
    one if there is no residual; weight [H], an offset from one;
    shared float32 [S, R, H] and share float32 [R], or neither. H is a multiple of 128; the rows' x has `dtype`.
    """
    chosen = implementation(__name__, parts)
    result: tuple[FixedRows, Tensor] = chosen.add_norm(residual, parts, weight, eps, dtype, shared, share)
    return result
