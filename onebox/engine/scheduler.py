"""Decides what each step computes and accounts for what it gave: the queue, the slots, the sequences.

Pure bookkeeping over token ids: no tensors, no threads, no clock. Each step, every sequence that has a slot moves: by
one piece of its prompt or by one new token. Prompt pieces lie on a grid that depends on the prompt alone, so a
sequence is computed in the same pieces whoever else is there.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from onebox.engine.batch import Batch, Row, StepOutput
from onebox.engine.request import (
    Counts,
    EngineConfig,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    Started,
    Tokens,
)

__all__ = ["PREFILL_CHUNK", "Scheduler", "Sequence"]

PREFILL_CHUNK = 64
"""Tokens of a prompt in one piece. Equal to the delta rule's chunk, and short enough that an abort is prompt."""


@dataclass
class Sequence:
    """A live request: its tokens so far, how many of them its slot holds, and what ends it."""

    request: Request
    max_tokens: int
    stop_token_ids: frozenset[int]
    slot: int = -1
    num_computed: int = 0
    completion: list[int] = field(default_factory=list)
    num_made: int = 0
    """Tokens drawn, a stop token included."""

    @property
    def counts(self) -> Counts:
        return Counts(len(self.request.prompt), self.num_made)

    def row(self) -> Row:
        """The next piece: prompt tokens up to the next grid point, or the latest token."""
        prompt, start = self.request.prompt, self.num_computed
        if start < len(prompt):
            end = min(len(prompt), (start // PREFILL_CHUNK + 1) * PREFILL_CHUNK)
            piece, draws = prompt[start:end], end == len(prompt)
        else:
            piece, draws = tuple(self.completion[start - len(prompt) :]), True
        return Row(self.request.request_id, self.slot, piece, start, self.request.sampling if draws else None)

    def keep(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Takes drawn tokens until one ends the sequence: those to deliver, and the reason where it ended."""
        delivered: list[int] = []
        for token_id in token_ids:
            self.num_made += 1
            if token_id in self.stop_token_ids:
                return tuple(delivered), FinishReason.STOP
            self.completion.append(token_id)
            delivered.append(token_id)
            if self.num_made == self.max_tokens:
                return tuple(delivered), FinishReason.LENGTH
        return tuple(delivered), None


class Scheduler:
    """The queue and the slots. `release` is called with each slot that becomes free."""

    def __init__(self, config: EngineConfig, release: Callable[[int], None]) -> None:
        self._config = config
        self._release = release
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._free_slots = list(range(config.max_num_seqs))
        self.num_finished = 0
        self.num_failed = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> list[Event]:
        """Ends the request wherever it is; an unknown or finished one is left in peace."""
        for sequence in [*self._waiting, *self._running.values()]:
            if sequence.request.request_id == request_id:
                return [self._finish(sequence, FinishReason.ABORT)]
        return []

    def next(self) -> Batch:
        """Gives free slots to those who waited longest; each slot then contributes one row."""
        while self._waiting and self._free_slots:
            sequence = self._waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self._running[sequence.request.request_id] = sequence
        return Batch(tuple(sequence.row() for sequence in self._running.values()))

    def commit(self, batch: Batch, output: StepOutput) -> list[Event]:
        """Takes the step's results into the sequences; what clients should hear of it, in order."""
        events: list[Event] = []
        for row, result in zip(batch.rows, output.results, strict=True):
            events += self._commit_row(self._running[row.request_id], row, result)
        return events

    def _commit_row(self, sequence: Sequence, row: Row, result: tuple[int, ...] | Exception) -> list[Event]:
        events: list[Event] = [Started(row.request_id)] if row.start == 0 else []
        if isinstance(result, Exception):
            return [*events, self._fail(sequence, result)]
        self._count_computed(sequence, row)
        delivered, reason = sequence.keep(result)
        self.completion_tokens += len(result)
        if delivered:
            events.append(Tokens(row.request_id, delivered))
        if reason:
            events.append(self._finish(sequence, reason))
        return events

    def _count_computed(self, sequence: Sequence, row: Row) -> None:
        sequence.num_computed = row.end
        if row.start < len(sequence.request.prompt):
            self.prompt_tokens += len(row.token_ids)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finished:
        self._retire(sequence)
        self.num_finished += 1
        return Finished(sequence.request.request_id, reason, sequence.counts)

    def _fail(self, sequence: Sequence, error: Exception) -> Failed:
        self._retire(sequence)
        self.num_failed += 1
        return Failed(sequence.request.request_id, f"The model could not compute this request: {error}.")

    def _retire(self, sequence: Sequence) -> None:
        if self._running.pop(sequence.request.request_id, None) is None:
            self._waiting.remove(sequence)
        else:
            self._free_slots.append(sequence.slot)
            self._release(sequence.slot)

    def check(self) -> None:
        """Each slot is free or held once; the engine asks whenever it falls idle."""
        held = [sequence.slot for sequence in self._running.values()]
        if sorted(held + self._free_slots) != list(range(self._config.max_num_seqs)):
            raise RuntimeError(f"Slots are lost or held twice: held {held}, free {self._free_slots}.")
