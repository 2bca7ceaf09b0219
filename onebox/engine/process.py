"""The engine's door with the engine in a process of its own, supervised.

What kills the engine kills nobody else: whoever is open then gets Failed with a sentence, another process is started,
and until it is ready requests are refused as restarting. One thread here starts, hears and buries the processes, one
after the other; callers only ever touch what `_changed` guards. Nothing in this module imports torch.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from onebox.engine.config import EngineConfig
from onebox.engine.door import (
    EngineRestartingError,
    Health,
    HealthStatus,
    Observer,
    RequestHandle,
    check_places,
    check_request,
    copies_of,
)
from onebox.engine.request import EngineStoppedError, Failed, Finished, Request
from onebox.engine.stats import EngineStats
from onebox.engine.supervise import ChildProcess, RestartPolicy, add_past
from onebox.engine.wire import (
    Abort,
    Died,
    NotOpened,
    Open,
    Opening,
    Phase,
    Planned,
    Progress,
    Ready,
    Step,
    Submit,
    Verdict,
)
from onebox.spec.errors import OneboxError

__all__ = ["EngineProcess"]

_LOOK_S = 0.5
"""How often a silent process is looked at."""

_log = logging.getLogger(__name__)


def _ignore(_: Progress) -> None:
    pass


class EngineProcess:
    """An EngineDoor. Every accepted request ends with one Finished or Failed event, whatever becomes of the process."""

    def __init__(
        self,
        opening: Opening,
        on_progress: Callable[[Progress], None] = _ignore,
        policy: RestartPolicy | None = None,
    ) -> None:
        """Starts a process and returns at once; `wait_ready` waits for it.

        `on_progress` hears of each part of opening when it is done, at the first start and at all later ones, on a
        thread of this object.
        """
        self.observer: Observer | None = None
        self._opening = opening
        self._on_progress = on_progress
        self._policy = policy or RestartPolicy()
        self._numbers = itertools.count()
        # Guards all below.
        self._changed = threading.Condition()
        self._health = Health(HealthStatus.STARTING, "The engine is starting.")
        self._not_opened: OneboxError | None = None
        self._planned: Planned | None = None
        self._child: ChildProcess | None = None
        self._open: dict[str, RequestHandle] = {}
        self._verdicts: dict[int, Future[None]] = {}
        self._busy_since = 0.0
        """When the first of the requests that are open now came, or the engine was last heard of, if that is later."""
        self._stats: EngineStats | None = None
        self._fresh: EngineStats | None = None
        """Those of a process that has done nothing yet."""
        self._past: EngineStats | None = None
        """The totals of the processes that are gone."""
        self._thread = threading.Thread(target=self._supervise, name="onebox-engine-supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called from any thread.

    def wait_ready(self) -> None:
        """Returns when the first process takes requests, or raises why there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._health.status is not HealthStatus.STARTING)
            if self._not_opened:
                raise self._not_opened

    @property
    def planned(self) -> Planned:
        """What was decided before loading; known from `wait_ready` on."""
        with self._changed:
            if self._planned is None:
                raise EngineStoppedError(self._health.message)
            return self._planned

    @property
    def config(self) -> EngineConfig:
        return self.planned.config

    @property
    def pid(self) -> int | None:
        """Of the engine's process, where there is one."""
        with self._changed:
            return self._child.pid if self._child else None

    def submit(self, request: Request) -> RequestHandle:
        """Accepts the request or refuses it with an error that says why; nothing is computed before it returns."""
        return self.submit_all([request])[0]

    def submit_copies(self, request: Request, count: int) -> tuple[RequestHandle, ...]:
        """Accepts `count` answers to one prompt, all or none. Copy i has the id `<id>/<i>` and the seed plus i."""
        return self.submit_all(copies_of(request, count))

    def submit_all(self, requests: list[Request]) -> tuple[RequestHandle, ...]:
        """Accepts all of these or none. A grammar is compiled before it returns, which may take a while."""
        planned, observer = self.planned, self.observer
        for request in requests:
            check_request(request, planned.config, planned.vocab_size)
        verdict: Future[None] = Future()
        with self._changed:
            child = self._serving()
            check_places([request.request_id for request in requests], self._open, planned.config)
            handles = tuple(RequestHandle(r.request_id, observer(r) if observer else None) for r in requests)
            if not self._open:
                self._busy_since = time.monotonic()
            self._open.update((handle.request_id, handle) for handle in handles)
            number = next(self._numbers)
            if any(request.sampling.grammar for request in requests):
                self._verdicts[number] = verdict
            else:
                verdict.set_result(None)
            child.say(Submit(number, tuple(requests)))
        verdict.result()
        return handles

    def abort(self, request_id: str) -> None:
        """Ends the request at the next step; its last event is Finished with the reason abort. Others: no effect."""
        with self._changed:
            if request_id in self._open and self._child:
                self._child.say(Abort(request_id))

    def stats(self) -> EngineStats:
        """As of the last step, but for the requests that came in since. Totals are of all processes together."""
        with self._changed:
            if self._stats is None:
                raise EngineStoppedError(self._health.message)
            num_waiting = max(0, len(self._open) - self._stats.num_running)
            is_alive = self._health.status is HealthStatus.OK
            return replace(add_past(self._stats, self._past), is_alive=is_alive, num_waiting=num_waiting)

    def health(self) -> Health:
        with self._changed:
            return self._health

    def close(self) -> None:
        """Fails what is open, ends the process and waits for it. Closing twice is fine."""
        with self._changed:
            self._say_health(HealthStatus.STOPPED, "The engine has stopped and accepts nothing more.")
            if self._child:
                self._child.kill()
        self._thread.join()

    def _serving(self) -> ChildProcess:
        if self._health.status is HealthStatus.OK and self._child:
            return self._child
        is_underway = self._health.status in (HealthStatus.STARTING, HealthStatus.RESTARTING)
        raise (EngineRestartingError if is_underway else EngineStoppedError)(self._health.message)

    def _say_health(self, status: HealthStatus, message: str, restarts: int = 0) -> None:
        """Called with `_changed` held."""
        self._health = Health(status, message, self._health.num_restarts + restarts)
        self._changed.notify_all()

    @property
    def _is_closed(self) -> bool:
        return self._health.status is HealthStatus.STOPPED

    # The supervising thread.

    def _supervise(self) -> None:
        try:
            self._keep_serving()
        except Exception as error:
            # For instance an `on_progress` that cannot write any more. Nobody is left waiting for it.
            _log.exception("the supervisor of the engine failed")
            self._give_up(f"The supervisor of the engine failed: {error}.")

    def _keep_serving(self) -> None:
        """One process after the other, until all is closed or given up."""
        quick_deaths = 0
        while True:
            reason, served_s = self._live()
            quick_deaths = quick_deaths + 1 if served_s < self._policy.quick_s else 0
            self._bury(reason, quick_deaths)
            with self._changed:
                if self._health.status is not HealthStatus.RESTARTING:
                    return
                if self._changed.wait_for(lambda: self._is_closed, self._policy.wait_s(quick_deaths)):
                    return

    def _live(self) -> tuple[str, float]:
        """One process from its start to its end: why it ended, and for how many seconds it took requests."""
        with self._changed:
            if self._is_closed:
                return "it was closed", 0.0
            try:
                child = self._child = ChildProcess(Open(self._opening, self._planned))
            except OSError as error:
                return f"its process could not be started: {error}", 0.0
        ready_at: float | None = None
        reason: str | None = None
        while reason is None:
            try:
                message = child.hear(_LOOK_S)
            except (EOFError, OSError):
                break
            if isinstance(message, Ready):
                ready_at = time.monotonic()
            reason = self._take(message, is_ready=ready_at is not None)
        served_s = 0.0 if ready_at is None else time.monotonic() - ready_at
        if reason:
            child.kill()
        how = child.end()
        return reason or how, served_s

    def _take(self, message: object, *, is_ready: bool) -> str | None:
        """Takes one message in, or None where none came; a reason to end the process if there is one."""
        match message:
            case None:
                return self._hang() if is_ready else None
            case Step():
                self._hear(message)
            case Verdict():
                self._judge(message)
            case Ready():
                self._begin(message)
            case Phase():
                self._on_progress(message)
            case Planned():
                with self._changed:
                    self._planned = message
                self._on_progress(message)
            case NotOpened():
                with self._changed:
                    # Of later starts `health` tells.
                    if self._health.status is HealthStatus.STARTING:
                        self._not_opened = message.error
                return str(message.error).rstrip(".")
            case Died():
                return message.message.rstrip(".")
        return None

    def _begin(self, ready: Ready) -> None:
        with self._changed:
            self._stats = self._fresh = ready.stats
            if not self._is_closed:
                self._say_health(HealthStatus.OK, "The engine runs.")
            if self._health.num_restarts:
                _log.warning("the engine runs again")

    def _hang(self) -> str | None:
        with self._changed:
            silent_s = time.monotonic() - self._busy_since if self._open else 0.0
        if silent_s < self._policy.hang_s:
            return None
        return f"it has finished no step for {silent_s:.0f} s"

    def _hear(self, step: Step) -> None:
        posts = []
        with self._changed:
            self._stats, self._busy_since = step.stats, time.monotonic()
            for event in step.events:
                is_last = isinstance(event, Finished | Failed)
                handle = self._open.pop(event.request_id) if is_last else self._open[event.request_id]
                posts.append((handle, event))
        for handle, event in posts:
            handle.post(event, step.began)

    def _judge(self, verdict: Verdict) -> None:
        """Refused requests are forgotten; whoever does not wait for the verdict hears of it as a failure."""
        handles: list[RequestHandle] = []
        with self._changed:
            waiter = self._verdicts.pop(verdict.number, None)
            if verdict.error:
                handles = [self._open.pop(request_id) for request_id in verdict.request_ids]
        if waiter and verdict.error:
            waiter.set_exception(verdict.error)
        elif waiter:
            waiter.set_result(None)
        else:
            for handle in handles:
                handle.post(Failed(handle.request_id, str(verdict.error)), time.monotonic())

    def _bury(self, reason: str, quick_deaths: int) -> None:
        """Tells everyone what happened and says what comes next."""
        with self._changed:
            self._child = None
            if not self._is_closed:
                self._say_next(reason, quick_deaths)
            message = self._failure(reason)
        self._fail_open(message)

    def _give_up(self, message: str) -> None:
        with self._changed:
            child, self._child = self._child, None
            self._not_opened = OneboxError(message)
            self._say_health(HealthStatus.FAILED, message)
        if child:
            child.kill()
            child.end()
        self._fail_open(message)

    def _fail_open(self, message: str) -> None:
        with self._changed:
            handles, self._open = list(self._open.values()), {}
            waiters, self._verdicts = list(self._verdicts.values()), {}
            self._keep_totals(len(handles))
        for waiter in waiters:
            waiter.set_exception(EngineStoppedError(message))
        for handle in handles:
            handle.post(Failed(handle.request_id, message), time.monotonic())

    def _say_next(self, reason: str, quick_deaths: int) -> None:
        if self._health.status is HealthStatus.STARTING:
            self._not_opened = self._not_opened or OneboxError(f"The engine did not start: {reason}.")
            self._say_health(HealthStatus.FAILED, str(self._not_opened))
            return
        _log.error("the engine died: %s", reason)
        if quick_deaths >= self._policy.max_quick_deaths:
            message = f"The engine died {quick_deaths} times in a row soon after its start, the last time because"
            self._say_health(HealthStatus.FAILED, f"{message} {reason}; onebox gave up on it and must be restarted.")
        else:
            died = f"The engine died ({reason}) and is restarting; try again in a moment."
            self._say_health(HealthStatus.RESTARTING, died, restarts=1)

    def _failure(self, reason: str) -> str:
        if self._is_closed:
            return "The engine was closed before this request was done."
        return f"The engine died before this request was done: {reason}."

    def _keep_totals(self, num_failed: int) -> None:
        """What the process did is added to what those before it did; of its state nothing is left."""
        if self._stats is None:
            return
        totals = replace(self._stats.totals, num_failed=self._stats.totals.num_failed + num_failed)
        self._past = add_past(replace(self._stats, totals=totals), self._past)
        self._stats = self._fresh
