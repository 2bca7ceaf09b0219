"""The plain twin of the float linears as parts."""

import torch
from torch import Tensor

from onebox.formats import (
    Dialect,
    dequantize_fp8_block,
    dequantize_fp8_rows,
    dequantize_fp8_tensor,
    dequantize_nvfp4,
)
from onebox.kernels.float_linear.shapes import SCALE_BLOCK
from onebox.kernels.float_linear.tiles import FloatWeight, num_parts
from onebox.kernels.invariant import product
from onebox.kernels.rows import FixedRows

__all__ = ["float_parts"]


def float_parts(rows: FixedRows, weight: FloatWeight) -> Tensor:
    """See `onebox.kernels.float_parts.float_parts`."""
    x, matrix, count = rows.scaled(rows.x), _matrix(weight), num_parts(rows.x.shape[1], weight)
    cuts = zip(x.chunk(count, dim=1), matrix.chunk(count, dim=1), strict=True)
    return torch.stack([product(some, part) for some, part in cuts])


def _matrix(weight: FloatWeight) -> Tensor:
    """float32 [N, K]."""
    kind, codes, scale, multiplier = weight
    if kind == "nvfp4" and scale is not None and multiplier is not None:
        return dequantize_nvfp4(codes, scale.view(torch.float8_e4m3fn), multiplier, Dialect.MODELOPT)
    if scale is None:
        return codes.to(torch.float32)
    fp8 = codes.view(torch.float8_e4m3fn)
    if kind == "block":
        return dequantize_fp8_block(fp8, scale, SCALE_BLOCK)
    return dequantize_fp8_tensor(fp8, scale) if scale.numel() == 1 else dequantize_fp8_rows(fp8, scale)
