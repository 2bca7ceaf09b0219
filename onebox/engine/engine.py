"""The engine: one thread that owns the model and the scheduler, and computes one step after the other.

Callers know no tensors and no steps. A Request goes in, Events come out; both are plain values, so the same engine also
runs in a process of its own (`onebox.engine.remote`). Nothing in this module imports torch.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from onebox.engine.client import (
    Deliveries,
    EngineClient,
    Health,
    HealthStatus,
    OpenRequests,
    RequestHandle,
    check_request,
)
from onebox.engine.config import EngineConfig
from onebox.engine.draft.speculate import Speculator
from onebox.engine.grammar.compiler import LIBRARY_STACK_BYTES, GrammarCompiler
from onebox.engine.grammar.constraint import Constraint
from onebox.engine.grammar.library import start_thread
from onebox.engine.grammar.value import Grammar
from onebox.engine.logits import LogitsRules
from onebox.engine.prefix import PrefixLookup
from onebox.engine.request import EngineStoppedError, Event, Failed, Finished, FinishReason, Request, Tokens
from onebox.engine.scheduler import Scheduler
from onebox.engine.sequence import Sequence
from onebox.engine.stats import EngineStats
from onebox.engine.step import Runner, StepOutput, StepPlan
from onebox.spec.errors import UnsupportedError
from onebox.spec.vocabulary import TokenTable
from onebox.store.keys import prefix_keys

if TYPE_CHECKING:
    from onebox.engine.disk.tier import DiskTier
    from onebox.engine.draft.vocabulary import DraftVocabulary

__all__ = ["CommittedStep", "Deliver", "Engine", "Outbox"]

Deliver = Callable[[Deliveries, EngineStats, float], list[Failed]]
"""Called with the events of one step, the stats after it, and when it started on time.monotonic's clock. Returns a
failure for each request whose events could not be delivered: that request ends with it."""

_REST_S = 0.5
"""How long the engine's thread waits for the disk before it looks at deadlines."""
_CLOSED = "The engine was closed before this request was done."
_log = logging.getLogger(__name__)
T = TypeVar("T")


class CommittedStep(NamedTuple):
    """A step that is accounted for and not delivered yet."""

    plan: StepPlan
    started_at: float
    """On time.monotonic's clock."""
    seconds: float
    events: list[Event]


class Outbox:
    """Holds one committed step until the device computes the next one.

    Delivering takes host time: statistics, events, and pickling them where the engine has its own process. Done right
    after the commit, it would leave the device idle. So the next step's work is queued first, and the step before it is
    delivered while the device computes.
    """

    def __init__(self, send: Callable[[CommittedStep], None]) -> None:
        self._send = send
        self._step: CommittedStep | None = None

    def put(self, step: CommittedStep) -> None:
        if self._step is not None:
            raise RuntimeError("A step was committed before the one before it was delivered.")
        self._step = step

    def deliver(self) -> None:
        """Delivers the step that is held, if any."""
        step, self._step = self._step, None
        if step:
            self._send(step)


class Engine(EngineClient):
    """The loaded model as callers see it. Every accepted request ends with one Finished or Failed event."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        token_table: TokenTable | None = None,
        deliver: Deliver | None = None,
        disk: "DiskTier | None" = None,
        draft_vocabulary: "DraftVocabulary | None" = None,
    ) -> None:
        """The token table gives each token's bytes; without one, requests with a grammar are refused.

        `deliver` is called on the engine's thread once a step, also where the step has no events. Unless given, events
        go to their handles. `disk` keeps prefixes; it is closed with the engine, as is `draft_vocabulary`, the list of
        the runner's head for drafts.
        """
        self._config = config
        self._deliver = deliver or _deliver_to_handles
        self._runner = runner
        self._grammars: GrammarCompiler | None = None
        if token_table:
            has_drafts = config.speculation.max_drafts > 0
            self._grammars = GrammarCompiler(token_table, runner.vocab_size, has_drafts=has_drafts)
        self._speculator = Speculator(config.speculation, config.thinking_token_ids)
        self._scheduler = Scheduler(config, disk)
        self._disk = disk
        self._draft_vocabulary = draft_vocabulary
        self._outbox = Outbox(self._send)
        self._undelivered: set[str] = set()
        """Requests that were failed because their events could not be delivered; the scheduler may have them yet."""
        self._stats = self._latest_stats()
        # Guards all below; the engine thread waits on it when nothing is open.
        self._changed = threading.Condition()
        self._open = OpenRequests()
        self._compiling: dict[str, Sequence] = {}
        """Accepted, but for their grammars."""
        self._submitted: deque[Sequence] = deque()
        self._aborted: set[str] = set()
        self._stopped: str | None = None
        if disk:
            disk.on_news = self._wake
        self._thread = start_thread(self._loop, "onebox-engine", LIBRARY_STACK_BYTES)

    # Called from any thread.

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def submit_all(self, requests: list[Request]) -> tuple[RequestHandle, ...]:
        return self.submit_later(requests).result()

    def submit_later(self, requests: list[Request]) -> "Future[tuple[RequestHandle, ...]]":
        """As `submit_all`, without waiting for grammars: their refusals are the future's, all others are raised."""
        grammars = [request.sampling.grammar for request in requests]
        has_grammar = any(grammars)
        if has_grammar:
            self._compiler()
        sequences = [self._sequence(request) for request in requests]
        with self._changed:
            if self._stopped is not None:
                raise EngineStoppedError("The engine has stopped and accepts nothing more.")
            handles = self._open.accept(requests, self._config, self.observer)
            if has_grammar:
                self._compiling.update((sequence.request.request_id, sequence) for sequence in sequences)
            else:
                self._submitted += sequences
                self._changed.notify()
        accepted: Future[tuple[RequestHandle, ...]] = Future()
        if has_grammar:
            self._constrain(sequences, lambda error: _settle(accepted, handles, error))
        else:
            accepted.set_result(handles)
        return accepted

    def check_grammar(self, grammar: Grammar) -> "Future[None]":
        return self._compiler().check(grammar)

    def lookup(self, request: Request) -> PrefixLookup:
        check_request(request, self._config, self._runner.vocab_size)
        with self._changed:
            if self._stopped is not None:
                raise EngineStoppedError("The engine has stopped and accepts nothing more.")
        if not request.uses_cache:
            return PrefixLookup()
        prompt, vision = request.prompt, request.vision
        return self._scheduler.lookup(self._runner.cache_tokens(prompt, vision) if vision else prompt)

    def warm_up_grammars(self) -> None:
        """Prepares for the first grammar, in the background."""
        if self._grammars:
            self._grammars.warm_up()

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._open:
                self._aborted.add(request_id)
                self._changed.notify()

    def stats(self) -> EngineStats:
        """As of the last delivered step, with the requests submitted since."""
        with self._changed:
            num_submitted, is_alive = len(self._submitted) + len(self._compiling), self._stopped is None
            latest = self._stats
        return replace(latest, is_alive=is_alive, num_waiting=latest.num_waiting + num_submitted)

    def health(self) -> Health:
        with self._changed:
            message = self._stopped
        if message is None:
            return Health(HealthStatus.OK, "The engine runs.")
        return Health(HealthStatus.STOPPED if message == _CLOSED else HealthStatus.FAILED, message)

    def wait_stopped(self) -> str:
        """Returns why the engine stopped, once it has."""
        self._thread.join()
        return self._stopped or "The engine stopped."

    def close(self) -> None:
        self._stop(_CLOSED)
        if self._grammars:
            self._grammars.close()
        self._thread.join()

    def _sequence(self, request: Request) -> Sequence:
        sampling = request.sampling
        max_tokens = check_request(request, self._config, self._runner.vocab_size)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
            request = replace(request, sampling=sampling)
        eos = () if sampling.ignore_eos else self._config.eos_token_ids
        stop_token_ids = frozenset(sampling.stop_token_ids) | frozenset(eos)
        return Sequence(
            request,
            max_tokens,
            stop_token_ids,
            LogitsRules(sampling, request.prompt, stop_token_ids),
            self._speculator.start(request.prompt, sampling.seed, stop_token_ids, is_plain=sampling.is_plain),
            deadline=None if request.timeout_s is None else time.monotonic() + request.timeout_s,
            # Here, on the caller's thread. With images they follow from the pixels, which are encoded later.
            prefix_keys=prefix_keys(request.prompt) if self._disk and request.vision is None else None,
        )

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            raise UnsupportedError("This engine has no token table, so it cannot hold an answer to a grammar.")
        return self._grammars

    def _constrain(self, sequences: list[Sequence], done: Callable[[BaseException | None], None]) -> None:
        """Queues the sequences once the last of their grammars is compiled, or none where one is refused."""
        grammars = [(sequence, sequence.request.sampling.grammar) for sequence in sequences]
        compiled = [(s, self._compiler().constrain_later(grammar)) for s, grammar in grammars if grammar]
        num_left = itertools.count(len(compiled) - 1, -1)

        def count(_: "Future[Constraint]") -> None:
            if next(num_left) == 0:
                done(self._queue_compiled(sequences, compiled))

        for _, constrained in compiled:
            constrained.add_done_callback(count)

    def _queue_compiled(
        self, sequences: list[Sequence], compiled: "list[tuple[Sequence, Future[Constraint]]]"
    ) -> BaseException | None:
        """Returns why a grammar was refused. Sequences that were aborted meanwhile are left out."""
        error = next((refused for _, constrained in compiled if (refused := constrained.exception())), None)
        if error is None:
            for sequence, constrained in compiled:
                sequence.logits_rules.constrain(constrained.result())
        with self._changed:
            request_ids = [sequence.request.request_id for sequence in sequences]
            kept = [found for request_id in request_ids if (found := self._compiling.pop(request_id, None))]
            if error:
                self._open.remove(sequence.request.request_id for sequence in kept)
            else:
                self._submitted += kept
                self._changed.notify()
        return error

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _stop(self, message: str) -> None:
        with self._changed:
            if self._stopped is None:
                self._stopped = message
            self._changed.notify()

    # The engine thread.

    def _loop(self) -> None:
        try:
            while self._take_requests():
                self._step()
        except BaseException as error:
            _log.exception("the engine died")
            self._stop(f"The engine died: {str(error).rstrip('.')}.")
        finally:
            self._fail_open()
            if self._disk:
                self._close_disk(self._disk)
            if self._draft_vocabulary:
                self._draft_vocabulary.close()
            if self._grammars:
                self._grammars.close()

    def _latest_stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        return replace(stats, draft_vocab=self._draft_vocabulary.stats) if self._draft_vocabulary else stats

    def _step(self) -> None:
        """One step: plan, run, commit, deliver. `Outbox` says why a step is delivered during the next one."""
        self._deliver_now(self._scheduler.expire(time.monotonic()))
        self._encode_next()
        planned_at = time.monotonic()
        plan = self._scheduler.plan()
        if plan.is_empty:
            self._rest(plan)
            return
        if self._draft_vocabulary:
            self._draft_vocabulary.tend(self._runner.put_draft_rows)
        started_at = time.monotonic()
        run = self._runner.start(plan)
        self._outbox.deliver()  # the step before this one, while the device computes this one
        self._scheduler.catch_up()
        output = run.finish()
        events = self._drop_undelivered(self._scheduler.commit(plan, output))
        # What a sequence waits for, the host's part included: a choice that saves steps saves that, too.
        seconds = time.monotonic() - planned_at
        self._outbox.put(CommittedStep(plan, started_at, seconds, events))
        if self._scheduler.is_idle:
            self._scheduler.check()
            self._outbox.deliver()  # there is no next step to overlap with
            self._drop_undelivered([])
            self._scheduler.tend_disk()
            if self._disk:
                self._route([], time.monotonic())  # what the disk has done is in the stats, as in `_rest`

    def _rest(self, plan: StepPlan) -> None:
        """Nothing can be computed: everybody failed while the step was planned, or waits for the disk."""
        events = self._drop_undelivered(self._scheduler.commit(plan, StepOutput()))
        self._outbox.deliver()
        self._route(events, time.monotonic())  # without events, too: what the disk did is in the stats
        self._drop_undelivered([])
        with self._changed:
            if not self._scheduler.is_idle:
                self._changed.wait_for(self._has_changes, _REST_S)

    def _close_disk(self, disk: "DiskTier") -> None:
        """Writes what memory holds, within a limit, unless the engine died: then nobody knows what it holds."""
        limit = self._config.prefix_disk.flush_s if self._config.prefix_disk and self._stopped == _CLOSED else 0.0
        until = time.monotonic() + limit
        disk.hurry()
        try:
            while time.monotonic() < until and self._scheduler.tend_disk(is_closing=True):
                with self._changed:
                    self._changed.wait_for(lambda: disk.has_news, max(0.0, until - time.monotonic()))
        finally:
            disk.close()
            self._scheduler.tend_disk(is_closing=True)  # takes back what it held
            with self._changed:
                self._stats = self._latest_stats()

    def _encode_next(self) -> None:
        """Encodes the images of the request that is admitted next: one request's in a step, so that answers go on."""
        sequence = self._scheduler.next_to_encode()
        if sequence is None or sequence.request.vision is None:
            return
        request = sequence.request
        try:
            sequence.images = self._runner.encode_images(request.prompt, sequence.request.vision)
        except BaseException as error:
            self._deliver_now(self._scheduler.fail(request.request_id, error))

    def _take_requests(self) -> bool:
        """Waits until there is work, takes in submitted and aborted requests; False once the engine is stopped."""
        # Read without the lock: a change that is missed here is seen after the next step.
        if not self._scheduler.is_idle and not self._has_changes():
            return True
        with self._changed:
            if self._scheduler.is_idle:
                self._changed.wait_for(self._has_changes)
            submitted, aborted = [*self._submitted], [*self._aborted]
            uncompiled = [self._compiling.pop(request_id) for request_id in aborted if request_id in self._compiling]
            self._submitted.clear()
            self._aborted.clear()
            is_running = self._stopped is None
        for sequence in submitted:
            self._scheduler.add(sequence)
        self._deliver_now([Finished(s.request.request_id, FinishReason.ABORT, s.counts) for s in uncompiled])
        for request_id in aborted:
            self._deliver_now(self._scheduler.abort(request_id))
        return is_running

    def _has_changes(self) -> bool:
        return bool(self._submitted or self._aborted or self._stopped or (self._disk and self._disk.has_news))

    # Delivery, on the engine thread.

    def _send(self, step: CommittedStep) -> None:
        """Delivers a committed step: its cost to the drafting policy, its tokens to the counts, its stats, events."""
        self._scheduler.observe(step.plan, step.seconds, self._speculator)
        if self._draft_vocabulary:
            for event in step.events:
                if isinstance(event, Tokens):
                    self._draft_vocabulary.count(event.token_ids)
        self._route(step.events, step.started_at)

    def _deliver_now(self, events: list[Event]) -> None:
        """Delivers events that arose between two steps, after those of the step before."""
        if events:
            self._outbox.deliver()
            self._route(events, time.monotonic())
            self._drop_undelivered([])

    def _route(self, events: list[Event], started_at: float) -> None:
        with self._changed:
            self._stats = self._latest_stats()
            deliveries = self._open.route(events)
            # An id is free after its last event: a late abort must not hit the next request of that id.
            self._aborted = {request_id for request_id in self._aborted if request_id in self._open}
            stats = self._stats
        failed = self._deliver(deliveries, stats, started_at)
        if failed:
            self._fail_undelivered(failed, {handle.request_id: handle for handle, _ in deliveries})

    def _fail_undelivered(self, failed: list[Failed], handles: dict[str, RequestHandle]) -> None:
        """Fails requests whose events could not be delivered; a step that computes them may be under way."""
        with self._changed:
            self._open.remove([event.request_id for event in failed])
            stats = self._stats
        self._undelivered |= {event.request_id for event in failed}
        self._deliver([(handles[event.request_id], event) for event in failed], stats, time.monotonic())

    def _drop_undelivered(self, events: list[Event]) -> list[Event]:
        """Ends the requests that were failed since the last step, and removes their events."""
        if not self._undelivered:
            return events
        for request_id in self._undelivered:
            self._scheduler.drop(request_id)
        kept = [event for event in events if event.request_id not in self._undelivered]
        self._undelivered.clear()
        return kept

    def _fail_open(self) -> None:
        """Fails what is open when the engine stops, after the last step's events."""
        try:
            self._outbox.deliver()
        except BaseException:
            _log.exception("the last step's events could not be delivered")
        with self._changed:
            request_ids, message = self._open.ids(), self._stopped or "The engine stopped."
            self._compiling.clear()
            self._scheduler.count_failed(len(request_ids))
        self._route([Failed(request_id, message) for request_id in request_ids], time.monotonic())


def _deliver_to_handles(deliveries: Deliveries, _stats: EngineStats, started_at: float) -> list[Failed]:
    for handle, event in deliveries:
        handle.deliver(event, started_at)
    return []


def _settle(accepted: "Future[T]", value: T, error: BaseException | None) -> None:
    if error:
        accepted.set_exception(error)
    else:
        accepted.set_result(value)
