"""Inputs of a step's bookkeeping."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.common.case import Case, generator
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["CASES"]


def _inputs(device: torch.device, tokens: int, sequences: int, pages: int) -> dict[str, Any]:
    draw = generator(tokens + sequences)
    tensors = {
        "page_table": torch.randint(0, 2**24, (sequences, pages), generator=draw, dtype=torch.int32),
        "sequences": torch.randint(0, sequences + 1, (tokens,), generator=draw),
        "positions": torch.randint(0, (pages + 1) * PAGE_TOKENS, (tokens,), generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"page_tokens": PAGE_TOKENS}


def _case(tokens: int, sequences: int, pages: int, is_full: bool = False) -> Case:
    make = partial(_inputs, tokens=tokens, sequences=sequences, pages=pages)
    return Case("slot_mapping", f"{tokens}-tokens-{sequences}x{pages}-pages", make, is_full)


_SLOTS_CASES = [_case(1, 1, 1), _case(9, 3, 4), _case(70, 8, 2), _case(0, 1, 1), _case(64, 16, 4096, is_full=True)]


def _settle_inputs(device: torch.device, counts: list[int], blank: int) -> dict[str, Any]:
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


def _settle_case(counts: list[int], blank: int = 0, is_full: bool = False) -> Case:
    name = f"{len(counts)}-sequences-{sum(counts)}-rows-{blank}-blank"
    return Case("verify_drafts", name, partial(_settle_inputs, counts=counts, blank=blank), is_full, ("words",))


_SETTLE_CASES = [
    _settle_case([1]),
    _settle_case([5]),
    _settle_case([1, 1, 1], blank=2),
    _settle_case([3, 9, 1, 0, 4], blank=7),
    _settle_case([64]),
    _settle_case([3] * 16, blank=16, is_full=True),
]


def _advance_inputs(device: torch.device, sequences: int, depth: int, pages: int, blank: int) -> dict[str, Any]:
    """Each sequence with 1 + depth rows, then `blank` sequences and rows of none."""
    draw = generator(sequences * 100 + depth)
    rows_each, total = 1 + depth, sequences + blank
    num_rows = sequences * rows_each
    most = pages * PAGE_TOKENS - rows_each
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
        "slot_mapping": torch.full((num_rows + blank,), -1),
        "num_accepted": torch.zeros(total, dtype=torch.int32),
        "seen": seen,
        "cu_rows": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32),
        "page_table": torch.randint(1, 99, (total, pages), generator=draw, dtype=torch.int32),
        "drawn": torch.randint(0, 1000, (num_rows + blank,), generator=draw),
        "num_kept": torch.where(counts > 0, kept, 0),
        "drafts": torch.randint(0, 1000, (total, depth), generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"page_tokens": PAGE_TOKENS}


def _advance_case(sequences: int, depth: int, pages: int, blank: int = 0, is_full: bool = False) -> Case:
    make = partial(_advance_inputs, sequences=sequences, depth=depth, pages=pages, blank=blank)
    name = f"{sequences}x{1 + depth}-of-{pages}-pages{f'-and-{blank}-blank' if blank else ''}"
    return Case("next_inputs", name, make, is_full, ("token_ids", "positions", "slot_mapping", "num_accepted", "seen"))


_ADVANCE_CASES = [
    _advance_case(1, 0, 1),
    _advance_case(1, 2, 1),
    _advance_case(3, 0, 4, blank=2),
    _advance_case(4, 4, 2, blank=1),
    _advance_case(1, 2, 4096, is_full=True),
    _advance_case(16, 3, 128, blank=3, is_full=True),
]


CASES = [*_SLOTS_CASES, *_SETTLE_CASES, *_ADVANCE_CASES]
