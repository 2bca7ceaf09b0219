"""Inputs of the router: any number of experts, ties, one expert, no row, the published 256."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]


def _inputs(device: torch.device, rows: int, experts: int, k: int, step: float) -> dict[str, Any]:
    logits = 3 * torch.randn(rows, experts, generator=generator(rows * experts + k))
    if step:  # a coarse grid makes many ties, and both zeros
        logits = (logits / step).round() * step
    return {"logits": logits.to(device), "k": k}


def _case(rows: int, experts: int, k: int, step: float = 0.0, is_full: bool = False) -> Case:
    make = partial(_inputs, rows=rows, experts=experts, k=k, step=step)
    return Case("route", f"{rows}x{experts}-top{k}{'-ties' if step else ''}", make, is_full)


CASES = [
    _case(1, 8, 2),
    _case(3, 5, 5),
    _case(4, 37, 3, step=2.0),
    _case(5, 256, 8, step=0.5),
    _case(2, 60, 16),
    _case(2, 1, 1),
    _case(0, 8, 2),
    _case(1, 256, 8, is_full=True),
    _case(64, 256, 8, is_full=True),
    _case(2048, 256, 8, step=0.25, is_full=True),
]
