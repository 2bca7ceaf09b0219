"""The plain twins of the integer linears: unpack the weights, multiply in float32."""

import torch
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS, from_fragments
from onebox.kernels.invariant import product

__all__ = ["fixed_point", "int4_linear", "int4_matmul", "int8_linear", "int8_matmul"]

LARGEST = 127 * 256 + 127  # the largest number that two signed bytes write
SMALLEST_ABSMAX = 2.0**-100  # keeps the scale a normal float32, on devices that flush subnormals too


def fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.int_linear.fixed_point`."""
    rows, columns = x.shape
    groups = x.to(torch.float32).reshape(rows, columns // TILE_COLUMNS, TILE_COLUMNS)
    scale = groups.abs().amax(-1).clamp(min=SMALLEST_ABSMAX) / LARGEST
    steps = (groups / scale.unsqueeze(-1)).round().to(torch.int32).reshape(rows, columns)
    low = steps.to(torch.int8)  # keeps the low eight bits, as a signed byte
    high = (steps - low) >> 8
    return torch.stack((high.to(torch.int8), low), dim=1), scale


def int4_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """See `onebox.kernels.int_linear.int4_linear`."""
    return product(_rows(planes, scale), _int4_matrix(weight, weight_scale)).to(dtype)


def int8_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """See `onebox.kernels.int_linear.int8_linear`."""
    return (product(_rows(planes, scale), _int8_codes(weight, weight_scale)) * weight_scale.to(torch.float32)).to(dtype)


def int4_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.int_linear.int4_matmul`."""
    return product(x, _int4_matrix(weight, weight_scale)).to(x.dtype)


def int8_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.int_linear.int8_matmul`."""
    return (product(x, _int8_codes(weight, weight_scale)) * weight_scale.to(torch.float32)).to(x.dtype)


def _rows(planes: Tensor, scale: Tensor) -> Tensor:
    """float32 [R, K]: what the fixed-point rows stand for."""
    steps = planes[:, 0].to(torch.float32) * 256 + planes[:, 1]
    return (steps.reshape(*scale.shape, TILE_COLUMNS) * scale.unsqueeze(-1)).reshape(steps.shape)


def _int4_matrix(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """float32 [N, K] from tiles and scales [K/128, N]."""
    columns = weight_scale.shape[1]
    codes = from_fragments(weight, 4)[:columns].to(torch.float32).reshape(columns, -1, TILE_COLUMNS)
    return (codes * weight_scale.T.to(torch.float32).unsqueeze(-1)).reshape(columns, -1)


def _int8_codes(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """float32 [N, K] without the scales: there is one a matrix row, so the product is scaled instead of the matrix."""
    return from_fragments(weight, 8)[: len(weight_scale)].to(torch.float32)
