"""A decode step's inputs as tensors: packed on the host into one buffer of 64-bit words, taken apart on the device.

One buffer means one copy to the device a step, and a captured graph finds its inputs where they were at capture. It is
packed while the device waits, so what stands in it from the step before and still holds is not written again.

The layout follows from three sizes (`StepSizes`): rows, sequences, and the width of the page table. Places beyond a step's
own rows and sequences are blank: rows of no sequence that write nowhere, sequences without rows. Page 0, the scratch
page, stands wherever a sequence has no page.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.step import PromptChunk, DecodeRows
from onebox.engine.request import SamplingParams
from onebox.model.linear import Phase
from onebox.model.qwen3_5 import Batch
from onebox.spec.kv import PAGE_TOKENS

__all__ = [
    "DrawInputs",
    "InputPacker",
    "StepSizes",
    "StepInputs",
    "exact_sizes",
    "last_row",
    "unpack",
]

Words = NDArray[Any]
W = TypeVar("W", Words, Tensor)

_NEW_ROW_FIELDS = {"token_ids": 0, "positions": 0, "rotary_positions": 0, "kv_slots": -1, "next_ids": -1, "verdicts": 0}
"""Of each row, written in every step, with what stands in a blank one."""
_ROW_FIELDS = ("row_sequence", "seeds", "top_k", "temperature", "top_p", "min_p")
"""These hold as long as the same sequences go on."""
_DRAFT_TOP_K = 64
"""Drafts are drawn from so many tokens at most: a wider choice costs more than it gains."""


class StepSizes(NamedTuple):
    """What a step's tensors are shaped by."""

    rows: int
    sequences: int
    pages: int
    """Columns of the page table."""

    @property
    def wide(self) -> dict[str, int]:
        """The fields of 64 bits, in their order, with their lengths."""
        return dict.fromkeys((*_NEW_ROW_FIELDS, *_ROW_FIELDS), self.rows)

    @property
    def narrow(self) -> dict[str, int]:
        """The fields of 32 bits, as the kernels take them; they come after the others."""
        new = dict.fromkeys(("slots", "keep", "seen"), self.sequences)
        return {**new, "cu_rows": self.sequences + 1, "page_table": self.sequences * self.pages}

    @property
    def words(self) -> int:
        return _up_to(sum(self.wide.values()), 2) + sum(_up_to(length, 4) for length in self.narrow.values()) // 2


def last_row(piece: PromptChunk) -> DecodeRows:
    """The prompt's last token, computed already; only what is drawn after it is of interest."""
    if piece.draw is None:
        raise RuntimeError(f"Nothing is drawn after this piece of request {piece.request_id}.")
    offset = piece.seen.offset if piece.seen else 0
    return DecodeRows(piece.request_id, piece.slot, piece.token_ids[-1:], piece.end - 1, 0, piece.pages, piece.draw, offset)


def exact_sizes(parts: Sequence[DecodeRows], depth: int) -> StepSizes:
    """The sizes of a step over these parts that drafts to this depth; the page table reaches the last draft."""
    num_rows = furthest = 0
    for part in parts:
        count = len(part.token_ids)
        num_rows += count
        furthest = max(furthest, part.start + count)
    return StepSizes(num_rows, len(parts), (furthest + depth) // PAGE_TOKENS + 1)


class DrawInputs(NamedTuple):
    """What drawing, checking and drafting need. int64 [R], but for the floats, float64 [R]."""

    positions: Tensor
    """The row's place in its sequence's tokens."""
    next_ids: Tensor
    verdicts: Tensor
    row_sequence: Tensor
    """The row's sequence; S for a row of none."""
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


class InputPacker:
    """Where the inputs of steps of one shape are put together, step after step."""

    def __init__(self, sizes: StepSizes, *, is_pinned: bool = False) -> None:
        """Blank at first: a step in which nothing happens. From pinned memory a device copies without the host."""
        self.words = torch.from_numpy(_blank(sizes))
        if is_pinned:
            self.words = self.words.pin_memory()
        self._sizes = sizes
        self._all: Words = self.words.numpy()
        self._new_rows = self._all[: len(_NEW_ROW_FIELDS) * sizes.rows]
        self._fields = _fields(self._all, sizes, np.int32)
        self._layout: list[tuple[int, SamplingParams]] = []
        """Of each sequence the number of its rows and how it is sampled, as they stand in the words."""
        self._pages: list[NDArray[np.int32] | None] = []
        """Of each sequence what stands in the table."""

    def pack(self, parts: Sequence[DecodeRows]) -> Tensor:
        """The inputs of a step over these parts: int64 words that hold until the next call."""
        if not self._has_layout_of(parts):
            self._lay_out(parts)
        for place, part in enumerate(parts):
            # The scheduler never writes into an array that it gave away: the same one holds the same pages.
            if part.pages is not self._pages[place]:
                self._put_pages(place, part.pages)
        # One assignment of one list: an assignment for each field would take longer than all the rest.
        self._new_rows[:] = self._rows_of(parts)
        self._fields["slots"][: len(parts)] = [part.slot for part in parts]
        self._fields["keep"][: len(parts)] = [part.keep for part in parts]
        self._fields["seen"][: len(parts)] = [part.end for part in parts]
        return self.words

    def _rows_of(self, parts: Sequence[DecodeRows]) -> list[int]:
        """The new fields of all rows, one field after the other."""
        token_ids: list[int] = []
        positions: list[int] = []
        rotary_positions: list[int] = []
        kv_slots: list[int] = []
        next_ids: list[int] = []
        verdicts: list[int] = []
        for part in parts:
            start, end, offset, pages = part.start, part.end, part.position_offset, part.pages
            token_ids += part.token_ids
            positions += range(start, end)
            rotary_positions += range(start + offset, end + offset)
            kv_slots += [pages.item(at // PAGE_TOKENS) * PAGE_TOKENS + at % PAGE_TOKENS for at in range(start, end)]
            next_ids += part.draw.next_ids
            verdicts += part.draw.verdicts
        num_blank = self._sizes.rows - len(token_ids)
        if num_blank:
            fields = (token_ids, positions, rotary_positions, kv_slots, next_ids, verdicts)
            for field, value in zip(fields, _NEW_ROW_FIELDS.values(), strict=True):
                field += [value] * num_blank
        return token_ids + positions + rotary_positions + kv_slots + next_ids + verdicts

    def _has_layout_of(self, parts: Sequence[DecodeRows]) -> bool:
        if len(parts) != len(self._layout):
            return False
        for part, (num_rows, sampling) in zip(parts, self._layout, strict=True):
            if part.draw.sampling is not sampling or len(part.token_ids) != num_rows:
                return False
        return True

    def _lay_out(self, parts: Sequence[DecodeRows]) -> None:
        """Writes what holds as long as the same sequences go on with as many rows each; all else is blank."""
        self._all[:] = _blank(self._sizes)
        self._layout = [(len(part.token_ids), part.draw.sampling) for part in parts]
        self._pages = [None] * len(parts)
        fields, first = self._fields, 0
        for place, (count, sampling) in enumerate(self._layout):
            end = first + count
            _put_settings({name: fields[name][first:end] for name in _ROW_FIELDS}, sampling)
            fields["row_sequence"][first:end] = place
            fields["cu_rows"][place + 1 :] = first = end

    def _put_pages(self, place: int, pages: NDArray[np.int32]) -> None:
        width = min(len(pages), self._sizes.pages)
        table = self._fields["page_table"]
        table[place, :width] = pages[:width]
        table[place, width:] = 0
        self._pages[place] = pages


def _blank(sizes: StepSizes) -> Words:
    words = np.zeros(sizes.words, dtype=np.int64)
    fields = _fields(words, sizes, np.int32)
    for name, value in _NEW_ROW_FIELDS.items():
        fields[name][:] = value
    fields["row_sequence"][:] = sizes.sequences
    fields["top_p"].view(np.float64)[:] = 1.0
    return words


def _put_settings(rows: dict[str, Words], sampling: SamplingParams) -> None:
    # Seeds are any integers; the noise takes their lowest 64 bits.
    rows["seeds"][:] = np.array([(sampling.seed or 0) & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64).view(np.int64)
    rows["top_k"][:] = sampling.top_k
    for name in ("temperature", "top_p", "min_p"):
        rows[name].view(np.float64)[:] = getattr(sampling, name)


def unpack(words: Tensor, sizes: StepSizes) -> StepInputs:
    """The same, as the model takes it, from the buffer on the model's device."""
    fields = _fields(words, sizes, torch.int32)
    batch = Batch(
        phase=Phase.DECODE,
        token_ids=fields["token_ids"],
        positions=fields["rotary_positions"].expand(3, -1),
        cu_rows=fields["cu_rows"],
        slots=fields["slots"],
        keep=fields["keep"],
        seen=fields["seen"],
        page_table=fields["page_table"],
        kv_slots=fields["kv_slots"],
    )
    draw = DrawInputs(
        fields["positions"],
        fields["next_ids"],
        fields["verdicts"],
        fields["row_sequence"],
        fields["seeds"],
        fields["top_k"],
        fields["temperature"].view(torch.float64),
        fields["top_p"].view(torch.float64),
        fields["min_p"].view(torch.float64),
    )
    return StepInputs(batch, draw)


def _fields(words: W, sizes: StepSizes, narrow: Any) -> dict[str, W]:
    """Views of the words by name, the narrow ones in that type; the page table as [S, pages].

    Each narrow field starts at a multiple of 16 bytes, as kernels like it.
    """
    fields, start = dict[str, W](), 0
    for name, length in sizes.wide.items():
        fields[name] = words[start : start + length]
        start += length
    rest, start = words[_up_to(start, 2) :].view(narrow), 0
    for name, length in sizes.narrow.items():
        fields[name] = rest[start : start + length]
        start += _up_to(length, 4)
    fields["page_table"] = fields["page_table"].reshape(sizes.sequences, sizes.pages)
    return fields


def _up_to(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step
