"""Steps to decide: single rows, drafts right and wrong by themselves or by decree, rows without numbers or sequence."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]


def _inputs(device: torch.device, counts: list[int], blank: int) -> dict[str, Any]:
    """Sequences of so many rows; most drafts are the token drawn."""
    rows = sum(counts) + blank
    draw = generator(rows + len(counts))
    drawn = torch.randint(0, 1000, (rows,), generator=draw)
    differs = torch.rand(rows, generator=draw) < 0.3
    verdicts = torch.randint(0, 3, (rows,), generator=draw) * (torch.rand(rows, generator=draw) < 0.3)
    drawn[torch.rand(rows, generator=draw) < 0.1] = -1
    tensors = {
        "words": torch.zeros(2 * rows + len(counts), dtype=torch.int64),
        "drawn": drawn,
        "next_ids": torch.where(differs, -1, drawn),
        "verdicts": verdicts,
        "cu_rows": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _case(counts: list[int], blank: int = 0, is_full: bool = False) -> Case:
    name = f"{len(counts)}-sequences-{sum(counts)}-rows-{blank}-blank"
    return Case("settle", name, partial(_inputs, counts=counts, blank=blank), is_full, ("words",))


CASES = [
    _case([1]),
    _case([5]),
    _case([1, 1, 1], blank=2),
    _case([3, 9, 1, 0, 4], blank=7),
    _case([64]),
    _case([3] * 16, blank=16, is_full=True),
]
