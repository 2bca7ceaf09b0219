"""The rows of a decode step between two operations, in all formats that linears read."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GROUP_COLUMNS", "LARGEST", "SMALLEST_ABSMAX", "FixedRows", "new_rows", "to_fixed_point", "unscaled_rows"]

GROUP_COLUMNS = 128
"""Neighbouring columns that share a scale: a group."""
LARGEST = 127 * 256 + 127
"""The largest number in two signed bytes: 127 * 256 + 127."""
SMALLEST_ABSMAX = 2.0**-100
"""Keeps the scale a normal float32, also on devices that flush subnormals."""


class FixedRows(NamedTuple):
    """R rows of K columns, possibly with a pending norm division.

    The rows of a norm are not divided: each linear multiplies its result by 1 / sqrt(mean square + eps) of the row,
    computed from the groups' sums of squares. So no operation waits for the sum over a whole row.
    """

    x: Tensor
    """[R, K] bfloat16 or float32."""
    planes: Tensor
    """int8 [R, 2, K]: x in 16-bit fixed point, one scale per group (`to_fixed_point`)."""
    scale: Tensor
    """float32 [R, K/128]."""
    squares: Tensor | None
    """float32 [R, K/128]: sums of squares per group before the norm's weight; None without a pending norm division."""
    eps: float = 0.0

    def to(self, device: torch.device) -> "FixedRows":
        """The same rows on another device."""
        squares = None if self.squares is None else self.squares.to(device)
        return FixedRows(self.x.to(device), self.planes.to(device), self.scale.to(device), squares, self.eps)

    def scaled(self, values: Tensor) -> Tensor:
        """Values [R, ...] of the rows, or results computed from them, times the rows' norm factors, in float32."""
        if self.squares is None:
            return values.to(torch.float32)
        factor = torch.rsqrt(self.squares.sum(1) / (GROUP_COLUMNS * self.squares.shape[1]) + self.eps)
        return values.to(torch.float32) * factor.view(-1, *[1] * (values.dim() - 1))


def to_fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """(planes int8 [R, 2, K], scale float32 [R, K/128]) of activations [R, K], as `int_linear.fixed_point` defines."""
    rows, columns = x.shape
    groups = x.to(torch.float32).reshape(rows, columns // GROUP_COLUMNS, GROUP_COLUMNS)
    scale = groups.abs().amax(-1).clamp(min=SMALLEST_ABSMAX) / LARGEST
    steps = (groups / scale.unsqueeze(-1)).round().to(torch.int32).reshape(rows, columns)
    low = steps.to(torch.int8)  # keeps the low eight bits, as a signed byte
    high = (steps - low) >> 8
    return torch.stack((high.to(torch.int8), low), dim=1), scale


def unscaled_rows(values: Tensor, dtype: torch.dtype) -> FixedRows:
    """Values [R, K] as the rows of a linear, without a pending norm division."""
    return FixedRows(values.to(dtype), *to_fixed_point(values), None)


def new_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised (x, planes, scale) of `FixedRows`, for a kernel to write."""
    x = torch.empty((num_rows, width), dtype=dtype, device=device)
    planes = torch.empty((num_rows, 2, width), dtype=torch.int8, device=device)
    return x, planes, torch.empty((num_rows, width // GROUP_COLUMNS), dtype=torch.float32, device=device)
