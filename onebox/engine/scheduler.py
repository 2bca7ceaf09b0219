"""Decides what each step computes and accounts for what it gave: the queue, the slots, the pages, the sequences.

Pure bookkeeping over token ids: no tensors, no threads, no clock of its own. Each step, every running sequence moves:
those in their prompt share a budget of tokens, all others add their latest token and their drafts. So a long prompt
never holds up the answers beside it for longer than one budget takes.

Prompts are cut on a grid of 64 that depends on positions alone, and whatever a sequence is computed beside, its bits
are the same. That makes preemption simple: a sequence that has to go forgets everything, and when it comes back, its
prompt is prefilled again and its answer is fed in again as rows that are certain.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

from onebox.engine.step import StepPlan, Draw, PromptChunk, Result, DecodeRows, StateSave, StepOutput, DraftCheck
from onebox.engine.config import PAGE_TOKENS, EngineConfig
from onebox.engine.pages import PagePool
from onebox.engine.prefix import PrefixCache
from onebox.engine.request import Event, Failed, Finished, FinishReason, PromptLogprobs, Started, Tokens
from onebox.engine.sequence import Sequence, checkpoint_positions
from onebox.engine.draft.speculate import Speculator
from onebox.engine.stats import EngineStats, Totals
from onebox.spec.errors import OneboxError

__all__ = ["Scheduler"]

T = TypeVar("T")
P = ParamSpec("P")


class Scheduler:
    """The queue and the slots."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._rows_per_sequence = config.rows_per_sequence
        self._ahead = 2 * config.speculation.max_drafts + 1
        """Tokens beyond the certain ones whose pages a step may need: its drafts, and the next step's rows."""
        self._pool = PagePool(config.num_pages)
        self._prefix = PrefixCache(self._pool, config.num_checkpoints)
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._refused: tuple[Sequence, int] | None = None
        """Who was last found to have no room, and the pool's changes by then."""
        self._num_arrived = 0
        self._totals = Totals()
        self._cleared: list[int] = []
        self._restored: list[tuple[int, int]] = []
        self._ended: list[Event] = []
        """Sequences that ended while the step was put together, to be told when it is over."""

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def stats(self) -> EngineStats:
        return EngineStats(
            is_alive=True,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self._pool.num_pages,
            num_free_pages=self._pool.num_free,
            totals=self._totals.frozen(),
            prefix=self._prefix.stats,
        )

    def add(self, sequence: Sequence) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        insort(self._waiting, sequence, key=lambda s: s.order)

    def abort(self, request_id: str) -> list[Event]:
        """Ends the request wherever it is; an unknown or finished one is left in peace."""
        for sequence in [*self._waiting, *self._running.values()]:
            if sequence.request.request_id == request_id:
                return [self._finish(sequence, FinishReason.ABORT)]
        return []

    def expire(self, now: float) -> list[Event]:
        """Ends the requests whose time is over."""
        late = [s for s in [*self._waiting, *self._running.values()] if s.deadline is not None and s.deadline <= now]
        return [self._finish(sequence, FinishReason.TIMEOUT) for sequence in late]

    def next(self) -> StepPlan:
        """The next step. Running answers get their pages first, then whoever waits gets what is left."""
        self._grow()
        self._admit()
        running = list(self._running.values())
        prefilling = [s for s in running if s.is_prefilling]
        pieces = self._pieces(prefilling) if prefilling else []
        rows = [rows for s in running if not s.is_prefilling and (rows := self._or_end(s, self._rows, s))]
        batch = StepPlan(tuple(self._cleared), tuple(self._restored), tuple(pieces), tuple(rows))
        self._cleared, self._restored = [], []
        return batch

    def observe(self, batch: StepPlan, seconds: float, speculator: Speculator) -> None:
        """Lets the drafting policy know what a step without a prompt in it cost."""
        if batch.rows and not batch.pieces:
            num_rows = sum(len(rows.token_ids) for rows in batch.rows)
            speculator.observe(num_rows, max(rows.draw.depth for rows in batch.rows), seconds)

    def commit(self, batch: StepPlan, output: StepOutput) -> list[Event]:
        """Takes the step's results into the sequences; what clients should hear of it, in order."""
        events, self._ended = self._ended, []
        for piece, result in zip(batch.pieces, output.pieces, strict=True):
            events += self._commit_piece(self._running[piece.request_id], piece, result)
        for rows, result in zip(batch.rows, output.rows, strict=True):
            events += self._commit_rows(self._running[rows.request_id], rows, result)
        self._totals.num_steps += 1
        return events

    # Room: pages and slots.

    def _grow(self) -> None:
        """Gives each running answer the pages of its next rows, the first in order first."""
        growing = [s for s in self._running.values() if not s.is_prefilling and self._num_missing(s) > 0]
        for sequence in sorted(growing, key=lambda s: s.order):
            # Those before it may have taken its place.
            if sequence.slot is not None:
                self._ensure_pages(sequence)

    def _num_missing(self, sequence: Sequence) -> int:
        """Pages that its next step needs and that it does not have."""
        return sequence.num_pages_needed(self._ahead) - len(sequence.pages)

    def _ensure_pages(self, sequence: Sequence) -> None:
        missing = self._num_missing(sequence)
        while missing > 0 and not self._prefix.free_pages(missing):
            victim = max(self._running.values(), key=lambda s: s.order)
            self._preempt(victim)
            if victim is sequence:
                return
        if missing > 0:
            sequence.pages = np.append(sequence.pages, np.array(self._pool.take(missing), dtype=np.int32))

    def _preempt(self, sequence: Sequence) -> None:
        self._totals.num_preempted += 1
        self._leave(sequence)
        insort(self._waiting, sequence, key=lambda s: s.order)

    def _admit(self) -> None:
        """Takes in whoever is first in the queue, until one has to wait; nobody overtakes it."""
        while self._waiting:
            sequence = self._waiting[0]
            if not (self._free_slots and self._place(sequence)) and not self._yield_to(sequence):
                return

    def _yield_to(self, sequence: Sequence) -> bool:
        """Makes the last running sequence wait, if it has less priority than this one."""
        victim = max(self._running.values(), key=lambda s: s.order, default=None)
        if victim is None or victim.request.priority <= sequence.request.priority:
            return False
        self._preempt(victim)
        return True

    def _place(self, sequence: Sequence) -> bool:
        """Gives the first in the queue a slot and pages for all its tokens, with what the prefix cache has of them."""
        if self._refused == (sequence, self._pool.num_changes):
            return False  # looking through a long prompt in every step would hold up those that run
        prompt, request = sequence.cache_tokens, sequence.request
        is_cached = request.cache_prompt and request.sampling.prompt_logprobs is None
        hit = self._prefix.find(prompt) if is_cached else None
        shared = hit.pages if hit else ()
        for page in shared:
            self._pool.share(page)
        missing = sequence.num_pages_needed(self._ahead) - len(shared)
        # A page for each of the others is left over: whoever comes in now should not be sent out in the next step.
        if not self._prefix.free_pages(missing + len(self._running)):
            for page in shared:
                self._pool.give_back(page)
            self._refused = sequence, self._pool.num_changes
            return False
        self._waiting.remove(sequence)
        self._running[request.request_id] = sequence
        sequence.slot = self._free_slots.pop()
        sequence.pages = np.array([*shared, *self._pool.take(missing)], dtype=np.int32)
        if hit:
            self._restored.append((hit.checkpoint, sequence.slot))
            sequence.num_computed = hit.num_tokens
        else:
            self._cleared.append(sequence.slot)
        if is_cached:
            self._prefix.touch(prompt, hit)
            sequence.save_positions = checkpoint_positions(prompt, self._config, sequence.num_computed)
        if not sequence.is_started:
            sequence.num_cached = sequence.num_computed
        return True

    # What the step computes.

    def _pieces(self, prefilling: list[Sequence]) -> list[PromptChunk]:
        prefilling = sorted(prefilling, key=lambda s: s.order)
        remaining = [s.num_prompt - s.num_computed for s in prefilling]
        lengths = _shares(remaining, self._config.max_num_batched_tokens, self._totals.num_steps)
        planned = [(s, length) for s, length in zip(prefilling, lengths, strict=True) if length]
        return [piece for s, length in planned if (piece := self._or_end(s, self._piece, s, length))]

    def _piece(self, sequence: Sequence, length: int) -> PromptChunk:
        prompt, start = sequence.request.prompt, sequence.num_computed
        end = start + length
        is_last = end == len(prompt)
        wants_logprobs = end - 1 > sequence.num_prompt_logprobs
        return PromptChunk(
            request_id=sequence.request.request_id,
            slot=_slot(sequence),
            token_ids=prompt[start:end],
            start=start,
            pages=sequence.pages,
            saves=self._saves(sequence, end),
            draw=self._draw_after_prompt(sequence) if is_last else None,
            prompt_logprobs=sequence.request.sampling.prompt_logprobs if wants_logprobs else None,
            following=None if is_last else prompt[end],
            seen=sequence.seen,
        )

    def _saves(self, sequence: Sequence, end: int) -> tuple[StateSave, ...]:
        saves: list[StateSave] = []
        due = [position for position in sequence.save_positions if position <= end]
        sequence.save_positions = sequence.save_positions[len(due) :]
        for position in due:
            if self._prefix.has_checkpoint(sequence.cache_tokens, position):
                if sequence.request.pin_prompt:
                    self._prefix.pin(sequence.cache_tokens, position)
            else:
                checkpoint = self._prefix.reserve()
                if checkpoint is not None:
                    saves.append(StateSave(position, checkpoint))
        return tuple(saves)

    def _draw_after_prompt(self, sequence: Sequence) -> Draw:
        sampling, depth = sequence.request.sampling, sequence.speculation.depth(self._room(sequence))
        if len(sequence.tokens) > sequence.num_prompt:
            return Draw(sampling, (sequence.tokens[sequence.num_prompt],), (DraftCheck.ACCEPT,), first_new=1)
        _, adjustments = sequence.adjuster.rows(())
        return Draw(sampling, (-1,), (DraftCheck.COMPARE,), 0, adjustments, depth)

    def _or_end(self, sequence: Sequence, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `make` gives; a sequence whose grammar cannot be followed any longer ends here."""
        try:
            return make(*args, **kwargs)
        except OneboxError as error:
            self._ended.append(self._fail(sequence, error))
            return None

    def _rows(self, sequence: Sequence) -> DecodeRows:
        certain = sequence.tokens[sequence.num_computed :]
        limit, speculation = self._rows_per_sequence, sequence.speculation
        if len(certain) > limit:
            token_ids = tuple(certain[:limit])
            draw = Draw(
                sequence.request.sampling, tuple(certain[1 : limit + 1]), (DraftCheck.ACCEPT,) * limit, first_new=limit
            )
        else:
            room = self._room(sequence)
            proposed = speculation.propose(min(limit - len(certain), room))
            drafts, adjustments = sequence.adjuster.rows(proposed)
            token_ids = (*certain, *drafts)
            draw = Draw(
                sampling=sequence.request.sampling,
                next_ids=(*token_ids[1:], -1),
                verdicts=(
                    *[DraftCheck.ACCEPT] * (len(certain) - 1),
                    *speculation.verdicts(len(sequence.tokens), len(drafts)),
                    DraftCheck.COMPARE,
                ),
                first_new=len(certain) - 1,
                adjustments=adjustments,
                depth=speculation.depth(room),
                goes_on=room > 0 and speculation.is_offered,
            )
        return DecodeRows(
            sequence.request.request_id,
            _slot(sequence),
            token_ids,
            sequence.num_computed,
            sequence.keep,
            sequence.pages,
            draw,
            sequence.seen.offset if sequence.seen else 0,
        )

    def _room(self, sequence: Sequence) -> int:
        """Drafts that can still be of use: the row before them gives a token by itself."""
        return max(0, sequence.max_tokens - sequence.num_made - 1)

    # What the step gave.

    def _commit_piece(self, sequence: Sequence, piece: PromptChunk, result: Result | Exception) -> list[Event]:
        events: list[Event] = []
        if not sequence.is_started:
            sequence.is_started = True
            events.append(Started(piece.request_id))
        if isinstance(result, Exception):
            for save in piece.saves:
                self._prefix.cancel(save.checkpoint)
            return [*events, self._fail(sequence, result)]
        sequence.num_computed = piece.end
        self._totals.prompt_tokens += len(piece.token_ids)
        for save in piece.saves:
            pages = [int(page) for page in piece.pages[: save.num_tokens // PAGE_TOKENS]]
            prefix = sequence.cache_tokens[: save.num_tokens]
            self._prefix.insert(prefix, pages, save.checkpoint, is_pinned=sequence.request.pin_prompt)
        # What a preempted request has told already is not told again.
        logprobs = result.prompt_logprobs[max(0, sequence.num_prompt_logprobs - piece.start) :]
        if logprobs:
            sequence.num_prompt_logprobs += len(logprobs)
            events.append(PromptLogprobs(piece.request_id, logprobs))
        if piece.draw:
            sequence.speculation.offer(result.drafts)
            events += self._deliver(sequence, result)
        return events

    def _commit_rows(self, sequence: Sequence, rows: DecodeRows, result: Result | Exception) -> list[Event]:
        if isinstance(result, Exception):
            return [self._fail(sequence, result)]
        sequence.num_computed += result.num_kept
        sequence.keep = result.num_kept
        drafted = len(rows.token_ids) - 1 - rows.draw.first_new
        if drafted > 0:
            accepted = len(result.token_ids) - 1
            sequence.speculation.observe(drafted, accepted)
            self._totals.drafts.add(drafted, accepted)
        sequence.speculation.offer(result.drafts)
        return self._deliver(sequence, result)

    def _deliver(self, sequence: Sequence, result: Result) -> list[Event]:
        request_id, events = sequence.request.request_id, list[Event]()
        made = sequence.num_made
        try:
            delivered, reason = sequence.take(result.token_ids)
        except OneboxError as error:  # a grammar beyond its library's limits
            return [self._fail(sequence, error)]
        self._totals.completion_tokens += sequence.num_made - made
        if delivered:
            events.append(Tokens(request_id, delivered, result.logprobs[: len(delivered)]))
        if reason:
            events.append(self._finish(sequence, reason))
        return events

    # The end of a sequence.

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finished:
        self._retire(sequence)
        self._totals.finished[reason] += 1
        return Finished(sequence.request.request_id, reason, sequence.counts)

    def _fail(self, sequence: Sequence, error: Exception) -> Failed:
        self._retire(sequence)
        self._totals.num_failed += 1
        message = str(error).rstrip(".")
        return Failed(sequence.request.request_id, f"The model could not compute this request: {message}.")

    def _retire(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Gives back a running sequence's slot and pages."""
        slot = _slot(sequence)
        del self._running[sequence.request.request_id]
        self._free_slots.append(slot)
        # It may have come in for this very step.
        self._cleared = [cleared for cleared in self._cleared if cleared != slot]
        self._restored = [restored for restored in self._restored if restored[1] != slot]
        for page in sequence.pages.tolist():
            self._pool.give_back(page)
        sequence.forget()

    def clear_cache(self) -> None:
        """Drops every cached prefix."""
        self._prefix.clear()

    def check(self) -> None:
        """Each slot, page and checkpoint is free or held by those who say so."""
        held = [_slot(sequence) for sequence in self._running.values()]
        if sorted(held + self._free_slots) != list(range(self._config.max_num_seqs)):
            raise RuntimeError(f"Slots are lost or held twice: held {held}, free {self._free_slots}.")
        holders = Counter(self._prefix.holders())
        for sequence in self._running.values():
            holders.update(sequence.pages.tolist())
        self._pool.check(holders)
        self._prefix.check()


def _shares(remaining: list[int], budget: int, turn: int) -> list[int]:
    """What each prompt gets of the step's budget, in whole chunks or to its end: in turns, so that nobody waits.

    Whose turn comes first moves on with every step, for the case that there are more prompts than chunks.
    """
    needed = [-(-tokens // PAGE_TOKENS) for tokens in remaining]
    given = [0] * len(remaining)
    left = budget // PAGE_TOKENS
    while left and given != needed:
        for place in ((turn + i) % len(remaining) for i in range(len(remaining))):
            if left and given[place] < needed[place]:
                given[place] += 1
                left -= 1
    return [min(chunks * PAGE_TOKENS, tokens) for chunks, tokens in zip(given, remaining, strict=True)]


def _slot(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise RuntimeError(f"Request {sequence.request.request_id} has no slot.")
    return sequence.slot
