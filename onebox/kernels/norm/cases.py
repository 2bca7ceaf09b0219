"""Inputs of the norms: odd widths, one row, the published hidden sizes."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]


def _inputs(device: torch.device, rows: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * hidden))
    return {
        "x": draw(rows, hidden).to(dtype).to(device),
        "residual": (3 * draw(rows, hidden)).to(device),
        "weight": (0.1 * draw(hidden)).to(torch.bfloat16).to(device),
        "eps": 1e-6,
    }


def _case(rows: int, hidden: int, dtype: torch.dtype, is_full: bool) -> Case:
    make = partial(_inputs, rows=rows, hidden=hidden, dtype=dtype)
    return Case("add_rms_norm", f"{rows}x{hidden}-{dtype}", make, is_full)


CASES = [
    _case(rows, hidden, dtype, is_full)
    for rows, hidden, dtype, is_full in [
        (1, 128, torch.bfloat16, False),
        (3, 200, torch.float32, False),
        (5, 257, torch.bfloat16, False),
        (1, 3072, torch.bfloat16, True),
        (64, 3072, torch.bfloat16, True),
        (8, 2048, torch.float32, True),
    ]
]
