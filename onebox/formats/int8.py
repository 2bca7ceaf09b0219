"""INT8 with one scale per row, in the form kernels read: one byte per weight, not packed.

weight int8 [out, in]     row o:  c0 c1 c2 ... c(in-1)      one byte each, -127..127 if quantised here
scale  any  [out]         row o:  s        (files may store [out, 1])

W[o, k] = weight[o, k] * scale[o]
"""

import torch
from torch import Tensor

from onebox.formats.group_int import GroupInt, dequantize, quantize
from onebox.spec.errors import MismatchError, UnsupportedError

__all__ = ["dequantize_int8_rows", "group_int_to_int8_rows", "int8_rows_to_group_int", "quantize_int8_rows"]


def quantize_int8_rows(weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A weight [out, in] to (int8 [out, in], scale [out] = max(absmax / 127, 1e-12)), as `quantize` at 8 bits."""
    return group_int_to_int8_rows(quantize(weight, 8, None, scale_dtype))


def dequantize_int8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [out, in] from int8 [out, in] and scale [out] or [out, 1]."""
    return dequantize(int8_rows_to_group_int(weight, scale))


def int8_rows_to_group_int(weight: Tensor, scale: Tensor) -> GroupInt:
    """The same matrix as a `GroupInt` with one group per row; scale [out] or [out, 1]."""
    if weight.ndim != 2 or scale.numel() != weight.shape[0]:
        raise MismatchError(f"INT8 rows {list(weight.shape)} need one scale each, not {list(scale.shape)}.")
    return GroupInt(
        codes=weight,
        scales=scale.reshape(-1, 1),
        zeros=None,
        group_index=None,
        group_size=max(1, weight.shape[1]),
        bits=8,
    )


def group_int_to_int8_rows(matrix: GroupInt) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], scale [out]) of a symmetric matrix with one scale per row; 4-bit codes keep their values."""
    if matrix.zeros is not None or matrix.scales.shape[1] != 1:
        raise UnsupportedError("INT8 rows have one scale a row and no zero points; this matrix has more.")
    return matrix.codes, matrix.scales.reshape(-1)
