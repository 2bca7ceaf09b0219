"""Linears with integer weights in fragment order (`onebox.formats.fragments`): few rows exactly, many tokens in blocks.

Two ways through the same bytes:

- Decode (`fixed_point`, then `int4_linear` or `int8_linear`, at most 64 rows): activations are 16-bit fixed point in
  two int8 planes, so that a group's dot product is an exact integer from the int8 tensor cores. Floats enter once a
  group, in the order of the groups: a row's bits are the same however many rows are computed with it.
- Prefill (`int4_matmul`, `int8_matmul`, any number of tokens): codes are exact in bfloat16; blocks and the order along
  K are constants, so a token's bits do not depend on how many come with it.

N, the output columns, is the length of the weight scales: the last tile's rows beyond N are padding, and nothing of
them is written. K is a multiple of 128, the columns of a quantisation group and of a tile.
"""

import torch
from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.rows import FixedRows

__all__ = [
    "fixed_point",
    "int4_linear",
    "int4_matmul",
    "int4_parts",
    "int8_linear",
    "int8_matmul",
    "int8_parts",
]


def fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """(planes, scale) of finite activations [R, K], any float dtype: 16-bit fixed point, one scale per 128 columns.

    planes int8 [R, 2, K]: the high and the low byte, both signed; scale float32 [R, K/128];
    x = (256 * high + low) * scale, rounded half to even, at most 32639 steps from zero. The scale is
    max(absmax, 2^-100) / 32639, never zero or subnormal: a group of zeros stays exactly zero.
    """
    result: tuple[Tensor, Tensor] = implementation(__name__, x).fixed_point(x)
    return result


def int4_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[R, N] of `dtype`: fixed-point rows, R <= 64, times the transposed INT4 matrix [N, K].

    planes int8 [R, 2, K] and scale float32 [R, K/128] from `fixed_point`; weight uint8 [K/128, ceil(N/16), 1024];
    weight_scale [K/128, N], float16 or bfloat16 or float32.
    """
    result: Tensor = implementation(__name__, planes).int4_linear(planes, scale, weight, weight_scale, dtype)
    return result


def int8_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """As `int4_linear` with one scale a row: weight uint8 [K/128, ceil(N/16), 2048], weight_scale [N]."""
    result: Tensor = implementation(__name__, planes).int8_linear(planes, scale, weight, weight_scale, dtype)
    return result


def int4_parts(rows: FixedRows, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """float32 [P, R, N] whose sum over P, in this order, is the linear: for the operation behind it to add up.

    Weights as in `int4_linear`; P is a constant of their shape.
    """
    result: Tensor = implementation(__name__, weight).int4_parts(rows, weight, weight_scale)
    return result


def int8_parts(rows: FixedRows, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The same of weights as in `int8_linear`."""
    result: Tensor = implementation(__name__, weight).int8_parts(rows, weight, weight_scale)
    return result


def int4_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """[T, N] of x's dtype: x [T, K], bfloat16 or float32, times the transposed INT4 matrix.

    Weights as in `int4_linear`.
    """
    result: Tensor = implementation(__name__, x).int4_matmul(x, weight, weight_scale)
    return result


def int8_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """[T, N] of x's dtype: x [T, K], bfloat16 or float32, times the transposed INT8 matrix.

    Weights as in `int8_linear`.
    """
    result: Tensor = implementation(__name__, x).int8_matmul(x, weight, weight_scale)
    return result
