"""An engine in a process of its own, as callers use it: started, supervised and restarted.

When the engine dies, nothing else does: open requests get Failed with the reason, another process is started, and until
it is ready requests are refused as restarting. One thread here starts the processes one after the other and receives
from them; callers only touch what `_changed` guards. Nothing in this module imports torch.
"""

import itertools
import logging
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from onebox.engine.client import (
    EngineClient,
    EngineRestartingError,
    Health,
    HealthStatus,
    OpenRequests,
    RequestHandle,
    check_request,
)
from onebox.engine.config import EngineConfig
from onebox.engine.grammar.value import Grammar
from onebox.engine.prefix import PrefixLookup
from onebox.engine.remote.messages import (
    Abort,
    CheckGrammar,
    CloseEngine,
    DeviceMemory,
    DraftVocabOpened,
    EngineDied,
    EngineStarter,
    Lookup,
    LookupReply,
    Planned,
    PrefixDiskOpened,
    Progress,
    Ready,
    StartDetail,
    StartEngine,
    StartFailed,
    StartPhase,
    StepEvents,
    Submit,
    SubmitReply,
)
from onebox.engine.remote.spawn import EarlyProcess
from onebox.engine.remote.supervise import ChildProcess, Deaths, RestartPolicy
from onebox.engine.request import EngineStoppedError, Failed, QueueFullError, Request
from onebox.engine.stats import EngineStats, add_past
from onebox.spec.errors import OneboxError, UsageError

__all__ = ["EngineProcess"]

_POLL_S = 0.5
"""How often a process that sends nothing is checked for a hang."""
_FLUSHED_S = 3.0
"""What a process that writes to disk when it is closed may take beyond the limit for prefixes: a step, and one file."""
_LOOKUP_S = 10.0
"""How long a lookup waits for its reply. No step is waited for, so it takes milliseconds."""
_CLOSE_S = 30.0
"""How long `close` waits for a process that cannot be killed, such as one inside a wedged driver."""

_log = logging.getLogger(__name__)


def _ignore(_: Progress) -> None:
    pass


class EngineProcess(EngineClient):
    """Every accepted request ends with one Finished or Failed event, whatever happens to the process."""

    def __init__(
        self,
        starter: EngineStarter,
        on_progress: Callable[[Progress], None] = _ignore,
        policy: RestartPolicy | None = None,
        idle_release_s: float | None = None,
        early: EarlyProcess | None = None,
    ) -> None:
        """Starts a process, or takes the early one, and returns at once; `wait_ready` waits for it.

        After `idle_release_s` seconds without a request the process is ended, which frees the device's memory; `awake`
        starts the next one, with the same plan.

        `on_progress` is called after each phase of starting, at the first start and at all later ones, on a thread of
        this object. What it raises is logged and changes nothing.
        """
        self._starter = starter
        self._on_progress = on_progress
        self._policy = policy or RestartPolicy()
        self._idle_release_s = idle_release_s
        self._early = early
        self._numbers = itertools.count()
        # Guards all below.
        self._changed = threading.Condition()
        self._health = Health(HealthStatus.STARTING, "The engine is starting.")
        self._start_error: OneboxError | None = None
        self._planned: Planned | None = None
        self._child: ChildProcess | None = None
        self._open = OpenRequests()
        self._awaited: dict[int, Future[Any]] = {}
        """Replies, by the number of the message that waits for one."""
        self._busy_since = 0.0
        """When the first of the requests open now came, or the last step was received, whichever is later."""
        self._ready_at: float | None = None
        """When the process that runs now began to accept requests; None while it starts. The supervisor's alone."""
        self._stats: EngineStats | None = None
        self._initial_stats: EngineStats | None = None
        """Those of a process that has done nothing yet."""
        self._past: EngineStats | None = None
        """The totals of the processes that ended."""
        self._flush_until = 0.0
        """Until when the process that is being closed may write prefixes to disk."""
        self._is_releasing = False
        """The process is being ended because nobody asks it."""
        self._is_wanted = False
        """Somebody waits for the next one."""
        self._sleepers: list[Future[None]] = []
        """Those of `awake`."""
        self._num_failed_here = 0
        """Requests that failed without a process counting them."""
        self._thread = threading.Thread(target=self._supervise, name="onebox-engine-supervisor", daemon=True)
        self._thread.start()

    # Called from any thread.

    def wait_ready(self) -> None:
        """Returns when the first process accepts requests, or raises why it does not."""
        with self._changed:
            # In short waits: Ctrl-C that arrives just before a wait is noticed only after it.
            while not self._changed.wait_for(lambda: self._health.status is not HealthStatus.STARTING, _POLL_S):
                pass
            if self._start_error:
                raise self._start_error

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
    def vocab_size(self) -> int:
        return self.planned.vocab_size

    @property
    def pid(self) -> int | None:
        """Of the engine's process, where there is one."""
        with self._changed:
            return self._child.pid if self._child else None

    def submit_all(self, requests: list[Request]) -> tuple[RequestHandle, ...]:
        """Accepts all of these or none. A grammar is compiled before it returns, which may take a while."""
        planned = self.planned
        for request in requests:
            check_request(request, planned.config, planned.vocab_size)
        submit = Submit(next(self._numbers), tuple(requests))
        pickled = _pickled(submit)
        reply: Future[None] = Future()
        with self._changed:
            child = self._running_child()
            child.check_room(len(pickled))
            was_idle = not len(self._open)
            handles = self._open.accept(requests, planned.config, self.observer)
            if was_idle:
                self._busy_since = time.monotonic()
            if submit.has_grammar:
                self._awaited[submit.number] = reply
            else:
                reply.set_result(None)
            child.send(pickled)
        reply.result()
        return handles

    def check_grammar(self, grammar: Grammar) -> "Future[None]":
        return self._ask(CheckGrammar(next(self._numbers), grammar))

    def lookup(self, request: Request) -> PrefixLookup:
        planned = self.planned
        check_request(request, planned.config, planned.vocab_size)
        message = Lookup(next(self._numbers), request)
        reply: Future[PrefixLookup] = self._ask(message)
        try:
            return reply.result(_LOOKUP_S)
        except TimeoutError:
            raise QueueFullError(
                f"The engine did not say within {_LOOKUP_S:g} s what it has cached; try again in a moment."
            ) from None
        finally:
            with self._changed:
                self._awaited.pop(message.number, None)

    def _ask(self, message: CheckGrammar | Lookup) -> "Future[Any]":
        """Sends a question; the future gets its reply, or why there is none."""
        pickled = _pickled(message)
        reply: Future[Any] = Future()
        # Whoever waits may give up; the reply comes all the same.
        reply.set_running_or_notify_cancel()
        with self._changed:
            child = self._running_child()
            child.check_room(len(pickled))
            self._awaited[message.number] = reply
            child.send(pickled)
        return reply

    def awake(self) -> "Future[None]":
        done: Future[None] = Future()
        with self._changed:
            self._busy_since = time.monotonic()
            if self._health.status in (HealthStatus.IDLE, HealthStatus.WAKING):
                self._is_wanted = True
                self._sleepers.append(done)
                self._changed.notify_all()
                return done
        done.set_result(None)
        return done

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._open and self._child:
                self._child.send(pickle.dumps(Abort(request_id)))

    def stats(self) -> EngineStats:
        """As of the last step, with the requests submitted since. Totals are of all processes together."""
        with self._changed:
            if self._stats is None:
                raise EngineStoppedError(self._health.message)
            num_waiting = max(0, len(self._open) - self._stats.num_running)
            is_alive = self._health.status.takes_requests
            stats = add_past(self._stats, self._past)
            totals = replace(stats.totals, num_failed=stats.totals.num_failed + self._num_failed_here)
            return replace(stats, is_alive=is_alive, num_waiting=num_waiting, totals=totals)

    def health(self) -> Health:
        with self._changed:
            return self._health

    @property
    def close_s(self) -> float:
        """What `close` may take while the engine writes its prefixes, or the counts of its tokens, to disk."""
        if self._planned is None:
            return 0.0
        disk, size = self._planned.config.prefix_disk, self._planned.config.speculation.draft_vocab_size
        return (disk.flush_s if disk else 0.0) + (_FLUSHED_S if disk or size else 0.0)

    def close(self) -> None:
        with self._changed:
            if self._health.status is HealthStatus.OK and self._child and self.close_s:
                self._flush_until = time.monotonic() + self.close_s
                self._child.send(pickle.dumps(CloseEngine()))
            self._set_health(HealthStatus.STOPPED, "The engine has stopped and accepts nothing more.")
            flush_s = self._flush_until - time.monotonic()
        if flush_s > 0:
            self._thread.join(flush_s)
        with self._changed:
            if self._child:
                self._child.kill()
        self._thread.join(_CLOSE_S)
        self._fail_open(self._failure("it was closed"))

    def wait_failed(self) -> str | None:
        """Returns why restarting was given up, once it was; None when this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._health.status in (HealthStatus.FAILED, HealthStatus.STOPPED))
            return None if self._is_closed else self._health.message

    def _running_child(self) -> ChildProcess:
        if self._health.status is HealthStatus.OK and self._child:
            return self._child
        is_over = self._health.status in (HealthStatus.FAILED, HealthStatus.STOPPED)
        raise (EngineStoppedError if is_over else EngineRestartingError)(self._health.message)

    def _set_health(self, status: HealthStatus, message: str, restarts: int = 0) -> None:
        """Called with `_changed` held."""
        self._health = Health(status, message, self._health.num_restarts + restarts)
        self._changed.notify_all()
        if status not in (HealthStatus.IDLE, HealthStatus.WAKING):
            self._wake_sleepers()

    def _wake_sleepers(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        # Who has given up has cancelled its own.
        for sleeper in (found for found in sleepers if found.set_running_or_notify_cancel()):
            try:
                self._running_child()
            except EngineStoppedError as error:
                sleeper.set_exception(error)
            else:
                sleeper.set_result(None)

    @property
    def _is_closed(self) -> bool:
        return self._health.status is HealthStatus.STOPPED

    # The supervising thread: one process after the other.

    def _supervise(self) -> None:
        try:
            self._run_children()
        except Exception as error:
            # No caller is left waiting.
            _log.exception("the supervisor of the engine failed")
            self._give_up(f"The supervisor of the engine failed: {error}.")

    def _run_children(self) -> None:
        """Runs one process after the other, until this is closed or restarting is given up."""
        deaths = Deaths(self._policy)
        while True:
            try:
                spawned = self._early.take() if self._early else None
                child = ChildProcess(StartEngine(self._starter, self._planned), self._policy.hang_s, spawned)
            except (OSError, MemoryError) as error:
                deaths.add_unstarted()
                self._handle_exit(f"its process could not be started: {error}", deaths.verdict, has_run=False)
            else:
                reason, served_s = self._run_child(child)
                if self._is_releasing:
                    if not self._sleep():
                        return
                    continue
                deaths.add(served_s)
                self._handle_exit(reason, deaths.verdict)
            with self._changed:
                if self._health.status is not HealthStatus.RESTARTING:
                    return
                if self._changed.wait_for(lambda: self._is_closed, deaths.wait_s):
                    return

    def _sleep(self) -> bool:
        """Waits until the engine is wanted again; False: this was closed."""
        with self._changed:
            self._child, self._is_releasing = None, False
            self._add_totals()
            self._changed.wait_for(lambda: self._is_wanted or self._is_closed)
            self._is_wanted = False
            if self._is_closed:
                return False
            self._set_health(HealthStatus.WAKING, "The engine is being started again for a request.")
            return True

    def _release_if_idle(self, child: ChildProcess) -> None:
        """Begins to end a process that has had nothing to do for long enough; prefixes are written to disk first."""
        with self._changed:
            used_at = max(self._busy_since, self._ready_at or 0.0)
            is_free = not (len(self._open) or self._awaited or self._is_releasing)
            if self._idle_release_s is None or self._health.status is not HealthStatus.OK or not is_free:
                return
            if time.monotonic() - used_at < self._idle_release_s:
                return
            self._is_releasing = True
            self._flush_until = time.monotonic() + self.close_s + _FLUSHED_S
            self._set_health(HealthStatus.IDLE, "The engine's memory is released; the next request starts it again.")
            child.send(pickle.dumps(CloseEngine()))
        _log.info("nobody asked for %g s: the engine is ended, the next request starts it again", self._idle_release_s)

    def _run_child(self, child: ChildProcess) -> tuple[str, float]:
        """Runs a process to its end: (why it ended, for how many seconds it accepted requests)."""
        with self._changed:
            self._child = child
            if self._is_closed:
                child.kill()
        self._ready_at = None
        try:
            reason = self._receive_all(child)
        except Exception as error:
            # For instance a message that cannot be read for lack of memory. No caller is left waiting.
            _log.exception("a message of the engine could not be handled")
            reason = f"its message could not be handled: {error}"
        served_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        if reason:
            child.kill()
        exit_status = child.end()
        return reason or exit_status, served_s

    def _receive_all(self, child: ChildProcess) -> str | None:
        """Handles messages until the process has ended by itself, or until there is a reason to end it."""
        while True:
            try:
                message = child.receive(_POLL_S)
            except TimeoutError as error:
                return str(error)
            except (EOFError, OSError):
                return None
            if message is None and child.has_ended:
                return None
            if message is None:
                self._release_if_idle(child)
            if self._is_releasing and time.monotonic() > self._flush_until:
                return "it did not end in time"
            reason = self._handle(message)
            if reason is not None:
                return reason

    def _handle(self, message: object) -> str | None:
        """Handles one message, or None where none came; returns a reason to end the process, if there is one."""
        match message:
            case None:
                return self._hang()
            case StepEvents():
                self._deliver(message)
            case SubmitReply():
                self._handle_reply(message)
            case LookupReply():
                self._handle_lookup(message)
            case Ready():
                self._handle_ready(message)
            case StartPhase() | StartDetail() | DeviceMemory() | PrefixDiskOpened() | DraftVocabOpened():
                self._report(message)
            case Planned():
                with self._changed:
                    self._planned = message
                self._report(message)
            case StartFailed():
                with self._changed:
                    # `health` reports the errors of later starts.
                    if self._health.status is HealthStatus.STARTING:
                        self._start_error = message.error
                return str(message.error).rstrip(".")
            case EngineDied():
                return message.message.rstrip(".")
        return None

    def _report(self, progress: Progress) -> None:
        try:
            self._on_progress(progress)
        except Exception as error:
            # For instance because it prints and nobody reads any more.
            _log.warning("progress could not be reported: %s", error)

    def _handle_ready(self, ready: Ready) -> None:
        self._ready_at = time.monotonic()
        with self._changed:
            self._stats = self._initial_stats = ready.stats
            if not self._is_closed:
                self._set_health(HealthStatus.OK, "The engine runs.")
            if self._health.num_restarts:
                _log.warning("the engine runs again")

    def _hang(self) -> str | None:
        if self._ready_at is None:
            return None  # loading has no limit
        with self._changed:
            silent_s = time.monotonic() - self._busy_since if len(self._open) else 0.0
        if silent_s < self._policy.hang_s:
            return None
        return f"it has finished no step for {silent_s:.0f} s"

    def _deliver(self, step: StepEvents) -> None:
        with self._changed:
            if step.died and not self._is_closed and not self._is_releasing:
                # Before its clients are told.
                died = step.died.rstrip(".")
                self._set_health(HealthStatus.RESTARTING, f"{died}. It is restarting; try again in a moment.")
            self._stats, self._busy_since = step.stats, time.monotonic()
            deliveries = self._open.route(step.events)
        for handle, event in deliveries:
            handle.deliver(event, step.started_at)

    def _handle_reply(self, reply: SubmitReply) -> None:
        """Removes refused requests; where no caller waits for the reply, the refusal is delivered as a failure."""
        handles: list[RequestHandle] = []
        with self._changed:
            waiting = self._awaited.pop(reply.number, None)
            if reply.error:
                handles = self._open.remove(reply.request_ids)
                if not waiting:
                    self._num_failed_here += len(handles)
        if waiting and reply.error:
            waiting.set_exception(reply.error)
        elif waiting:
            waiting.set_result(None)
        else:
            _fail(handles, str(reply.error))

    def _handle_lookup(self, reply: LookupReply) -> None:
        with self._changed:
            waiting, found = self._awaited.pop(reply.number, None), reply.found
        if waiting and isinstance(found, OneboxError):
            waiting.set_exception(found)
        elif waiting and isinstance(found, PrefixLookup):
            waiting.set_result(found)

    # The end of a process.

    def _handle_exit(self, reason: str, verdict: str | None, *, has_run: bool = True) -> None:
        """Decides whether to restart, and fails what is open."""
        with self._changed:
            self._child = None
            if not self._is_closed:
                self._set_next_health(reason, verdict, has_run)
            message = self._failure(reason)
        self._fail_open(message)

    def _give_up(self, message: str) -> None:
        with self._changed:
            child, self._child = self._child, None
            self._start_error = OneboxError(message)
            self._set_health(HealthStatus.FAILED, message)
        if child:
            child.kill()
            child.end()
        self._fail_open(message)

    def _fail_open(self, message: str) -> None:
        with self._changed:
            handles = self._open.remove(self._open.ids())
            waiting, self._awaited = list(self._awaited.values()), {}
            self._num_failed_here += len(handles)
            self._add_totals()
        for reply in waiting:
            reply.set_exception(EngineStoppedError(message))
        _fail(handles, message)

    def _set_next_health(self, reason: str, verdict: str | None, has_run: bool) -> None:
        if self._health.status is HealthStatus.STARTING:
            self._start_error = self._start_error or OneboxError(f"The engine did not start: {reason}.")
            self._set_health(HealthStatus.FAILED, str(self._start_error))
            return
        _log.error("the engine died: %s", reason)
        if verdict:
            message = f"{verdict} {reason}; onebox gave up on it and must be restarted."
            self._set_health(HealthStatus.FAILED, message)
        else:
            died = f"The engine died ({reason}) and is restarting; try again in a moment."
            self._set_health(HealthStatus.RESTARTING, died, restarts=int(has_run))

    def _failure(self, reason: str) -> str:
        if self._is_closed:
            return "The engine was closed before this request was done."
        return f"The engine died before this request was done: {reason}."

    def _add_totals(self) -> None:
        """Adds the ended process's totals to those before it; nothing else of it remains."""
        if self._stats is not None:
            self._past = add_past(self._stats, self._past)
            self._stats = self._initial_stats


def _fail(handles: list[RequestHandle], message: str) -> None:
    for handle in handles:
        handle.deliver(Failed(handle.request_id, message), time.monotonic())


def _pickled(submit: Submit | CheckGrammar | Lookup) -> bytes:
    """Before anything is accepted, on the caller's thread: what cannot be pickled concerns the caller alone."""
    try:
        return pickle.dumps(submit)
    except Exception as error:
        raise UsageError(f"The request cannot be sent to the engine ({type(error).__name__}: {error}).") from None
