"""Rows of decode steps that a drafter's context lacks, on a CPU.

A context holds every committed token, whoever drafts. Where steps are captured graphs, each writes its own rows. On a
CPU a write is a tenth of a step, however few its rows, so rows are kept until their drafter drafts again or until there
are too many of them, and rejected ones are never written. A drafter that is not used then costs next to nothing.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.kernels.step import slot_mapping
from onebox.model.batch import Batch
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["LateContext", "Write"]

Write = Callable[[Batch, Tensor], None]
"""Writes the context of a batch's rows, from the vectors [R, W] that it is made of."""


class _Rows(NamedTuple):
    """The rows of one sequence in a decode step, as far as they are not known to be rejected."""

    place: int
    """Of the first row among the sequence's tokens."""
    num_rows: int
    position_offset: int
    """What is added to the place of a row to give its position."""
    page_table: Tensor
    """int32 [S, pages]."""
    number: int
    """The sequence's row of it."""
    token_ids: Tensor
    """int64 [num_rows or more], and so the vectors [num_rows or more, W]."""
    vectors: Tensor

    def up_to(self, place: int) -> "_Rows":
        """Without those from `place` on. They take memory still if they are fewer than the others."""
        num_rows = min(self.num_rows, place - self.place)
        token_ids, vectors = self.token_ids, self.vectors
        if 2 * num_rows < len(vectors):
            token_ids, vectors = token_ids[:num_rows].clone(), vectors[:num_rows].clone()
        return self._replace(num_rows=num_rows, token_ids=token_ids, vectors=vectors)


class LateContext:
    """Of one drafter, for all sequences."""

    def __init__(self, write: Write, capacity: int, shift: int) -> None:
        """Keeps at most `capacity` rows of a slot. A row makes the context of the token `shift` places after it."""
        self._write = write
        self._capacity = capacity
        self._shift = shift
        self._kept: dict[int, list[_Rows]] = {}
        """By slot: consecutive rows, step by step."""
        self._num_kept: dict[int, int] = {}
        """By slot: rows in memory."""

    def add(self, batch: Batch, token_ids: Tensor, vectors: Tensor) -> None:
        """Takes the rows of a decode step, the tokens int64 [R] and what their context is made of, [R, W].

        Both and the page table are kept, not copied, where the step has one sequence: nobody may write them afterwards.
        Rejected rows come last in their sequence.
        """
        segments = list(_segments(batch))
        for number, (slot, place, first, end) in enumerate(segments):
            self._forget_from(slot, place)
            if self._num_kept.get(slot, 0) + end - first > self._capacity:
                self._write_rows(slot, place)
            own = token_ids, vectors
            if len(segments) > 1:
                own = token_ids[first:end].clone(), vectors[first:end].clone()
            kept = self._kept.setdefault(slot, [])
            offset = kept[0].position_offset if kept else int(batch.positions[0, first]) - place
            kept.append(_Rows(place, end - first, offset, batch.page_table, number, *own))
            self._num_kept[slot] = self._num_kept.get(slot, 0) + end - first

    def write_before(self, batch: Batch) -> None:
        """Before the drafter reads: writes what these sequences have before the rows of `batch`."""
        for slot, place, _, _ in _segments(batch):
            self._write_rows(slot, place)

    def write_up_to(self, slots: Tensor, ends: Tensor) -> None:
        """The same up to the places `ends`, int [S], of the sequences in these slots."""
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            self._write_rows(slot, end)

    def drop(self, slot: int) -> None:
        """Another sequence begins in this slot, or the same one anew."""
        self._kept.pop(slot, None)
        self._num_kept.pop(slot, None)

    def _forget_from(self, slot: int, place: int) -> None:
        """Rows that were kept from this place on were rejected."""
        kept = self._kept.get(slot)
        while kept and kept[-1].place + kept[-1].num_rows > place:
            last = kept.pop()
            self._num_kept[slot] -= len(last.vectors)
            if last.place < place:
                kept.append(last.up_to(place))
                self._num_kept[slot] += len(kept[-1].vectors)

    def _write_rows(self, slot: int, end: int) -> None:
        self._forget_from(slot, end)
        kept = self._kept.get(slot)
        if kept:
            self._write(self._batch(slot, kept), torch.cat([rows.vectors[: rows.num_rows] for rows in kept]))
        self.drop(slot)

    def _batch(self, slot: int, kept: list[_Rows]) -> Batch:
        """Of all kept rows of a slot, at the places of their tokens."""
        first, last = kept[0], kept[-1]
        start, end = first.place + self._shift, last.place + last.num_rows + self._shift
        places = torch.arange(start, end)
        edges, slots, seen, none = (
            torch.tensor(part, dtype=torch.int32) for part in ([0, end - start], [slot], [end], [0])
        )
        page_table = last.page_table[last.number : last.number + 1]
        return Batch(
            token_ids=torch.cat([rows.token_ids[: rows.num_rows] for rows in kept]),
            positions=(places + first.position_offset).expand(3, -1),
            cu_rows=edges,
            slots=slots,
            num_accepted=none,
            seen=seen,
            page_table=none.view(1, 1),
            slot_mapping=slot_mapping(page_table, torch.zeros_like(places), places, PAGE_TOKENS),
        )


def _segments(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Of each sequence: its slot, the place of its first row among its tokens, and its rows in the batch."""
    ends = batch.seen.tolist()
    for slot, seen, (first, end) in zip(batch.slots.tolist(), ends, pairwise(batch.cu_rows.tolist()), strict=True):
        yield slot, seen - (end - first), first, end
