"""The twins of the float linears: dequantise the weight, multiply in float32."""

import torch
from torch import Tensor

from onebox.formats import (
    Dialect,
    dequantize_fp8_block,
    dequantize_fp8_rows,
    dequantize_fp8_tensor,
    dequantize_nvfp4,
)
from onebox.kernels.common.float_weight import SCALE_BLOCK, FloatWeight
from onebox.kernels.common.invariant import product
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.float_linear.tiles import num_parts

__all__ = [
    "bf16_linear",
    "float_parts",
    "fp8_block_linear",
    "fp8_row_block_linear",
    "fp8_row_linear",
    "nvfp4_linear",
]


def fp8_block_linear(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The weight is float8_e4m3fn [N, K], scale [ceil(N/128), ceil(K/128)] bfloat16 or float32."""
    return _linear(x, dequantize_fp8_block(weight, scale, SCALE_BLOCK), out_dtype)


def fp8_row_block_linear(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The weight is float8_e4m3fn [N, K], rows of a matrix in blocks; scale [N, ceil(K/128)] bfloat16 or float32."""
    columns = scale.to(torch.float32).repeat_interleave(SCALE_BLOCK, dim=1)[:, : weight.shape[1]]
    return _linear(x, weight.to(torch.float32) * columns, out_dtype)


def fp8_row_linear(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The weight is float8_e4m3fn [N, K]; scale [N], or one element for the whole tensor."""
    dequantize = dequantize_fp8_tensor if scale.numel() == 1 else dequantize_fp8_rows
    return _linear(x, dequantize(weight, scale), out_dtype)


def nvfp4_linear(
    x: Tensor, packed: Tensor, scale: Tensor, multiplier: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The weight is packed uint8 [N, K/2], scale float8_e4m3fn [N, K/16], multiplier float32, one element."""
    return _linear(x, dequantize_nvfp4(packed, scale, multiplier, Dialect.MODELOPT), out_dtype)


def bf16_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The weight is bfloat16 [N, K]."""
    return _linear(x, weight.to(torch.float32), out_dtype)


def _linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return product(x, weight).to(out_dtype or x.dtype)


def float_parts(rows: FixedRows, weight: FloatWeight) -> Tensor:
    """Partial sums float32 [parts, R, N]: added over parts, in order, they are the linear with the weight [N, K].

    Reads the rows' x, R <= 64. The number of parts is a constant of the weight's shape.
    """
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
