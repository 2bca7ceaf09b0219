"""y = x W^T for weights stored as FP8, NVFP4 or BF16; activations are never quantised.

Each format has two operations. `..._linear` takes a decode or verify step (at most `shapes.DECODE_ROWS` rows) and is
bound by reading the weight; `..._matmul` takes prefill, any number of rows. Within one of them a row's bits depend on
the row alone; between the two they may differ in the last place, so the caller says which one it means and no row
count switches silently.

x [R, K] bfloat16 or float32, its last dimension contiguous. The result [R, N] has `out_dtype`, by default that of x.
"""

import torch
from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.float_linear.shapes import (
    check_decode_rows,
    check_fp8_block,
    check_fp8_row,
    check_nvfp4,
    check_plain,
)

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
    """For decode: weight float8_e4m3fn [N, K], scale [ceil(N/128), ceil(K/128)] bfloat16 or float32."""
    check_decode_rows(x)
    check_fp8_block(x, weight, scale)
    result: Tensor = implementation(__name__, x).fp8_block_linear(x, weight, scale, out_dtype)
    return result


def fp8_block_matmul(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """For prefill: weight float8_e4m3fn [N, K], scale [ceil(N/128), ceil(K/128)] bfloat16 or float32."""
    check_fp8_block(x, weight, scale)
    result: Tensor = implementation(__name__, x).fp8_block_matmul(x, weight, scale, out_dtype)
    return result


def fp8_row_linear(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """For decode: weight float8_e4m3fn [N, K]; scale [N], or of one element for the whole tensor."""
    check_decode_rows(x)
    check_fp8_row(x, weight, scale)
    result: Tensor = implementation(__name__, x).fp8_row_linear(x, weight, scale, out_dtype)
    return result


def fp8_row_matmul(x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """For prefill: weight float8_e4m3fn [N, K]; scale [N], or of one element for the whole tensor."""
    check_fp8_row(x, weight, scale)
    result: Tensor = implementation(__name__, x).fp8_row_matmul(x, weight, scale, out_dtype)
    return result


def nvfp4_linear(
    x: Tensor, packed: Tensor, scale: Tensor, multiplier: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """For decode: packed uint8 [N, K/2], scale float8_e4m3fn [N, K/16], multiplier float32 of one element."""
    check_decode_rows(x)
    check_nvfp4(x, packed, scale, multiplier)
    result: Tensor = implementation(__name__, x).nvfp4_linear(x, packed, scale, multiplier, out_dtype)
    return result


def nvfp4_matmul(
    x: Tensor, packed: Tensor, scale: Tensor, multiplier: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """For prefill: packed uint8 [N, K/2], scale float8_e4m3fn [N, K/16], multiplier float32 of one element."""
    check_nvfp4(x, packed, scale, multiplier)
    result: Tensor = implementation(__name__, x).nvfp4_matmul(x, packed, scale, multiplier, out_dtype)
    return result


def bf16_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """For decode: weight bfloat16 [N, K]."""
    check_decode_rows(x)
    check_plain(x, weight)
    result: Tensor = implementation(__name__, x).bf16_linear(x, weight, out_dtype)
    return result


def bf16_matmul(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """For prefill: weight bfloat16 [N, K]."""
    check_plain(x, weight)
    result: Tensor = implementation(__name__, x).bf16_matmul(x, weight, out_dtype)
    return result
