"""When a drafter's context gets the rows of decode steps.

A context holds every committed token, whoever drafts. Where steps are captured graphs, each writes its own rows. On a
CPU a write is a tenth of a step, however few its rows, so rows are kept until their drafter drafts again or until there
are too many of them, and rejected ones are never written. A drafter that is not used then costs next to nothing.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from onebox.model.batch import Batch

__all__ = ["ContextWriter", "Write", "WrittenAtOnce", "WrittenLate"]

Write = Callable[[Batch, Tensor], None]
"""Writes the context of a batch's rows, from the vectors [R, W] that it is made of."""


class ContextWriter(Protocol):
    """Of one drafter, for all sequences."""

    def add(self, batch: Batch, vectors: Tensor) -> None:
        """Takes the rows of a decode step; rejected ones come last in their sequence."""

    def write_before(self, batch: Batch) -> None:
        """Before the drafter reads: writes what these sequences have before the rows of `batch`."""

    def write_up_to(self, slots: Tensor, ends: Tensor) -> None:
        """The same up to the places `ends`, int [S], of the sequences in these slots."""

    def drop(self, slot: int) -> None:
        """Another sequence begins in this slot, or the same one anew."""


class WrittenAtOnce:
    """Rejected rows, too: the next step overwrites them before they are read."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def add(self, batch: Batch, vectors: Tensor) -> None:
        self._write(batch, vectors)

    def write_before(self, batch: Batch) -> None: ...

    def write_up_to(self, slots: Tensor, ends: Tensor) -> None: ...

    def drop(self, slot: int) -> None: ...


class WrittenLate:
    """Keeps one stretch of rows for each slot, in `kept` [slots, rows, W]."""

    def __init__(self, write: Write, kept: Tensor) -> None:
        self._write = write
        self._kept = kept
        self._numbers = torch.zeros(len(kept), 3, kept.shape[1], dtype=torch.int64)
        """Of each row its token, its position and where it is written."""
        self._words = self._numbers.numpy()
        """The same: numpy copies few numbers faster than torch does."""
        self._first: dict[int, int] = {}
        """By slot: the place of the first row that is kept, among the sequence's tokens."""

    def add(self, batch: Batch, vectors: Tensor) -> None:
        numbers = [part.numpy() for part in (batch.token_ids, batch.positions[0], batch.slot_mapping)]
        for slot, place, first, end in _segments(batch):
            # Rows that were kept from this place on were rejected.
            if place - self._first.get(slot, place) + end - first > self._kept.shape[1]:
                self._write_rows(slot, place)
            start = place - self._first.setdefault(slot, place)
            self._kept[slot, start : start + end - first] = vectors[first:end]
            for words, own in zip(self._words[slot], numbers, strict=True):
                words[start : start + end - first] = own[first:end]

    def write_before(self, batch: Batch) -> None:
        for slot, place, _, _ in _segments(batch):
            self._write_rows(slot, place)

    def write_up_to(self, slots: Tensor, ends: Tensor) -> None:
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            self._write_rows(slot, end)

    def drop(self, slot: int) -> None:
        self._first.pop(slot, None)

    def _write_rows(self, slot: int, end: int) -> None:
        count = end - self._first.pop(slot, end)
        if not count:
            return
        token_ids, positions, slot_mapping = self._numbers[slot, :, :count]
        edges, slots, seen, none = (torch.tensor(part, dtype=torch.int32) for part in ([0, count], [slot], [end], [0]))
        batch = Batch(
            token_ids=token_ids,
            positions=positions.expand(3, -1),
            cu_rows=edges,
            slots=slots,
            num_accepted=none,
            seen=seen,
            page_table=none.view(1, 1),
            slot_mapping=slot_mapping,
        )
        self._write(batch, self._kept[slot, :count])


def _segments(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Of each sequence: its slot, the place of its first row among its tokens, and its rows in the batch."""
    ends = batch.seen.tolist()
    for slot, seen, (first, end) in zip(batch.slots.tolist(), ends, pairwise(batch.cu_rows.tolist()), strict=True):
        yield slot, seen - (end - first), first, end
