"""Inputs of a decode step's sum and norm: no part, no residual, a split's parts, experts' slots with a shared one."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]


def _inputs(
    device: torch.device,
    rows: int,
    hidden: int,
    parts: int,
    shared: int,
    dtype: torch.dtype,
    by_row: bool,
    residual: torch.dtype | None,
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * hidden + parts))
    arguments: dict[str, Any] = {
        "parts": draw(parts, rows, hidden),
        "weight": 0.1 * draw(hidden),
    }
    if shared:
        arguments |= {"shared": draw(shared, rows, hidden), "share": torch.sigmoid(draw(rows))}
    moved = {name: tensor.to(device) for name, tensor in arguments.items()}
    moved["residual"] = None if residual is None else (3 * draw(rows, hidden)).to(residual).to(device)
    if by_row:  # the slots of experts lie behind one another in a row
        moved["parts"] = moved["parts"].transpose(0, 1).contiguous().transpose(0, 1)
    return moved | {"eps": 1e-6, "dtype": dtype}


def _case(
    rows: int,
    hidden: int,
    parts: int,
    shared: int,
    dtype: torch.dtype,
    *,
    by_row: bool = False,
    residual: torch.dtype | None = torch.float32,
    is_full: bool = False,
) -> Case:
    make = partial(
        _inputs,
        rows=rows,
        hidden=hidden,
        parts=parts,
        shared=shared,
        dtype=dtype,
        by_row=by_row,
        residual=residual,
    )
    return Case("add_norm", f"{rows}x{hidden}-{residual}+{parts}+{shared}-{dtype}", make, is_full)


CASES = [
    _case(1, 128, 0, 0, torch.bfloat16),
    _case(3, 256, 3, 0, torch.float32),
    _case(2, 384, 2, 4, torch.bfloat16, by_row=True),
    _case(0, 128, 1, 0, torch.bfloat16),
    _case(2, 128, 0, 0, torch.bfloat16, residual=torch.bfloat16),
    _case(2, 128, 2, 0, torch.bfloat16, residual=None),
    _case(1, 3072, 8, 8, torch.bfloat16, by_row=True, is_full=True),
    _case(12, 3072, 8, 0, torch.bfloat16, is_full=True),
    _case(64, 2048, 8, 4, torch.float32, by_row=True, is_full=True),
]
