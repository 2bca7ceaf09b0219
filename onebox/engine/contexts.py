"""Rows of decode steps that a drafter's context lacks, on a CPU.

A context holds every committed token, whoever drafts. Where steps are captured graphs, each writes its own rows. On a
CPU a write is a tenth of a step, however few its rows, so rows are kept until their drafter drafts again or until there
are too many of them, and rejected ones are never written. A drafter that is not used then costs next to nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.engine.step import DecodeRows
from onebox.kernels.step import slot_mapping
from onebox.model.batch import Batch
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["LateContext", "Write"]

Write = Callable[[Batch, Sequence[Tensor]], None]
"""Writes the context of a batch's rows, from the parts [R, W] that it is made of."""


class _Step(NamedTuple):
    """A decode step."""

    sequences: Sequence[DecodeRows]
    parts: tuple[Tensor, ...]
    """[R, W] each."""
    token_ids: Tensor | None
    """int64 [R]."""


class _Rows(NamedTuple):
    """The rows of one sequence in a decode step, as far as they are not known to be rejected."""

    sequence: DecodeRows
    first: int
    """Its first row in the step."""
    num_rows: int
    share: int
    """Rows of memory that they take: the whole step is kept while one of its sequences has rows of it."""
    parts: tuple[Tensor, ...]
    """[R, W] each: of all sequences of the step."""
    token_ids: Tensor | None
    """int64 [R]."""

    @property
    def place(self) -> int:
        """Of the first row among the sequence's tokens."""
        return self.sequence.start

    def own(self, of_step: Tensor) -> Tensor:
        """The sequence's rows of a tensor of the step."""
        return of_step[self.first : self.first + self.num_rows]


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
        """By slot: rows of memory."""
        self._latest: list[_Step] = []
        """Steps whose rows are not sorted by slots yet."""
        self._num_latest = 0
        """Rows of them."""

    def add(self, sequences: Sequence[DecodeRows], parts: tuple[Tensor, ...], token_ids: Tensor | None = None) -> None:
        """Takes the rows of a decode step: what their context is made of, [R, W] each, and the tokens int64 [R].

        They are kept, not copied: nobody may write them afterwards. Rejected rows come last in their sequence.
        """
        self._latest.append(_Step(sequences, parts, token_ids))
        self._num_latest += len(parts[0])
        if self._num_latest > self._capacity:
            self._sort()

    def _sort(self) -> None:
        """Sorts the latest steps by slots, which is not worth a step's time in every step."""
        latest, self._latest, self._num_latest = self._latest, [], 0
        for step in latest:
            self._sort_step(*step)

    def _sort_step(self, sequences: Sequence[DecodeRows], parts: tuple[Tensor, ...], token_ids: Tensor | None) -> None:
        """Each sequence counts a part of the step, which all of them keep whole: together they keep the capacity."""
        share, first = -(-len(parts[0]) // len(sequences)), 0
        for sequence in sequences:
            slot, num_rows = sequence.slot, len(sequence.token_ids)
            self._forget_from(slot, sequence.start)
            if self._num_kept.get(slot, 0) + share > self._capacity:
                self._write_rows(slot, sequence.start)
            self._kept.setdefault(slot, []).append(_Rows(sequence, first, num_rows, share, parts, token_ids))
            self._num_kept[slot] = self._num_kept.get(slot, 0) + share
            first += num_rows

    def write_before(self, sequences: Sequence[DecodeRows]) -> None:
        """Before the drafter reads: writes what these sequences have before these rows."""
        self._sort()
        for sequence in sequences:
            self._write_rows(sequence.slot, sequence.start)

    def write_up_to(self, slots: Tensor, ends: Tensor) -> None:
        """The same up to the places `ends`, int [S], of the sequences in `slots`."""
        self._sort()
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            self._write_rows(slot, end)

    def drop(self, slot: int) -> None:
        """Another sequence begins in this slot, or the same one anew."""
        self._sort()
        self._kept.pop(slot, None)
        self._num_kept.pop(slot, None)

    def _forget_from(self, slot: int, place: int) -> None:
        """Rows that were kept from this place on were rejected."""
        kept = self._kept.get(slot)
        while kept and kept[-1].place + kept[-1].num_rows > place:
            last = kept.pop()
            if last.place < place:
                kept.append(last._replace(num_rows=place - last.place))
            else:
                self._num_kept[slot] -= last.share

    def _write_rows(self, slot: int, end: int) -> None:
        self._forget_from(slot, end)
        kept = self._kept.get(slot)
        if kept:
            of_part = zip(*(rows.parts for rows in kept), strict=True)
            parts = [torch.cat([*map(_Rows.own, kept, steps)]) for steps in of_part]
            self._write(self._batch(slot, kept), parts)
        self._kept.pop(slot, None)
        self._num_kept.pop(slot, None)

    def _batch(self, slot: int, kept: list[_Rows]) -> Batch:
        """Of all kept rows of a slot, at the places of their tokens."""
        first, last = kept[0], kept[-1]
        start, end = first.place + self._shift, last.place + last.num_rows + self._shift
        places = torch.arange(start, end)
        edges, slots, seen, none = (
            torch.tensor(part, dtype=torch.int32) for part in ([0, end - start], [slot], [end], [0])
        )
        page_table = torch.from_numpy(last.sequence.pages).unsqueeze(0)
        tokens = [rows.own(rows.token_ids) for rows in kept if rows.token_ids is not None]
        return Batch(
            token_ids=torch.cat(tokens) if tokens else torch.zeros_like(places),
            positions=(places + first.sequence.position_offset).expand(3, -1),
            cu_rows=edges,
            slots=slots,
            num_accepted=none,
            seen=seen,
            page_table=none.view(1, 1),
            slot_mapping=slot_mapping(page_table, torch.zeros_like(places), places, PAGE_TOKENS),
        )
