"""The engine's only door: submit token ids, receive Events, abort, look at the stats, close.

Callers know no tensors and no steps. One thread owns the model and the scheduler; what crosses over is a Request on the
way in and Events on the way out, so the thread can become a process without a change to any caller. Nothing in this
module imports torch.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from onebox.engine.adjust import Adjuster
from onebox.engine.batch import Batch, Runner
from onebox.engine.config import PAGE_TOKENS, EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.constraint import Constraint, Grammar, GrammarKind, Vocabulary
from onebox.engine.door import (
    EngineDoor,
    EngineRestartingError,
    Health,
    HealthStatus,
    Observer,
    RequestHandle,
    Watch,
    check_places,
    check_request,
    copies_of,
)
from onebox.engine.draft.counts import AcceptanceCounts
from onebox.engine.prefix import PrefixStats
from onebox.engine.request import (
    ContextTooLongError,
    Counts,
    EngineStoppedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pictures,
    PromptLogprobs,
    QueueFullError,
    Request,
    SamplingParams,
    Started,
    TokenLogprob,
    Tokens,
    Vision,
)
from onebox.engine.scheduler import Scheduler
from onebox.engine.sequence import Sequence
from onebox.engine.speculate import Speculator
from onebox.engine.stats import EngineStats, FrozenTotals
from onebox.spec.errors import OneboxError, UnsupportedError
from onebox.spec.vocabulary import TokenTable

__all__ = [
    "PAGE_TOKENS",
    "AcceptanceCounts",
    "ContextTooLongError",
    "Counts",
    "Deliver",
    "Engine",
    "EngineConfig",
    "EngineDoor",
    "EngineRestartingError",
    "EngineStats",
    "EngineStoppedError",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "FrozenTotals",
    "Grammar",
    "GrammarKind",
    "Health",
    "HealthStatus",
    "Observer",
    "Pictures",
    "PrefixStats",
    "PromptLogprobs",
    "QueueFullError",
    "Request",
    "RequestHandle",
    "SamplingParams",
    "SpeculationConfig",
    "SpeculationMethod",
    "Started",
    "TokenLogprob",
    "TokenTable",
    "Tokens",
    "Vision",
    "Watch",
]

Deliver = Callable[[list[tuple[RequestHandle, Event]], EngineStats, float], None]
"""Takes what one step gave to whom, the stats after it, and when it began on time.monotonic's clock."""

_CLOSED = "The engine was closed before this request was done."
_log = logging.getLogger(__name__)


class _Done(NamedTuple):
    """A step that is accounted for, and of which nobody has heard yet."""

    batch: Batch
    began: float
    """On time.monotonic's clock."""
    seconds: float
    events: list[Event]


class Engine:
    """The loaded model as callers see it. Every accepted request ends with one Finished or Failed event."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        token_table: TokenTable | None = None,
        deliver: Deliver | None = None,
    ) -> None:
        """The token table says what each token is as bytes; without one, requests with a grammar are refused.

        `deliver` is called on the engine's thread once a step, also where nobody gets anything; the device computes the
        next step by then. Unless given, events go to their handles.
        """
        self.config = config
        self.observer: Observer | None = None
        self._hand_out = deliver or _post
        self._runner = runner
        self._vocabulary = Vocabulary(token_table, runner.vocab_size) if token_table else None
        self._speculator = Speculator(config.speculation)
        self._scheduler = Scheduler(config)
        self._stats = self._scheduler.stats()
        self._done: _Done | None = None
        # Guards all below; the engine thread waits on it when nothing is alive.
        self._changed = threading.Condition()
        self._open: dict[str, RequestHandle] = {}
        self._submitted: deque[Sequence] = deque()
        self._aborted: set[str] = set()
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._loop, name="onebox-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called from any thread.

    def submit(self, request: Request) -> RequestHandle:
        """Accepts the request or refuses it with an error that says why; nothing is computed before it returns."""
        return self.submit_all([request])[0]

    def submit_copies(self, request: Request, count: int) -> tuple[RequestHandle, ...]:
        """Accepts `count` answers to one prompt, all or none. Copy i has the id `<id>/<i>` and the seed plus i."""
        return self.submit_all(copies_of(request, count))

    def submit_all(self, requests: list[Request]) -> tuple[RequestHandle, ...]:
        """Accepts all of these or none."""
        sequences = [self._sequence(request) for request in requests]
        with self._changed:
            self._refuse_when_stopped_or_full([request.request_id for request in requests])
            observer = self.observer
            handles = tuple(RequestHandle(r.request_id, observer(r) if observer else None) for r in requests)
            self._open.update((handle.request_id, handle) for handle in handles)
            self._submitted += sequences
            self._changed.notify()
        return handles

    def abort(self, request_id: str) -> None:
        """Ends the request at the next step; its last event is Finished with the reason abort. Others: no effect."""
        with self._changed:
            if request_id in self._open:
                self._aborted.add(request_id)
                self._changed.notify()

    def stats(self) -> EngineStats:
        """As of the last step, but for the requests that came in since."""
        with self._changed:
            num_submitted, is_alive = len(self._submitted), self._stopped is None
            latest = self._stats
        return replace(latest, is_alive=is_alive, num_waiting=latest.num_waiting + num_submitted)

    def health(self) -> Health:
        with self._changed:
            message = self._stopped
        if message is None:
            return Health(HealthStatus.OK, "The engine runs.")
        return Health(HealthStatus.STOPPED if message == _CLOSED else HealthStatus.FAILED, message)

    def wait_stopped(self) -> str:
        """Returns when the engine has stopped, and says why."""
        self._thread.join()
        return self._stopped or "The engine stopped."

    def close(self) -> None:
        """Fails what is open, stops the thread and waits for it. Closing twice is fine."""
        self._stop(_CLOSED)
        self._thread.join()

    def _sequence(self, request: Request) -> Sequence:
        sampling = request.sampling
        max_tokens = check_request(request, self.config, self._runner.vocab_size)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
            request = replace(request, sampling=sampling)
        eos = () if sampling.ignore_eos else self.config.eos_token_ids
        stop_token_ids = frozenset(sampling.stop_token_ids) | frozenset(eos)
        return Sequence(
            request,
            max_tokens,
            stop_token_ids,
            Adjuster(sampling, request.prompt, stop_token_ids, self._constraint(sampling.grammar)),
            self._speculator.start(request.prompt, sampling.seed),
            deadline=None if request.timeout_s is None else time.monotonic() + request.timeout_s,
        )

    def _constraint(self, grammar: Grammar | None) -> Constraint | None:
        if grammar is None:
            return None
        if self._vocabulary is None:
            raise UnsupportedError("This engine has no token table, so it cannot hold an answer to a grammar.")
        return self._vocabulary.constrain(grammar)

    def _refuse_when_stopped_or_full(self, request_ids: list[str]) -> None:
        if self._stopped is not None:
            raise EngineStoppedError("The engine has stopped and accepts nothing more.")
        check_places(request_ids, self._open, self.config)

    def _stop(self, message: str) -> None:
        with self._changed:
            if self._stopped is None:
                self._stopped = message
            self._changed.notify()

    # The engine thread.

    def _loop(self) -> None:
        try:
            while self._take_in():
                self._step()
        except Exception as error:
            _log.exception("the engine died")
            self._stop(f"The engine died: {str(error).rstrip('.')}.")
        finally:
            self._fail_open()

    def _take_in(self) -> bool:
        """Waits until there is something to do, takes in what came, and tells whether to go on."""
        # What is missed by a look without the lock is seen after the next step.
        if not self._scheduler.is_idle and not self._has_news():
            return True
        with self._changed:
            if self._scheduler.is_idle:
                self._changed.wait_for(self._has_news)
            submitted, aborted = [*self._submitted], [*self._aborted]
            self._submitted.clear()
            self._aborted.clear()
            goes_on = self._stopped is None
        for sequence in submitted:
            self._add(sequence)
        for request_id in aborted:
            self._deliver_early(self._scheduler.abort(request_id))
        return goes_on

    def _add(self, sequence: Sequence) -> None:
        """Queues a request, its images looked at; one whose images are refused ends here."""
        request = sequence.request
        try:
            if request.vision:
                sequence.seen = self._runner.see(request.prompt, request.vision)
        except OneboxError as error:
            self._deliver_early([Failed(request.request_id, str(error))])
        else:
            self._scheduler.add(sequence)

    def _has_news(self) -> bool:
        return bool(self._submitted or self._aborted or self._stopped)

    def _step(self) -> None:
        """Decide, compute, account. Nobody hears of it before the next step is under way, if there is one."""
        self._deliver_early(self._scheduler.expire(time.monotonic()))
        batch = self._scheduler.next()
        began = time.monotonic()
        output = self._runner.run(batch, self._tell)
        self._tell()  # where the runner had no time for it
        self._done = _Done(batch, began, time.monotonic() - began, self._scheduler.commit(batch, output))
        if self._scheduler.is_idle:
            self._scheduler.check()
            self._tell()

    def _tell(self) -> None:
        """What is left to do about the last step. The device has its next work by then and does not wait for this."""
        done, self._done = self._done, None
        if done:
            self._scheduler.observe(done.batch, done.seconds, self._speculator)
            with self._changed:
                self._stats = self._scheduler.stats()
            self._deliver(done.events, done.began)

    def _deliver_early(self, events: list[Event]) -> None:
        """Delivers what ended between two steps, after what came before."""
        if events:
            self._tell()
            self._deliver(events, time.monotonic())

    def _deliver(self, events: list[Event], began: float) -> None:
        posts: list[tuple[RequestHandle, Event]] = []
        with self._changed:
            for event in events:
                is_last = isinstance(event, (Finished, Failed))
                if is_last:
                    # The id is free from now on: an abort that came too late must not meet whoever takes it next.
                    self._aborted.discard(event.request_id)
                handle = self._open.pop(event.request_id) if is_last else self._open[event.request_id]
                posts.append((handle, event))
            stats = self._stats
        self._hand_out(posts, stats, began)

    def _fail_open(self) -> None:
        self._tell()
        with self._changed:
            request_ids, message = list(self._open), self._stopped or "The engine stopped."
        self._deliver([Failed(request_id, message) for request_id in request_ids], time.monotonic())


def _post(posts: list[tuple[RequestHandle, Event]], _stats: EngineStats, began: float) -> None:
    for handle, event in posts:
        handle.post(event, began)
