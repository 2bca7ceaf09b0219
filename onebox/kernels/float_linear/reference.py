"""The plain twins of the float linears: one matrix product summed in float32, one rounding.

The decode and the prefill variant differ in tiling only, so they have one twin.
"""

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
from onebox.kernels.invariant import product

__all__ = [
    "bf16_linear",
    "bf16_matmul",
    "fp8_block_linear",
    "fp8_block_matmul",
    "fp8_row_linear",
    "fp8_row_matmul",
    "nvfp4_linear",
    "nvfp4_matmul",
]


def fp8_block_linear(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `onebox.kernels.float_linear.fp8_block_linear`."""
    return _linear(x, dequantize_fp8_block(weight, scale, SCALE_BLOCK), out_dtype)


def fp8_row_linear(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `onebox.kernels.float_linear.fp8_row_linear`."""
    dequantize = dequantize_fp8_tensor if scale.numel() == 1 else dequantize_fp8_rows
    return _linear(x, dequantize(weight, scale), out_dtype)


def nvfp4_linear(
    x: Tensor, packed: Tensor, scale: Tensor, multiplier: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See `onebox.kernels.float_linear.nvfp4_linear`."""
    return _linear(x, dequantize_nvfp4(packed, scale, multiplier, Dialect.MODELOPT), out_dtype)


def bf16_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `onebox.kernels.float_linear.bf16_linear`."""
    return _linear(x, weight.to(torch.float32), out_dtype)


fp8_block_matmul = fp8_block_linear
fp8_row_matmul = fp8_row_linear
nvfp4_matmul = nvfp4_linear
bf16_matmul = bf16_linear


def _linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return product(x, weight).to(out_dtype or x.dtype)
