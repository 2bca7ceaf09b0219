"""Steps to move on from: with and without drafts, one at the table's end, with rows and sequences that are none."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]

_PAGE = 64


def _inputs(device: torch.device, sequences: int, depth: int, pages: int, blank: int) -> dict[str, Any]:
    """Each sequence with 1 + depth rows, then `blank` sequences and rows of none."""
    draw = generator(sequences * 100 + depth)
    rows_each, total = 1 + depth, sequences + blank
    num_rows = sequences * rows_each
    most = pages * _PAGE - rows_each
    starts = torch.randint(0, most, (sequences,), generator=draw)
    starts[-1:] = most  # whatever it keeps, its next rows pass the table's end
    counts = torch.tensor([rows_each] * sequences + [0] * blank)
    places = starts.repeat_interleave(rows_each) + torch.arange(rows_each).repeat(sequences)
    kept = torch.randint(1, rows_each + 1, (total,), generator=draw)
    seen = torch.zeros(total, dtype=torch.int32)
    seen[:sequences] = starts + rows_each
    tensors = {
        "token_ids": torch.randint(0, 1000, (num_rows + blank,), generator=draw),
        "positions": torch.cat([places + 5, torch.zeros(blank, dtype=torch.int64)]),
        "kv_slots": torch.full((num_rows + blank,), -1),
        "keep": torch.zeros(total, dtype=torch.int32),
        "seen": seen,
        "cu_rows": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32),
        "page_table": torch.randint(1, 99, (total, pages), generator=draw, dtype=torch.int32),
        "drawn": torch.randint(0, 1000, (num_rows + blank,), generator=draw),
        "num_kept": torch.where(counts > 0, kept, 0),
        "drafts": torch.randint(0, 1000, (total, depth), generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"page_tokens": _PAGE}


def _case(sequences: int, depth: int, pages: int, blank: int = 0, is_full: bool = False) -> Case:
    make = partial(_inputs, sequences=sequences, depth=depth, pages=pages, blank=blank)
    name = f"{sequences}x{1 + depth}-of-{pages}-pages{f'-and-{blank}-blank' if blank else ''}"
    return Case("advance", name, make, is_full, ("token_ids", "positions", "kv_slots", "keep", "seen"))


CASES = [
    _case(1, 0, 1),
    _case(1, 2, 1),
    _case(3, 0, 4, blank=2),
    _case(4, 4, 2, blank=1),
    _case(1, 2, 4096, is_full=True),
    _case(16, 3, 128, blank=3, is_full=True),
]
