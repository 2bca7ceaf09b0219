"""Inputs of the norms: odd widths, one row, none, the published hidden sizes."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

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
    """A float32 sum whose norm is bfloat16."""

    def make(device: torch.device) -> dict[str, Any]:
        return _inputs(device, "rms_norm", rows, hidden, torch.float32) | {"dtype": torch.bfloat16}

    return Case("rms_norm", f"{rows}x{hidden}-to-bfloat16", make, is_full)


CASES = [
    *(_case(op, *shape) for op in ("add_rms_norm", "rms_norm", "concat_rms_norm") for shape in _SHAPES),
    _narrowing_case(3, 200, is_full=False),
    _narrowing_case(3, 3072, is_full=True),
]
