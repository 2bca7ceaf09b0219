"""Inputs of the norms: odd widths, no row, float32 and bfloat16, sums of several parts."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.common.case import Case, generator

__all__ = ["CASES"]

_SHAPES = [
    (1, 128, torch.bfloat16, False),
    (3, 200, torch.float32, False),
    (5, 257, torch.bfloat16, False),
    (0, 64, torch.bfloat16, False),
    (1, 3072, torch.bfloat16, True),
    (64, 3072, torch.bfloat16, True),
    (8, 2048, torch.float32, True),
]


def _inputs(device: torch.device, op: str, rows: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * hidden))
    x, other = draw(rows, hidden).to(dtype), 3 * draw(rows, hidden)
    weight, other_weight = (0.1 * draw(2, hidden)).to(torch.bfloat16)
    arguments: dict[str, Any] = {
        "add_rms_norm": {"x": x, "residual": other, "weight": weight},
        "rms_norm": {"x": x, "weight": weight},
        "concat_rms_norm": {
            "embedding": x,
            "hidden": other.to(dtype),
            "embedding_weight": weight,
            "hidden_weight": other_weight,
        },
    }[op]
    return {name: tensor.to(device) for name, tensor in arguments.items()} | {"eps": 1e-6}


def _case(op: str, rows: int, hidden: int, dtype: torch.dtype, is_full: bool) -> Case:
    make = partial(_inputs, op=op, rows=rows, hidden=hidden, dtype=dtype)
    return Case(op, f"{rows}x{hidden}-{dtype}", make, is_full)


def _narrowing_case(rows: int, hidden: int, is_full: bool) -> Case:
    """A float32 sum with a bfloat16 norm."""

    def make(device: torch.device) -> dict[str, Any]:
        return _inputs(device, "rms_norm", rows, hidden, torch.float32) | {"dtype": torch.bfloat16}

    return Case("rms_norm", f"{rows}x{hidden}-to-bfloat16", make, is_full)


def _sum_inputs(
    device: torch.device,
    shape: tuple[int, int],
    terms: tuple[int, int],
    dtype: torch.dtype,
    by_row: bool,
    residual: torch.dtype | None,
) -> dict[str, Any]:
    """Arguments for rows of `shape` [R, H]; `terms` counts the parts to be added and those of the shared expert."""
    (rows, hidden), (parts, shared) = shape, terms
    draw = partial(torch.randn, generator=generator(rows * hidden + parts))
    arguments: dict[str, Any] = {
        "parts": draw(parts, rows, hidden),
        "weight": 0.1 * draw(hidden),
    }
    if shared:
        arguments |= {"shared": draw(shared, rows, hidden), "share": torch.sigmoid(draw(rows))}
    moved = {name: tensor.to(device) for name, tensor in arguments.items()}
    moved["residual"] = None if residual is None else (3 * draw(rows, hidden)).to(residual).to(device)
    if by_row:  # the slots of a row's experts are adjacent in memory
        moved["parts"] = moved["parts"].transpose(0, 1).contiguous().transpose(0, 1)
    return moved | {"eps": 1e-6, "dtype": dtype}


def _sum_case(
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
    shape, terms = (rows, hidden), (parts, shared)
    make = partial(_sum_inputs, shape=shape, terms=terms, dtype=dtype, by_row=by_row, residual=residual)
    return Case("add_rms_norm_fused", f"{rows}x{hidden}-{residual}+{parts}+{shared}-{dtype}", make, is_full)


CASES = [
    *(_case(op, *shape) for op in ("add_rms_norm", "rms_norm", "concat_rms_norm") for shape in _SHAPES),
    _narrowing_case(3, 200, is_full=False),
    _narrowing_case(3, 3072, is_full=True),
    _sum_case(1, 128, 0, 0, torch.bfloat16),
    _sum_case(3, 256, 3, 0, torch.float32),
    _sum_case(2, 384, 2, 4, torch.bfloat16, by_row=True),
    _sum_case(0, 128, 1, 0, torch.bfloat16),
    _sum_case(2, 128, 0, 0, torch.bfloat16, residual=torch.bfloat16),
    _sum_case(2, 128, 2, 0, torch.bfloat16, residual=None),
    _sum_case(1, 3072, 8, 8, torch.bfloat16, by_row=True, is_full=True),
    _sum_case(12, 3072, 8, 0, torch.bfloat16, is_full=True),
    _sum_case(64, 2048, 8, 4, torch.float32, by_row=True, is_full=True),
]
