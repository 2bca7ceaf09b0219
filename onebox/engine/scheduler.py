"""Plans what each step computes and commits what it produced: the queue, the slots, the pages, the sequences.

Pure bookkeeping over token ids: no tensors, no threads, no clock of its own. In each step, every running sequence
advances: those in their prompt share a budget of tokens, all others add their latest token and their drafts. So a long
prompt never delays the answers beside it for longer than one budget takes (`pace.py`). Short prompts go before long
ones, within bounds: most first tokens come sooner, and no request waits for ever (`choice.py`).

Prompts are cut at multiples of PAGE_TOKENS only, and a sequence's bits do not depend on what is computed beside it.
That makes preemption simple: a preempted sequence loses its slot and pages, and when it is admitted again, its prompt
is prefilled again and its answer is fed in again as rows that are certain.

What is done for one sequence cannot harm another: whatever goes wrong in it ends that sequence and frees what it held.
After an error that nobody foresaw, the slots, pages and checkpoints are checked; if they do not add up, that is raised.
"""

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

from onebox.engine.choice import fewest, prompt_shares, shortest_first
from onebox.engine.config import EngineConfig
from onebox.engine.disk.jobs import PrefixDisk
from onebox.engine.disk.traffic import DiskTraffic
from onebox.engine.draft.kinds import Drafter
from onebox.engine.draft.speculate import Speculator
from onebox.engine.logprobs import PackedLogprobs
from onebox.engine.pace import PromptPace
from onebox.engine.pages import PagePool
from onebox.engine.prefix import Hit, PrefixCache, PrefixLookup
from onebox.engine.request import Event, Failed, Finished, FinishReason, PromptLogprobs, Started, Tokens, failure_of
from onebox.engine.rows import decode_rows, prompt_chunk, slot_of
from onebox.engine.sequence import Sequence, checkpoint_positions
from onebox.engine.shares import beyond_shares, next_in_queue
from onebox.engine.stats import EngineStats, Totals
from onebox.engine.step import DecodeRows, PromptChunk, Result, StateSave, StepOutput, StepPlan
from onebox.engine.turns import QueueTurns
from onebox.spec.errors import OneboxError
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["Scheduler"]

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger(__name__)


class Scheduler:
    """The queue, the slots and the pages of all open requests."""

    def __init__(self, config: EngineConfig, disk: PrefixDisk | None = None) -> None:
        self._config = config
        self._rows_per_sequence = config.rows_per_sequence
        self._ahead = 2 * config.speculation.max_drafts + 1
        """Tokens beyond the certain ones whose pages a step may need: its drafts, and the next step's rows."""
        self._pool = PagePool(config.num_pages)
        self._prefix = PrefixCache(self._pool, config.num_checkpoints, with_disk=disk is not None)
        self._disk = DiskTraffic(disk, self._pool, self._prefix)
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._refused: tuple[Sequence, int] | None = None
        """The sequence that was last found to have no room, and the pool's `num_changes` then."""
        self._num_arrived = 0
        self._turns = QueueTurns()
        self._pace = PromptPace(config.max_num_batched_tokens, config.max_answer_wait_s)
        self._totals = Totals()
        self._cleared: list[int] = []
        self._restored: list[tuple[int, int]] = []
        self._ended: list[Event] = []
        """Events of sequences that failed while the step was planned; committed with it."""

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def stats(self) -> EngineStats:
        num_loading = sum(sequence.load is not None for sequence in self._running.values())
        return EngineStats(
            is_alive=True,
            num_running=len(self._running) - num_loading,
            num_waiting=len(self._waiting) + num_loading,
            num_pages=self._pool.num_pages,
            num_free_pages=self._pool.num_free,
            totals=self._totals.frozen(),
            prefix=self._prefix.stats,
            disk=self._disk.stats(),
        )

    def lookup(self, cache_tokens: tuple[int, ...]) -> PrefixLookup:
        """What is cached of a prompt. Changes and counts nothing, and may be called by any thread."""
        memory_tokens = self._prefix.peek(cache_tokens)
        return PrefixLookup(memory_tokens, self._disk.peek(cache_tokens, memory_tokens))

    def add(self, sequence: Sequence) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        sequence.turn = self._turns.give(sequence.request.client)
        hit = self._prefix.find(sequence.cache_tokens) if sequence.is_cached else None
        sequence.num_left = sequence.num_prompt - (hit.num_tokens if hit else 0)
        insort(self._waiting, sequence, key=lambda s: s.order)

    def abort(self, request_id: str) -> list[Event]:
        """Ends the request wherever it is; an unknown or finished one is ignored."""
        return [self._end(sequence, FinishReason.ABORT) for sequence in self._open_ones(request_id)]

    def fail(self, request_id: str, error: BaseException) -> list[Event]:
        """Ends the request with this error wherever it is; an unknown or finished one is ignored."""
        return [self._fail(sequence, error) for sequence in self._open_ones(request_id)]

    def drop(self, request_id: str) -> None:
        """Ends the request as failed, without an event; one that has ended already is counted as failed, too."""
        for sequence in self._open_ones(request_id):
            self._remove(sequence)
        self._totals.num_failed += 1

    def count_failed(self, count: int) -> None:
        """Counts requests that failed without this scheduler's doing."""
        self._totals.num_failed += count

    def expire(self, now: float) -> list[Event]:
        """Ends the requests whose deadline has passed, waiting ones too; loads that take too long are given up."""
        for sequence in self._disk.take_late(now):
            self._requeue(sequence)
        everyone = [*self._waiting, *self._running.values()]
        late = [sequence for sequence in everyone if self._or_end(sequence, sequence.is_late, now)]
        return [self._end(sequence, FinishReason.TIMEOUT) for sequence in late]

    def next_to_encode(self) -> Sequence | None:
        """The sequence that is admitted next, if its images have yet to be encoded.

        Those behind it have to wait: their embeddings would take memory for as long as they are in the queue.
        """
        following = self._next_waiting()
        return following if following and following.needs_images else None

    def _open_ones(self, request_id: str) -> list[Sequence]:
        return [s for s in [*self._waiting, *self._running.values()] if s.request.request_id == request_id]

    def plan(self) -> StepPlan:
        """The next step. Running answers get their pages first; waiting requests are admitted with what is left.

        It is empty where everybody waits for the disk.
        """
        self.tend_disk()
        self._grow()
        self._admit()
        running = [s for s in self._running.values() if s.load is None]
        prefilling = [s for s in running if s.is_prefilling]
        chunks = self._chunks(prefilling) if prefilling else []
        decoding = [s for s in running if not s.is_prefilling]
        rows = [rows for s in decoding if (rows := self._or_end(s, decode_rows, s, self._rows_per_sequence))]
        plan = StepPlan(tuple(self._cleared), tuple(self._restored), tuple(chunks), tuple(rows))
        self._cleared, self._restored = [], []
        if not plan.restored:
            self._disk.start_loads()  # else after the step: it may read a state that a load is going to overwrite
        return plan

    def tend_disk(self, *, is_closing: bool = False) -> bool:
        """Takes in what the disk has done, and has it write the next prefix; whether one is being written.

        When no step will follow, the latest prefixes are written first.
        """
        for sequence in self._disk.take_loaded():
            self._requeue(sequence)
        return self._disk.write_next(is_idle=is_closing or self.is_idle, is_last=is_closing)

    def observe(self, plan: StepPlan, seconds: float, speculator: Speculator) -> None:
        """Reports what a step cost: to the drafting policy without prompts, to the pace and the disk with them."""
        if plan.chunks:
            num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
            self._pace.observe(num_tokens, seconds)
            self._disk.observe_prefill(num_tokens, seconds)
        elif plan.rows:
            num_rows = sum(len(rows.token_ids) for rows in plan.rows)
            speculator.observe(num_rows, plan.depth_by(Drafter.MTP), plan.depth_by(Drafter.DFLASH), seconds)

    def catch_up(self) -> None:
        """Does what can wait until the device computes."""
        for sequence in self._running.values():
            sequence.logits_rules.catch_up()

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Event]:
        """Updates the sequences with the step's results; returns the events to deliver, in order."""
        events, self._ended = self._ended, []
        for chunk, result in zip(plan.chunks, output.chunks, strict=True):
            events += self._commit(self._commit_chunk, self._running[chunk.request_id], chunk, result)
        for rows, result in zip(plan.rows, output.rows, strict=True):
            events += self._commit(self._commit_rows, self._running[rows.request_id], rows, result)
        self._totals.num_steps += not plan.is_empty
        self._disk.start_loads()
        return events

    # Pages and slots.

    def _grow(self) -> None:
        """Gives each running answer the pages of its next rows, in order."""
        decoding = [s for s in self._running.values() if not s.is_prefilling]
        growing = [s for s in decoding if (self._or_end(s, self._num_missing, s) or 0) > 0]
        for sequence in sorted(growing, key=lambda s: s.order):
            # One before it may have preempted it.
            if sequence.slot is not None:
                self._or_end(sequence, self._ensure_pages, sequence)

    def _num_missing(self, sequence: Sequence) -> int:
        """Pages that its next step needs beyond those it has."""
        return sequence.num_pages_needed(self._ahead) - len(sequence.pages)

    def _ensure_pages(self, sequence: Sequence) -> None:
        """Gives it the missing pages, or preempts it where not even all those after it would make room."""
        missing = self._num_missing(sequence)
        self._recall_pages(missing)
        after = [other for other in self._from_last() if other.order > sequence.order]
        victims = fewest(after, lambda chosen: self._num_available(chosen) >= missing)
        for victim in [sequence] if victims is None else victims:
            self._preempt(victim)
        if victims is not None:
            self._free_pages(missing)
            sequence.pages = np.append(sequence.pages, np.array(self._pool.take(missing), dtype=np.int32))

    def _from_last(self) -> list[Sequence]:
        """The running sequences, the last in order first."""
        return sorted(self._running.values(), key=lambda s: s.order, reverse=True)

    def _num_available(self, victims: list[Sequence], kept: tuple[int, ...] = ()) -> int:
        """Pages that are free or can be freed by eviction, once these are preempted and while `kept` is held."""
        kept_pages = set(kept)
        released = Counter(page for victim in victims for page in victim.pages.tolist() if page not in kept_pages)
        num_released = sum(self._pool.num_readers(page) == count for page, count in released.items())
        num_kept = sum(self._pool.num_readers(page) == 0 for page in kept_pages)
        return self._pool.num_free + self._pool.num_cached_only - num_kept + num_released

    def _recall_pages(self, count: int, kept: tuple[int, ...] = ()) -> None:
        """Has the disk give back pages that are only being written, where so many are not available otherwise."""
        if self._disk.is_busy and self._num_available([], kept) < count:
            self._disk.stop_writing()

    def _free_pages(self, count: int) -> None:
        """Evicts until so many pages are free, where `_num_available` said that it is possible."""
        if not self._prefix.free_pages(count):
            raise RuntimeError(f"{count} pages were counted as available and only {self._pool.num_free} are.")

    def _preempt(self, sequence: Sequence) -> None:
        self._totals.num_preempted += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Takes its slot and pages; it waits for admission again, in its old place."""
        self._release(sequence)
        insort(self._waiting, sequence, key=lambda s: s.order)

    def _admit(self) -> None:
        """Admits the queue until one has to wait; none behind it is admitted before it."""
        while (sequence := self._next_waiting()) and not sequence.needs_images:
            if self._refused == (sequence, self._pool.num_changes):
                return  # matching a long prompt against the cache in every step would delay those that run
            if self._or_end(sequence, self._try_admit, sequence) is False:
                self._refused = sequence, self._pool.num_changes
                return

    def _next_waiting(self) -> Sequence | None:
        """Who is admitted next: of the client whose turn it is the request with the least prompt to compute.

        A sequence that has begun goes before those that have not, as does one whose images are encoded or whose
        prefix was read from disk.
        """
        first = next_in_queue(self._waiting, self._running.values())
        if first is None:
            return None
        rivals = [s for s in self._waiting if s.has_same_turns(first)]
        begun = next((s for s in rivals if s.is_started or s.images or s.loaded), None)
        return begun or shortest_first(rivals, lambda s: s.num_left, lambda s: s.num_overtaken)

    def _try_admit(self, sequence: Sequence) -> bool:
        """Gives the sequence a slot and pages, from its longest cached prefix on; False where there is no room."""
        prompt, is_cached = sequence.cache_tokens, sequence.is_cached
        hit = self._prefix.find(prompt) if is_cached else None
        positions = checkpoint_positions(prompt, self._config, hit.num_tokens if hit else 0) if is_cached else ()
        shared = hit.pages if hit else ()
        missing = sequence.num_pages_needed(self._ahead) - len(shared)
        victims = self._victims_for(sequence, shared, missing)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        if not (is_cached and self._load(sequence, hit)):
            for page in shared:
                self._pool.share(page)
            self._free_pages(missing)
            sequence.pages = np.array([*shared, *self._pool.take(missing)], dtype=np.int32)
        self._waiting.remove(sequence)
        for other in self._waiting:
            other.num_overtaken += other.order < sequence.order
        self._turns.serve(sequence.turn)
        self._running[sequence.request.request_id] = sequence
        sequence.slot = self._free_slots.pop()
        if sequence.load is None:
            self._start_from(hit, sequence)
            sequence.save_positions = positions
            if is_cached:
                self._prefix.touch(prompt, hit)
        return True

    def _load(self, sequence: Sequence, hit: Hit | None) -> bool:
        """Has it wait in its slot for a longer prefix from disk, if there is one; it is admitted again afterwards."""
        entry = self._disk.find(sequence, hit)
        return entry is not None and self._disk.load(sequence, entry, hit)

    def _victims_for(self, sequence: Sequence, shared: tuple[int, ...], missing: int) -> list[Sequence] | None:
        """Whom to preempt so that this one can be admitted: nobody, some of less right, or None if it must wait.

        One page for each of the others stays free: what is admitted now should not be preempted in the next step.
        """
        lesser = [s for s in self._from_last() if s.request.priority > sequence.request.priority]
        lesser += beyond_shares(sequence, self._from_last())
        if self._free_slots or lesser:
            self._recall_pages(missing + len(self._running), shared)

        def is_enough(victims: list[Sequence]) -> bool:
            num_others = len(self._running) - len(victims)
            has_slot = bool(self._free_slots or victims)
            return has_slot and self._num_available(victims, shared) >= missing + num_others

        return fewest(lesser, is_enough)

    def _start_from(self, hit: Hit | None, sequence: Sequence) -> None:
        """Has the next step put the state of the hit, or a blank one, into the sequence's slot."""
        slot = slot_of(sequence)
        if hit:
            self._restored.append((hit.checkpoint, slot))
            sequence.num_computed = hit.num_tokens
        else:
            self._cleared.append(slot)
        tier = self._disk.count_hit(sequence, hit)
        if not sequence.is_started:
            sequence.num_cached, sequence.cached_tier = sequence.num_computed, tier

    # Planning the step.

    def _chunks(self, prefilling: list[Sequence]) -> list[PromptChunk]:
        prefilling = sorted(prefilling, key=lambda s: s.order)
        remaining = [s.num_prompt - s.num_computed for s in prefilling]
        has_answers = any(not s.is_prefilling for s in self._running.values())
        lengths = prompt_shares(remaining, self._pace.budget(has_answers=has_answers))
        planned = [(s, length) for s, length in zip(prefilling, lengths, strict=True) if length]
        return [chunk for s, length in planned if (chunk := self._or_end(s, self._chunk, s, length))]

    def _chunk(self, sequence: Sequence, length: int) -> PromptChunk:
        return prompt_chunk(sequence, length, self._saves(sequence, sequence.num_computed + length))

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
                    sequence.reserved.add(checkpoint)
                    saves.append(StateSave(position, checkpoint))
        return tuple(saves)

    def _or_end(self, sequence: Sequence, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `make` returns; whatever it raises ends the sequence, and its event comes with the next commit."""
        try:
            return make(*args, **kwargs)
        except BaseException as error:
            self._ended.append(self._fail(sequence, error))
            return None

    # Committing the step.

    def _commit(
        self,
        take: Callable[[Sequence, T, Result, list[Event]], None],
        sequence: Sequence,
        part: T,
        result: Result | BaseException,
    ) -> list[Event]:
        """Has `take` commit one sequence's result and append its events; whatever goes wrong ends the sequence."""
        events: list[Event] = []
        try:
            if isinstance(result, BaseException):
                raise result
            take(sequence, part, result, events)
        except BaseException as error:
            if sequence.is_prefilling and sequence.is_cached and isinstance(error, ArithmeticError):
                # One of the states that this prompt was continued from, or left behind, is not finite.
                self._prefix.discard(sequence.cache_tokens)
                self._disk.discard(sequence)
            events.append(self._fail(sequence, error))
        return events

    def _commit_chunk(self, sequence: Sequence, chunk: PromptChunk, result: Result, events: list[Event]) -> None:
        if not sequence.is_started:
            sequence.is_started = True
            events.append(Started(chunk.request_id))
        self._totals.prompt_tokens += len(chunk.token_ids)
        for save in chunk.saves:
            pages = [int(page) for page in chunk.pages[: save.num_tokens // PAGE_TOKENS]]
            prefix = sequence.cache_tokens[: save.num_tokens]
            self._prefix.insert(prefix, pages, save.checkpoint, is_pinned=sequence.request.pin_prompt)
            sequence.reserved.remove(save.checkpoint)
        sequence.num_computed = chunk.end
        # What was delivered before a preemption is not delivered again.
        logprobs = result.prompt_logprobs[max(0, sequence.num_prompt_logprobs - chunk.start) :]
        if logprobs:
            sequence.num_prompt_logprobs += len(logprobs)
            events.append(PromptLogprobs(chunk.request_id, logprobs))
        if chunk.draw:
            sequence.speculation.offer(result.drafts)
            self._append(sequence, result, events)

    def _commit_rows(self, sequence: Sequence, rows: DecodeRows, result: Result, events: list[Event]) -> None:
        sequence.num_computed += result.num_accepted
        sequence.num_accepted = result.num_accepted
        drafted = len(rows.token_ids) - 1 - rows.draw.first_new
        if drafted > 0:
            accepted = len(result.token_ids) - 1
            sequence.speculation.observe(drafted, accepted)
            self._totals.drafts.add(drafted, accepted)
            self._totals.drafts_by_class.add(*sequence.speculation.checked, drafted, accepted)
            if sequence.speculation.takes_head_sample():
                self._totals.head_samples += 1
                self._totals.head_accepted += accepted > 0
        sequence.speculation.offer(result.drafts)
        self._append(sequence, result, events)

    def _append(self, sequence: Sequence, result: Result, events: list[Event]) -> None:
        num_before = sequence.num_sampled
        delivered, reason = sequence.append(result.token_ids)
        self._totals.completion_tokens += sequence.num_sampled - num_before
        if delivered:
            logprobs = result.logprobs[: len(delivered)]
            packed = PackedLogprobs.pack(logprobs) if logprobs else ()
            events.append(Tokens(sequence.request.request_id, delivered, packed))
        if reason:
            events.append(self._finish(sequence, reason))

    # The end of a sequence.

    def _end(self, sequence: Sequence, reason: FinishReason) -> Event:
        try:
            return self._finish(sequence, reason)
        except BaseException as error:
            return self._fail(sequence, error)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finished:
        event = Finished(sequence.request.request_id, reason, sequence.counts)
        self._remove(sequence)
        self._totals.finished[reason] += 1
        return event

    def _fail(self, sequence: Sequence, error: BaseException) -> Failed:
        """Ends the sequence with an error; called inside the `except` that caught it."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        self._remove(sequence)
        self._totals.num_failed += 1
        if not isinstance(error, OneboxError | ArithmeticError):
            _log.error("request %s failed", sequence.request.request_id, exc_info=error)
            self.check()
        return failure_of(sequence.request.request_id, error)

    def _remove(self, sequence: Sequence) -> None:
        """Frees what it holds and takes it out of the queue; one that is out already stays so."""
        if sequence.slot is not None:
            self._release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Frees a running sequence's slot, pages and reserved checkpoints."""
        slot = slot_of(sequence)
        del self._running[sequence.request.request_id]
        self._free_slots.append(slot)
        # It may have been admitted for this very step.
        self._cleared = [cleared for cleared in self._cleared if cleared != slot]
        self._restored = [restored for restored in self._restored if restored[1] != slot]
        for page in sequence.pages.tolist():
            self._pool.give_back(page)
        for checkpoint in sequence.reserved:
            self._prefix.cancel(checkpoint)
        self._disk.leave(sequence)
        sequence.forget()
        try:
            sequence.speculation.forget()
        except BaseException:
            _log.exception("the drafts of request %s could not be dropped", sequence.request.request_id)

    def clear_cache(self) -> None:
        """Drops every cached prefix, on disk too."""
        self._prefix.clear()
        self._disk.clear()

    def check(self) -> None:
        """Raises unless every slot, page and checkpoint is either free or held by its known holders."""
        held = [slot_of(sequence) for sequence in self._running.values()]
        if sorted(held + self._free_slots) != list(range(self._config.max_num_seqs)):
            raise RuntimeError(f"Slots are lost or held twice: held {held}, free {self._free_slots}.")
        holders = Counter(self._prefix.holders())
        for sequence in self._running.values():
            holders.update(sequence.pages.tolist())
        holders.update(self._disk.holders())
        reserved = [number for sequence in self._running.values() for number in sequence.reserved]
        reserved += self._disk.reserved()
        self._pool.check(holders)
        self._prefix.check()
        if sorted(reserved) != sorted(self._prefix.reserved):
            raise RuntimeError(f"Checkpoints {sorted(self._prefix.reserved)} are reserved, by sequences {reserved}.")
