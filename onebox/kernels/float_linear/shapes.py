"""Limits of the float linears and checks of their arguments."""

import torch
from torch import Tensor

from onebox.kernels.common.float_weight import SCALE_BLOCK
from onebox.spec.errors import MismatchError

__all__ = [
    "DECODE_ROWS",
    "check_decode_rows",
    "check_fp8_block",
    "check_fp8_row",
    "check_fp8_row_block",
    "check_nvfp4",
    "check_plain",
]

DECODE_ROWS = 128  # the most rows of `..._linear`; more rows are prefill, for `..._matmul`


def check_decode_rows(x: Tensor) -> None:
    if x.shape[0] > DECODE_ROWS:
        raise MismatchError(f"A decode linear takes at most {DECODE_ROWS} rows, not {x.shape[0]}; use the matmul.")


def check_fp8_block(x: Tensor, weight: Tensor, scale: Tensor) -> None:
    _check_pair(x, weight, torch.float8_e4m3fn, weight.shape[1])
    blocks = tuple(-(-size // SCALE_BLOCK) for size in weight.shape)
    if scale.shape != blocks:
        raise MismatchError(
            f"An FP8 weight {list(weight.shape)} has block scales {list(blocks)}, not {list(scale.shape)}."
        )


def check_fp8_row(x: Tensor, weight: Tensor, scale: Tensor) -> None:
    _check_pair(x, weight, torch.float8_e4m3fn, weight.shape[1])
    if scale.numel() not in (1, weight.shape[0]):
        raise MismatchError(f"FP8 rows {list(weight.shape)} need one scale, or one each, not {list(scale.shape)}.")


def check_fp8_row_block(x: Tensor, weight: Tensor, scale: Tensor) -> None:
    _check_pair(x, weight, torch.float8_e4m3fn, weight.shape[1])
    rows, columns = weight.shape
    if scale.shape != (rows, -(-columns // SCALE_BLOCK)):
        raise MismatchError(
            f"FP8 rows {list(weight.shape)} need a scale per {SCALE_BLOCK} columns, not {list(scale.shape)}."
        )


def check_nvfp4(x: Tensor, packed: Tensor, scale: Tensor, multiplier: Tensor) -> None:
    _check_pair(x, packed, torch.uint8, packed.shape[1] * 2)
    if scale.shape != (packed.shape[0], packed.shape[1] // 8) or scale.dtype != torch.float8_e4m3fn:
        raise MismatchError(f"NVFP4 codes {list(packed.shape)} do not go with {scale.dtype} {list(scale.shape)}.")
    if multiplier.numel() != 1 or multiplier.dtype != torch.float32:
        raise MismatchError(f"An NVFP4 weight has one float32 multiplier, not {list(multiplier.shape)}.")


def check_plain(x: Tensor, weight: Tensor) -> None:
    _check_pair(x, weight, torch.bfloat16, weight.shape[1])


def _check_pair(x: Tensor, weight: Tensor, dtype: torch.dtype, columns: int) -> None:
    """Rows x [R, columns] with a contiguous last dimension, and a contiguous weight of the format's dtype."""
    if weight.dtype != dtype or not weight.is_contiguous():
        raise MismatchError(f"This linear needs a contiguous weight of {dtype}, not {weight.dtype}.")
    if x.ndim != 2 or x.shape[1] != columns or x.stride(1) != 1:
        raise MismatchError(f"Rows {list(x.shape)} do not fit a weight of {columns} input columns.")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise MismatchError(f"Activations are bfloat16 or float32, not {x.dtype}.")
