"""A decode step's inputs: packed on the host into one buffer of 64-bit words, split into fields on the device.

One buffer means one copy to the device per step, and a captured graph finds its inputs where they were at capture. The
device may wait while it is packed, so what the previous step left in it and still holds is not written again.

The layout follows from the numbers of rows and sequences (`StepSizes`). What lies beyond a step's own rows and
sequences is blank: rows of no sequence that write nowhere, sequences without rows. The sequences' pages are in a table
of their own (`PageTable`), which changes in few steps. `onebox.engine.batch` makes the model's tensors of both.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.draft.kinds import Drafter
from onebox.engine.request import SamplingParams
from onebox.engine.step import DecodeRows, PromptChunk
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["InputPacker", "PageTable", "StepSizes", "blocks_of", "exact_sizes", "last_row", "split_fields"]

Words = NDArray[Any]
W = TypeVar("W", Words, Tensor)

_NEW_ROW_FIELDS = {
    "token_ids": 0,
    "positions": 0,
    "rotary_positions": 0,
    "slot_mapping": -1,
    "next_ids": -1,
    "checks": 0,
}
"""Fields of each row that are written in every step, with their value in a blank row."""
_ROW_FIELDS = ("row_sequence", "seeds", "top_k", "temperature", "top_p", "min_p")
"""Fields of each row that stay as long as the same sequences continue."""


class StepSizes(NamedTuple):
    """What determines the shapes of a step's tensors."""

    num_rows: int
    num_sequences: int
    num_pages: int
    """Columns of the page table, which is not part of the packed buffer."""

    @property
    def wide(self) -> dict[str, int]:
        """The fields of 64 bits, in their order, with their lengths."""
        return dict.fromkeys((*_NEW_ROW_FIELDS, *_ROW_FIELDS), self.num_rows)

    @property
    def narrow(self) -> dict[str, int]:
        """The fields of 32 bits, as the kernels take them; they come after the others."""
        new = dict.fromkeys(("slots", "num_accepted", "seen", "block_order"), self.num_sequences)
        return {**new, "cu_rows": self.num_sequences + 1, "num_rows": 1, "num_sequences": 1}

    @property
    def num_words(self) -> int:
        return _round_up(sum(self.wide.values()), 2) + sum(_round_up(length, 4) for length in self.narrow.values()) // 2


def last_row(chunk: PromptChunk) -> DecodeRows:
    """The prompt's last token as a row that is computed already and only sampled from."""
    if chunk.draw is None:
        raise RuntimeError(f"Nothing is sampled after this chunk of request {chunk.request_id}.")
    offset = chunk.images.position_offset if chunk.images else 0
    return DecodeRows(
        chunk.request_id, chunk.slot, chunk.token_ids[-1:], chunk.end - 1, 0, chunk.pages, chunk.draw, offset
    )


def exact_sizes(parts: Sequence[DecodeRows], depth: int) -> StepSizes:
    """The sizes of a step over these parts that drafts to this depth; the page table reaches the last draft."""
    num_rows = furthest = 0
    for part in parts:
        count = len(part.token_ids)
        num_rows += count
        furthest = max(furthest, part.start + count)
    return StepSizes(num_rows, len(parts), (furthest + depth) // PAGE_TOKENS + 1)


def blocks_of(parts: Sequence[DecodeRows]) -> list[int]:
    """The places of the parts for which the block drafter drafts."""
    return [place for place, part in enumerate(parts) if part.draw.drafter is Drafter.DFLASH]


class InputPacker:
    """Packs the inputs of steps of one shape into one buffer, step after step."""

    def __init__(self, sizes: StepSizes, *, is_pinned: bool = False) -> None:
        """Blank at first: a step that does nothing. Pinned memory lets the device copy asynchronously."""
        self.words = torch.from_numpy(_blank(sizes))
        if is_pinned:
            self.words = self.words.pin_memory()
        self._sizes = sizes
        self._all: Words = self.words.numpy()
        self._new_rows = self._all[: len(_NEW_ROW_FIELDS) * sizes.num_rows]
        self._fields = split_fields(self._all, sizes, np.int32)
        self._packed: list[tuple[int, SamplingParams]] = []
        """The number of rows and the sampling of each sequence, as they are in the buffer."""

    def pack(self, parts: Sequence[DecodeRows], *, is_computed: bool = False) -> Tensor:
        """The inputs of a step over these parts: int64 words, valid until the next call.

        `is_computed`: only sampling is left; the rows have no slots, for all that belongs there was written.
        """
        if not self._has_same_rows(parts):
            self._write_settings(parts)
        # One assignment of one list: an assignment for each field would take longer than all the rest.
        self._new_rows[:] = self._rows_of(parts)
        if is_computed:
            self._fields["slot_mapping"][:] = -1
        if blocks := blocks_of(parts):
            # Places that are left repeat the first one: its block is computed again, with the same drafts.
            self._fields["block_order"][:] = blocks + blocks[:1] * (self._sizes.num_sequences - len(blocks))
        self._fields["slots"][: len(parts)] = [part.slot for part in parts]
        self._fields["num_accepted"][: len(parts)] = [part.num_accepted for part in parts]
        self._fields["seen"][: len(parts)] = [part.end for part in parts]
        return self.words

    def _rows_of(self, parts: Sequence[DecodeRows]) -> list[int]:
        """The fields of all rows that change in every step, one field after the other."""
        token_ids: list[int] = []
        positions: list[int] = []
        rotary_positions: list[int] = []
        slot_mapping: list[int] = []
        next_ids: list[int] = []
        checks: list[int] = []
        for part in parts:
            start, end, offset, pages = part.start, part.end, part.position_offset, part.pages
            token_ids += part.token_ids
            positions += range(start, end)
            rotary_positions += range(start + offset, end + offset)
            slot_mapping += [pages.item(at // PAGE_TOKENS) * PAGE_TOKENS + at % PAGE_TOKENS for at in range(start, end)]
            next_ids += part.draw.next_ids
            checks += part.draw.checks
        num_blank = self._sizes.num_rows - len(token_ids)
        if num_blank:
            fields = (token_ids, positions, rotary_positions, slot_mapping, next_ids, checks)
            for field, value in zip(fields, _NEW_ROW_FIELDS.values(), strict=True):
                field += [value] * num_blank
        return token_ids + positions + rotary_positions + slot_mapping + next_ids + checks

    def _has_same_rows(self, parts: Sequence[DecodeRows]) -> bool:
        if len(parts) != len(self._packed):
            return False
        for part, (num_rows, sampling) in zip(parts, self._packed, strict=True):
            if part.draw.sampling is not sampling or len(part.token_ids) != num_rows:
                return False
        return True

    def _write_settings(self, parts: Sequence[DecodeRows]) -> None:
        """Writes what stays while the same sequences continue with as many rows each; all else is blank."""
        self._all[:] = _blank(self._sizes)
        self._packed = [(len(part.token_ids), part.draw.sampling) for part in parts]
        fields, first = self._fields, 0
        for place, (count, sampling) in enumerate(self._packed):
            end = first + count
            _put_settings({name: fields[name][first:end] for name in _ROW_FIELDS}, sampling)
            fields["row_sequence"][first:end] = place
            fields["cu_rows"][place + 1 :] = first = end
        fields["num_rows"][:] = first
        fields["num_sequences"][:] = len(parts)


class PageTable:
    """The pages of a step's sequences on the host, int32 [sequences, pages], step after step.

    Where a sequence has no page, and in the rows of blank sequences, it names page 0, the scratch page.
    """

    def __init__(self, num_sequences: int, num_pages: int, *, is_pinned: bool = False) -> None:
        self.rows = torch.zeros(num_sequences, num_pages, dtype=torch.int32, pin_memory=is_pinned)
        self._array: Words = self.rows.numpy()
        self._pages: list[NDArray[np.int32]] = []
        """The pages of each sequence, as they are in the table."""

    def holds(self, parts: Sequence[DecodeRows] | Sequence[PromptChunk]) -> bool:
        """Whether it has the pages of these parts and of no others."""
        pages = [part.pages for part in parts]
        # The scheduler never changes an array that it gave away: the same array holds the same pages.
        return len(pages) == len(self._pages) and all(map(operator.is_, pages, self._pages))

    def put(self, parts: Sequence[DecodeRows] | Sequence[PromptChunk]) -> int:
        """Writes the pages of these parts; the number of leading rows among which some changed, 0 if none did."""
        if self.holds(parts):
            return 0
        pages = [part.pages for part in parts]
        before, self._pages = self._pages, pages
        num_columns = self._array.shape[1]
        for row, own in zip(self._array, pages, strict=False):
            width = min(len(own), num_columns)
            row[:width] = own[:width]
            row[width:] = 0
        self._array[len(pages) : len(before)] = 0
        return max(len(pages), len(before))


def _blank(sizes: StepSizes) -> Words:
    words = np.zeros(sizes.num_words, dtype=np.int64)
    fields = split_fields(words, sizes, np.int32)
    for name, value in _NEW_ROW_FIELDS.items():
        fields[name][:] = value
    fields["row_sequence"][:] = sizes.num_sequences
    fields["top_p"].view(np.float64)[:] = 1.0
    return words


def _put_settings(rows: dict[str, Words], sampling: SamplingParams) -> None:
    # Seeds are any integers; the noise takes their lowest 64 bits.
    rows["seeds"][:] = np.array([(sampling.seed or 0) & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64).view(np.int64)
    rows["top_k"][:] = sampling.top_k
    for name in ("temperature", "top_p", "min_p"):
        rows[name].view(np.float64)[:] = getattr(sampling, name)


def split_fields(words: W, sizes: StepSizes, narrow: Any) -> dict[str, W]:
    """Views of the words by name, the 32-bit ones in the type `narrow`.

    Each narrow field starts at a multiple of 16 bytes, as kernels want it.
    """
    fields, start = dict[str, W](), 0
    for name, length in sizes.wide.items():
        fields[name] = words[start : start + length]
        start += length
    narrow_words, start = words[_round_up(start, 2) :].view(narrow), 0
    for name, length in sizes.narrow.items():
        fields[name] = narrow_words[start : start + length]
        start += _round_up(length, 4)
    return fields


def _round_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step
