"""The rows of a decode step between two operations, in every form that a linear may want."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FixedRows"]


class FixedRows(NamedTuple):
    """R rows of K columns, and what is still to be done to them.

    Rows out of a norm come without its division: each linear multiplies its result by 1 / sqrt(mean square + eps) of
    the row, which the groups' sums of squares give. So no operation has to wait until a whole row has been added up.
    """

    x: Tensor
    """[R, K] bfloat16 or float32."""
    planes: Tensor
    """int8 [R, 2, K]: the same in 16-bit fixed point, as `int_linear.fixed_point` makes it."""
    scale: Tensor
    """float32 [R, K/128]."""
    squares: Tensor | None
    """float32 [R, K/128]: sums of squares of the rows before the norm's weight; None for rows as they are."""
    eps: float = 0.0

    def to(self, device: torch.device) -> "FixedRows":
        """The same rows on another device."""
        squares = None if self.squares is None else self.squares.to(device)
        return FixedRows(self.x.to(device), self.planes.to(device), self.scale.to(device), squares, self.eps)

    def scaled(self, values: Tensor) -> Tensor:
        """Values [R, ...] of the rows, or results from them, times the rows' factors, in float32."""
        if self.squares is None:
            return values.to(torch.float32)
        factor = torch.rsqrt(self.squares.sum(1) / (128 * self.squares.shape[1]) + self.eps)
        return values.to(torch.float32) * factor.view(-1, *[1] * (values.dim() - 1))
