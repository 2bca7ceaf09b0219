"""Inputs of the float linears as parts: each format, odd widths, rows before and after their norm."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.formats import Dialect, quantize_fp8_block, quantize_fp8_rows, quantize_nvfp4
from onebox.kernels.case import Case, generator
from onebox.kernels.float_linear.tiles import FloatWeight
from onebox.kernels.int_linear.cases import fixed_rows

__all__ = ["CASES", "float_weight"]


def float_weight(kind: str, matrix: Tensor, device: torch.device) -> FloatWeight:
    """The float32 matrix [N, K] stored as `kind`."""
    if kind == "bf16":
        return FloatWeight(kind, matrix.to(torch.bfloat16).to(device), None)
    if kind == "nvfp4":
        packed, scale, multiplier = quantize_nvfp4(matrix, Dialect.MODELOPT)
        return FloatWeight(kind, packed.to(device), scale.view(torch.uint8).to(device), multiplier.to(device))
    quantize = quantize_fp8_block if kind == "block" else quantize_fp8_rows
    codes, scale = quantize(matrix, scale_dtype=torch.float32)
    return FloatWeight(kind, codes.view(torch.uint8).to(device), scale.to(device))


def _inputs(
    device: torch.device, rows: int, width: int, kind: str, columns: int, dtype: torch.dtype, normed: bool
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + width))
    return {
        "rows": fixed_rows(rows, width, dtype, is_normed=normed).to(device),
        "weight": float_weight(kind, draw(columns, width) * width**-0.5, device),
    }


def _case(
    rows: int,
    width: int,
    kind: str,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    normed: bool = True,
    is_full: bool = False,
) -> Case:
    make = partial(_inputs, rows=rows, width=width, kind=kind, columns=columns, dtype=dtype, normed=normed)
    name = f"{rows}x{width}-{kind}{columns}-{dtype}-{'normed' if normed else 'plain'}"
    return Case("float_parts", name, make, is_full)


CASES = [
    _case(1, 256, "bf16", 9),
    _case(1, 256, "block", 128),
    _case(3, 512, "bf16", 33, torch.float32),
    _case(3, 512, "row", 64, torch.float32),
    _case(2, 512, "nvfp4", 40, normed=False),
    _case(9, 384, "block", 200, normed=False),
    _case(0, 128, "bf16", 8),
    _case(1, 3072, "bf16", 257, is_full=True),
    _case(12, 3072, "bf16", 257, is_full=True),
    _case(1, 3072, "block", 2048, is_full=True),
    _case(12, 3072, "block", 2048, is_full=True),
    _case(3, 1024, "block", 3072, normed=False, is_full=True),
    _case(3, 2048, "bf16", 257, is_full=True),
    _case(3, 2048, "nvfp4", 1024, is_full=True),
]
