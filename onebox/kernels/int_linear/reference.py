"""The twins of the integer linears: unpack the weights, multiply in float32."""

import torch
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS, from_fragments
from onebox.formats.head_planes import high_codes
from onebox.kernels.common.invariant import product
from onebox.kernels.common.rows import FixedRows, to_fixed_point

__all__ = [
    "fixed_point",
    "fixed_values",
    "int4_linear",
    "int4_matmul",
    "int4_parts",
    "int6_linear",
    "int8_linear",
    "int8_matmul",
    "int8_parts",
    "num_parts",
]

# Fewer programs than this do not keep enough loads in flight to saturate the memory of a large GPU.
_WANTED_PROGRAMS = 3072
_MAX_PARTS = 8


def fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """(planes, scale) of finite activations [R, K], any float dtype: 16-bit fixed point, one scale per group.

    planes int8 [R, 2, K]: the high and the low byte, both signed; scale float32 [R, K/128];
    x = (256 * high + low) * scale, rounded half to even, at most 32639 steps from zero. The scale is
    max(absmax, 2^-100) / 32639, never zero or subnormal: a group of zeros stays exactly zero.
    """
    return to_fixed_point(x)


def int4_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[R, N] of `dtype`: fixed-point rows, R <= 128, times the transposed INT4 matrix [N, K].

    planes int8 [R, 2, K] and scale float32 [R, K/128] from `fixed_point`; weight uint8 [K/128, ceil(N/16), 1024];
    weight_scale [K/128, N], float16 or bfloat16 or float32.
    """
    return product(fixed_values(planes, scale), _int4_matrix(weight, weight_scale)).to(dtype)


def int6_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[R, N] of `dtype`: fixed-point rows, R <= 128, times the transposed matrix of an INT8 matrix's upper six bits.

    Rows as in `int4_linear`; weight uint8 [K/128, ceil(N/16), 1536], the high plane (`onebox.formats.head_planes`);
    weight_scale [N] as in `int8_linear`: codes count four times.
    """
    codes = 4 * high_codes(weight)[: len(weight_scale)].to(torch.float32)
    return (product(fixed_values(planes, scale), codes) * weight_scale.to(torch.float32)).to(dtype)


def int8_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[R, N] of `dtype`: fixed-point rows, R <= 128, times the transposed INT8 matrix [N, K].

    Rows as in `int4_linear`; weight uint8 [K/128, ceil(N/16), 2048]; weight_scale [N].
    """
    return (
        product(fixed_values(planes, scale), _int8_codes(weight, weight_scale)) * weight_scale.to(torch.float32)
    ).to(dtype)


def int4_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """[T, N] of x's dtype: x [T, K], bfloat16 or float32, times the transposed INT4 matrix.

    Weights as in `int4_linear`.
    """
    return product(x, _int4_matrix(weight, weight_scale)).to(x.dtype)


def int8_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """[T, N] of x's dtype: x [T, K], bfloat16 or float32, times the transposed INT8 matrix.

    Weights as in `int8_linear`.
    """
    return (product(x, _int8_codes(weight, weight_scale)) * weight_scale.to(torch.float32)).to(x.dtype)


def num_parts(weight: Tensor) -> int:
    """Number of equal parts of K, a constant of the weight's shape: a narrow matrix is cut to get enough programs."""
    num_groups, num_tiles = weight.shape[:2]
    most = min(_MAX_PARTS, -(-_WANTED_PROGRAMS // num_tiles))
    return max(parts for parts in range(1, most + 1) if num_groups % parts == 0)


def int4_parts(rows: FixedRows, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Partial sums float32 [parts, R, N]: added over parts, in order, they are the linear with an INT4 weight.

    Weights as in `int4_linear`; the number of parts is a constant of their shape.
    """
    return _parts(rows, _int4_matrix(weight, weight_scale), num_parts(weight))


def int8_parts(rows: FixedRows, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Partial sums float32 [parts, R, N]: added over parts, in order, they are the linear with an INT8 weight.

    Weights as in `int8_linear`; the number of parts is a constant of their shape.
    """
    codes = _int8_codes(weight, weight_scale)
    return _parts(rows, codes, num_parts(weight)) * weight_scale.to(torch.float32)


def _parts(rows: FixedRows, matrix: Tensor, count: int) -> Tensor:
    """float32 [count, R, N] of a matrix [N, K]."""
    x = rows.scaled(fixed_values(rows.planes, rows.scale))
    cuts = zip(x.chunk(count, dim=1), matrix.chunk(count, dim=1), strict=True)
    return torch.stack([product(some, part) for some, part in cuts])


def fixed_values(planes: Tensor, scale: Tensor) -> Tensor:
    """float32 [R, K]: the values of fixed-point rows."""
    steps = planes[:, 0].to(torch.float32) * 256 + planes[:, 1]
    return (steps.reshape(*scale.shape, TILE_COLUMNS) * scale.unsqueeze(-1)).reshape(steps.shape)


def _int4_matrix(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """float32 [N, K] from tiles and scales [K/128, N]."""
    columns = weight_scale.shape[1]
    codes = from_fragments(weight, 4)[:columns].to(torch.float32).reshape(columns, -1, TILE_COLUMNS)
    return (codes * weight_scale.T.to(torch.float32).unsqueeze(-1)).reshape(columns, -1)


def _int8_codes(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """float32 [N, K] without scales: there is one per matrix row, so the product is scaled instead of the matrix."""
    return from_fragments(weight, 8)[: len(weight_scale)].to(torch.float32)
