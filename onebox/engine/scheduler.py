"""Plans what each step computes and commits what it produced: the queue, the slots, the pages, the sequences.

Pure bookkeeping over token ids: no tensors, no threads, no clock of its own. In each step, every running sequence
advances: those in their prompt share a budget of tokens, all others add their latest token and their drafts. So a long
prompt never delays the answers beside it for longer than one budget takes.

Prompts are cut at multiples of PAGE_TOKENS only, and a sequence's bits do not depend on what is computed beside it.
That makes preemption simple: a preempted sequence loses its slot and pages, and when it is admitted again, its prompt
is prefilled again and its answer is fed in again as rows that are certain.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

from onebox.engine.config import EngineConfig
from onebox.engine.draft.speculate import Speculator
from onebox.engine.pages import PagePool
from onebox.engine.prefix import PrefixCache
from onebox.engine.request import Event, Failed, Finished, FinishReason, PromptLogprobs, Started, Tokens
from onebox.engine.sequence import Sequence, checkpoint_positions
from onebox.engine.stats import EngineStats, Totals
from onebox.engine.step import DecodeRows, DraftCheck, Draw, PromptChunk, Result, StateSave, StepOutput, StepPlan
from onebox.spec.errors import OneboxError
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["Scheduler"]

T = TypeVar("T")
P = ParamSpec("P")


class Scheduler:
    """The queue, the slots and the pages of all open requests."""

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
        """The sequence that was last found to have no room, and the pool's `num_changes` then."""
        self._num_arrived = 0
        self._totals = Totals()
        self._cleared: list[int] = []
        self._restored: list[tuple[int, int]] = []
        self._ended: list[Event] = []
        """Events of sequences that failed while the step was planned; committed with it."""

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
        """Ends the request wherever it is; an unknown or finished one is ignored."""
        for sequence in [*self._waiting, *self._running.values()]:
            if sequence.request.request_id == request_id:
                return [self._finish(sequence, FinishReason.ABORT)]
        return []

    def expire(self, now: float) -> list[Event]:
        """Ends the requests whose deadline has passed."""
        late = [s for s in [*self._waiting, *self._running.values()] if s.deadline is not None and s.deadline <= now]
        return [self._finish(sequence, FinishReason.TIMEOUT) for sequence in late]

    def plan(self) -> StepPlan:
        """The next step. Running answers get their pages first; waiting requests are admitted with what is left."""
        self._grow()
        self._admit()
        running = list(self._running.values())
        prefilling = [s for s in running if s.is_prefilling]
        chunks = self._chunks(prefilling) if prefilling else []
        rows = [rows for s in running if not s.is_prefilling and (rows := self._or_end(s, self._rows, s))]
        plan = StepPlan(tuple(self._cleared), tuple(self._restored), tuple(chunks), tuple(rows))
        self._cleared, self._restored = [], []
        return plan

    def observe(self, plan: StepPlan, seconds: float, speculator: Speculator) -> None:
        """Reports to the drafting policy what a step without prompts cost."""
        if plan.rows and not plan.chunks:
            num_rows = sum(len(rows.token_ids) for rows in plan.rows)
            speculator.observe(num_rows, max(rows.draw.depth for rows in plan.rows), seconds)

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Event]:
        """Updates the sequences with the step's results; returns the events to deliver, in order."""
        events, self._ended = self._ended, []
        for chunk, result in zip(plan.chunks, output.chunks, strict=True):
            events += self._commit_chunk(self._running[chunk.request_id], chunk, result)
        for rows, result in zip(plan.rows, output.rows, strict=True):
            events += self._commit_rows(self._running[rows.request_id], rows, result)
        self._totals.num_steps += 1
        return events

    # Pages and slots.

    def _grow(self) -> None:
        """Gives each running answer the pages of its next rows, in order."""
        growing = [s for s in self._running.values() if not s.is_prefilling and self._num_missing(s) > 0]
        for sequence in sorted(growing, key=lambda s: s.order):
            # One before it may have preempted it.
            if sequence.slot is not None:
                self._ensure_pages(sequence)

    def _num_missing(self, sequence: Sequence) -> int:
        """Pages that its next step needs beyond those it has."""
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
        self._release(sequence)
        insort(self._waiting, sequence, key=lambda s: s.order)

    def _admit(self) -> None:
        """Admits the queue in order until one has to wait; none behind it is admitted before it."""
        while self._waiting:
            sequence = self._waiting[0]
            if not (self._free_slots and self._try_admit(sequence)) and not self._preempt_for(sequence):
                return

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempts the last running sequence, if it has less priority than this one."""
        victim = max(self._running.values(), key=lambda s: s.order, default=None)
        if victim is None or victim.request.priority <= sequence.request.priority:
            return False
        self._preempt(victim)
        return True

    def _try_admit(self, sequence: Sequence) -> bool:
        """Gives the sequence a slot and pages, from its longest cached prefix on; False where there is no room."""
        if self._refused == (sequence, self._pool.num_changes):
            return False  # matching a long prompt against the cache in every step would delay those that run
        prompt, request = sequence.cache_tokens, sequence.request
        is_cached = request.cache_prompt and request.sampling.prompt_logprobs is None
        hit = self._prefix.find(prompt) if is_cached else None
        shared = hit.pages if hit else ()
        for page in shared:
            self._pool.share(page)
        missing = sequence.num_pages_needed(self._ahead) - len(shared)
        # One page for each of the others stays free: what is admitted now should not be preempted in the next step.
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

    # Planning the step.

    def _chunks(self, prefilling: list[Sequence]) -> list[PromptChunk]:
        prefilling = sorted(prefilling, key=lambda s: s.order)
        remaining = [s.num_prompt - s.num_computed for s in prefilling]
        lengths = _shares(remaining, self._config.max_num_batched_tokens, self._totals.num_steps)
        planned = [(s, length) for s, length in zip(prefilling, lengths, strict=True) if length]
        return [chunk for s, length in planned if (chunk := self._or_end(s, self._chunk, s, length))]

    def _chunk(self, sequence: Sequence, length: int) -> PromptChunk:
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
            images=sequence.images,
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
        sampling, depth = sequence.request.sampling, sequence.speculation.depth(self._max_drafts(sequence))
        if len(sequence.tokens) > sequence.num_prompt:
            return Draw(sampling, (sequence.tokens[sequence.num_prompt],), (DraftCheck.ACCEPT,), first_new=1)
        _, adjustments = sequence.logits_rules.adjust(())
        return Draw(sampling, (-1,), (DraftCheck.COMPARE,), 0, adjustments, depth)

    def _or_end(self, sequence: Sequence, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `make` returns; a sequence whose grammar fails ends here."""
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
            max_drafts = self._max_drafts(sequence)
            proposed = speculation.propose(min(limit - len(certain), max_drafts))
            drafts, adjustments = sequence.logits_rules.adjust(proposed)
            token_ids = (*certain, *drafts)
            draw = Draw(
                sampling=sequence.request.sampling,
                next_ids=(*token_ids[1:], -1),
                checks=(
                    *[DraftCheck.ACCEPT] * (len(certain) - 1),
                    *speculation.checks(len(sequence.tokens), len(drafts)),
                    DraftCheck.COMPARE,
                ),
                first_new=len(certain) - 1,
                adjustments=adjustments,
                depth=speculation.depth(max_drafts),
                continues=max_drafts > 0 and speculation.is_from_head,
            )
        return DecodeRows(
            sequence.request.request_id,
            _slot(sequence),
            token_ids,
            sequence.num_computed,
            sequence.num_accepted,
            sequence.pages,
            draw,
            sequence.images.position_offset if sequence.images else 0,
        )

    def _max_drafts(self, sequence: Sequence) -> int:
        """Drafts that can still be used: the row before them gives a token by itself."""
        return max(0, sequence.max_tokens - sequence.num_sampled - 1)

    # Committing the step.

    def _commit_chunk(self, sequence: Sequence, chunk: PromptChunk, result: Result | Exception) -> list[Event]:
        events: list[Event] = []
        if not sequence.is_started:
            sequence.is_started = True
            events.append(Started(chunk.request_id))
        if isinstance(result, Exception):
            for save in chunk.saves:
                self._prefix.cancel(save.checkpoint)
            return [*events, self._fail(sequence, result)]
        sequence.num_computed = chunk.end
        self._totals.prompt_tokens += len(chunk.token_ids)
        for save in chunk.saves:
            pages = [int(page) for page in chunk.pages[: save.num_tokens // PAGE_TOKENS]]
            prefix = sequence.cache_tokens[: save.num_tokens]
            self._prefix.insert(prefix, pages, save.checkpoint, is_pinned=sequence.request.pin_prompt)
        # What was delivered before a preemption is not delivered again.
        logprobs = result.prompt_logprobs[max(0, sequence.num_prompt_logprobs - chunk.start) :]
        if logprobs:
            sequence.num_prompt_logprobs += len(logprobs)
            events.append(PromptLogprobs(chunk.request_id, logprobs))
        if chunk.draw:
            sequence.speculation.offer(result.drafts)
            events += self._append(sequence, result)
        return events

    def _commit_rows(self, sequence: Sequence, rows: DecodeRows, result: Result | Exception) -> list[Event]:
        if isinstance(result, Exception):
            return [self._fail(sequence, result)]
        sequence.num_computed += result.num_accepted
        sequence.num_accepted = result.num_accepted
        drafted = len(rows.token_ids) - 1 - rows.draw.first_new
        if drafted > 0:
            accepted = len(result.token_ids) - 1
            sequence.speculation.observe(drafted, accepted)
            self._totals.drafts.add(drafted, accepted)
        sequence.speculation.offer(result.drafts)
        return self._append(sequence, result)

    def _append(self, sequence: Sequence, result: Result) -> list[Event]:
        request_id, events = sequence.request.request_id, list[Event]()
        num_before = sequence.num_sampled
        try:
            delivered, reason = sequence.append(result.token_ids)
        except OneboxError as error:  # a grammar exceeded its library's limits
            return [self._fail(sequence, error)]
        self._totals.completion_tokens += sequence.num_sampled - num_before
        if delivered:
            events.append(Tokens(request_id, delivered, result.logprobs[: len(delivered)]))
        if reason:
            events.append(self._finish(sequence, reason))
        return events

    # The end of a sequence.

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finished:
        self._remove(sequence)
        self._totals.finished[reason] += 1
        return Finished(sequence.request.request_id, reason, sequence.counts)

    def _fail(self, sequence: Sequence, error: Exception) -> Failed:
        self._remove(sequence)
        self._totals.num_failed += 1
        message = str(error).rstrip(".")
        return Failed(sequence.request.request_id, f"The model could not compute this request: {message}.")

    def _remove(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Frees a running sequence's slot and pages."""
        slot = _slot(sequence)
        del self._running[sequence.request.request_id]
        self._free_slots.append(slot)
        # It may have been admitted for this very step.
        self._cleared = [cleared for cleared in self._cleared if cleared != slot]
        self._restored = [restored for restored in self._restored if restored[1] != slot]
        for page in sequence.pages.tolist():
            self._pool.give_back(page)
        sequence.forget()

    def clear_cache(self) -> None:
        """Drops every cached prefix."""
        self._prefix.clear()

    def check(self) -> None:
        """Raises unless every slot, page and checkpoint is either free or held by its known holders."""
        held = [_slot(sequence) for sequence in self._running.values()]
        if sorted(held + self._free_slots) != list(range(self._config.max_num_seqs)):
            raise RuntimeError(f"Slots are lost or held twice: held {held}, free {self._free_slots}.")
        holders = Counter(self._prefix.holders())
        for sequence in self._running.values():
            holders.update(sequence.pages.tolist())
        self._pool.check(holders)
        self._prefix.check()


def _shares(remaining: list[int], budget: int, turn: int) -> list[int]:
    """Tokens of the budget for each prompt, in whole pages or to its end: round robin, so that no prompt is starved.

    The first turn rotates with every step, for the case that there are more prompts than pages in the budget.
    """
    needed = [-(-tokens // PAGE_TOKENS) for tokens in remaining]
    given = [0] * len(remaining)
    left = budget // PAGE_TOKENS
    while left and given != needed:
        for place in ((turn + i) % len(remaining) for i in range(len(remaining))):
            if left and given[place] < needed[place]:
                given[place] += 1
                left -= 1
    return [min(pages * PAGE_TOKENS, tokens) for pages, tokens in zip(given, remaining, strict=True)]


def _slot(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise RuntimeError(f"Request {sequence.request.request_id} has no slot.")
    return sequence.slot
