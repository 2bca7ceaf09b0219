"""A decode step's inputs as tensors: packed on the host into one buffer of 64-bit words, taken apart on the device.

One buffer means one copy to the device a step, and a captured graph finds its inputs where they were at capture. The
layout follows from three sizes (`Sizes`): rows, sequences, and the width of the page table. Places beyond a step's own
rows and sequences are blank: rows of no sequence that write nowhere, sequences without rows. Page 0, the scratch page,
stands wherever a sequence has no page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.batch import Draw, Piece, Rows
from onebox.engine.config import PAGE_TOKENS
from onebox.model.linear import Phase
from onebox.model.qwen3_5 import Batch

__all__ = [
    "DrawInputs",
    "Entry",
    "Sizes",
    "StepInputs",
    "blank",
    "entry_of_piece",
    "entry_of_rows",
    "exact_sizes",
    "pack",
    "unpack",
]

Words = NDArray[np.int64]
W = TypeVar("W", Words, Tensor)

_ROW_FIELDS = (
    "token_ids",
    "positions",
    "rotary_positions",
    "kv_slots",
    "next_ids",
    "verdicts",
    "row_sequence",
    "row_place",
    "seeds",
    "top_k",
    "temperature",
    "top_p",
    "min_p",
)
_SEQUENCE_FIELDS = ("slots", "keep", "seen", "num_rows")
_DRAFT_TOP_K = 64
"""Drafts are drawn from so many tokens at most: a wider choice costs more than it gains."""


class Sizes(NamedTuple):
    """What a step's tensors are shaped by."""

    rows: int
    sequences: int
    pages: int
    """Columns of the page table."""

    @property
    def words(self) -> int:
        per_sequence = len(_SEQUENCE_FIELDS) + self.pages + 1
        return len(_ROW_FIELDS) * self.rows + per_sequence * self.sequences + 1


@dataclass(frozen=True)
class Entry:
    """One sequence's part of a step: its rows, where they stand, and what is drawn after them."""

    slot: int
    token_ids: tuple[int, ...]
    start: int
    keep: int
    pages: NDArray[np.int32]
    draw: Draw
    position_offset: int


def entry_of_rows(rows: Rows) -> Entry:
    return Entry(rows.slot, rows.token_ids, rows.start, rows.keep, rows.pages, rows.draw, rows.position_offset)


def entry_of_piece(piece: Piece) -> Entry:
    """The prompt's last token, computed already; only what is drawn after it is of interest."""
    if piece.draw is None:
        raise RuntimeError(f"Nothing is drawn after this piece of request {piece.request_id}.")
    offset = piece.seen.offset if piece.seen else 0
    return Entry(piece.slot, piece.token_ids[-1:], piece.end - 1, 0, piece.pages, piece.draw, offset)


def exact_sizes(entries: Sequence[Entry], depth: int) -> Sizes:
    """The sizes of a step over these entries that drafts to this depth; the page table reaches the last draft."""
    pages = max((entry.start + len(entry.token_ids) + depth) // PAGE_TOKENS + 1 for entry in entries)
    return Sizes(sum(len(entry.token_ids) for entry in entries), len(entries), pages)


class DrawInputs(NamedTuple):
    """What drawing, checking and drafting need. int64 [R], but for the floats, float64 [R], and `num_rows`."""

    positions: Tensor
    """The row's place in its sequence's tokens."""
    next_ids: Tensor
    verdicts: Tensor
    row_sequence: Tensor
    """The row's sequence; S for a row of none."""
    row_place: Tensor
    """The row's place among its sequence's rows."""
    num_rows: Tensor
    """int64 [S]."""
    seeds: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor

    @property
    def draft_top_k(self) -> Tensor:
        return torch.where(self.top_k > 0, self.top_k, _DRAFT_TOP_K).clamp(max=_DRAFT_TOP_K)


class StepInputs(NamedTuple):
    batch: Batch
    draw: DrawInputs


def blank(sizes: Sizes) -> Words:
    """The inputs of a step in which nothing happens."""
    words = np.zeros(sizes.words, dtype=np.int64)
    rows = _row_fields(words, sizes)
    rows["kv_slots"][:] = -1
    rows["next_ids"][:] = -1
    rows["row_sequence"][:] = sizes.sequences
    for name in ("top_p", "min_p", "temperature"):
        rows[name].view(np.float64)[:] = 1.0 if name == "top_p" else 0.0
    return words


def pack(entries: Sequence[Entry], sizes: Sizes) -> Words:
    """The inputs of a step over these entries."""
    words = blank(sizes)
    rows, per_sequence = _row_fields(words, sizes), _sequence_fields(words, sizes)
    cu_rows, table = _edges(words, sizes), _table(words, sizes)
    first = 0
    for place, entry in enumerate(entries):
        end = first + len(entry.token_ids)
        _pack_rows({name: field[first:end] for name, field in rows.items()}, entry, place)
        for name, value in (
            ("slots", entry.slot),
            ("keep", entry.keep),
            ("seen", entry.start + len(entry.token_ids)),
            ("num_rows", len(entry.token_ids)),
        ):
            per_sequence[name][place] = value
        width = min(len(entry.pages), sizes.pages)
        table[place, :width] = entry.pages[:width]
        cu_rows[place + 1] = first = end
    cu_rows[len(entries) + 1 :] = first
    return words


def _pack_rows(rows: dict[str, Words], entry: Entry, place: int) -> None:
    count, sampling = len(entry.token_ids), entry.draw.sampling
    positions = np.arange(entry.start, entry.start + count)
    rows["token_ids"][:] = entry.token_ids
    rows["positions"][:] = positions
    rows["rotary_positions"][:] = positions + entry.position_offset
    rows["kv_slots"][:] = entry.pages[positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS
    rows["next_ids"][:] = entry.draw.next_ids
    rows["verdicts"][:] = entry.draw.verdicts
    rows["row_sequence"][:] = place
    rows["row_place"][:] = np.arange(count)
    # Seeds are any integers; the noise takes their lowest 64 bits.
    rows["seeds"][:] = np.array([(sampling.seed or 0) & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64).view(np.int64)
    rows["top_k"][:] = sampling.top_k
    rows["temperature"].view(np.float64)[:] = sampling.temperature
    rows["top_p"].view(np.float64)[:] = sampling.top_p
    rows["min_p"].view(np.float64)[:] = sampling.min_p


def unpack(words: Tensor, sizes: Sizes) -> StepInputs:
    """The same, as the model takes it, from the buffer on the model's device."""
    rows, per_sequence = _row_fields(words, sizes), _sequence_fields(words, sizes)
    batch = Batch(
        phase=Phase.DECODE,
        token_ids=rows["token_ids"],
        positions=rows["rotary_positions"].expand(3, -1),
        cu_rows=_edges(words, sizes).to(torch.int32),
        slots=per_sequence["slots"].to(torch.int32),
        keep=per_sequence["keep"].to(torch.int32),
        seen=per_sequence["seen"].to(torch.int32),
        page_table=_table(words, sizes).to(torch.int32),
        kv_slots=rows["kv_slots"],
    )
    draw = DrawInputs(
        rows["positions"],
        rows["next_ids"],
        rows["verdicts"],
        rows["row_sequence"],
        rows["row_place"],
        per_sequence["num_rows"],
        rows["seeds"],
        rows["top_k"],
        rows["temperature"].view(torch.float64),
        rows["top_p"].view(torch.float64),
        rows["min_p"].view(torch.float64),
    )
    return StepInputs(batch, draw)


def _row_fields(words: W, sizes: Sizes) -> dict[str, W]:
    return {name: words[i * sizes.rows : (i + 1) * sizes.rows] for i, name in enumerate(_ROW_FIELDS)}


def _sequence_fields(words: W, sizes: Sizes) -> dict[str, W]:
    rest = words[len(_ROW_FIELDS) * sizes.rows :]
    return {name: rest[i * sizes.sequences : (i + 1) * sizes.sequences] for i, name in enumerate(_SEQUENCE_FIELDS)}


def _edges(words: W, sizes: Sizes) -> W:
    start = len(_ROW_FIELDS) * sizes.rows + len(_SEQUENCE_FIELDS) * sizes.sequences
    return words[start : start + sizes.sequences + 1]


def _table(words: W, sizes: Sizes) -> W:
    return words[sizes.words - sizes.sequences * sizes.pages :].reshape(sizes.sequences, sizes.pages)
