"""The engine's process: `python -m onebox.engine.remote.child SOCKET PARENT LOG_FORMAT LOG_LEVEL DEVICE`.

Started by `spawn` only. With a DEVICE it imports what an engine there needs before it is told which engine to start.

Three threads. The main one starts the engine and then waits for its end; one receives messages; the engine's own sends
the events of each step. It never outlives its parent: the kernel kills it with the parent, and a closed socket ends it.
"""

import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from onebox.engine.client import Deliveries, HealthStatus
from onebox.engine.engine import Engine
from onebox.engine.prefix import PrefixLookup
from onebox.engine.remote.lifetime import end_with_parent
from onebox.engine.remote.messages import (
    Abort,
    CheckGrammar,
    CloseEngine,
    EngineDied,
    Lookup,
    LookupReply,
    Ready,
    StartEngine,
    StartFailed,
    StepEvents,
    Submit,
    SubmitReply,
)
from onebox.engine.request import Event, Failed
from onebox.engine.stats import EngineStats
from onebox.engine.warm.early import import_engine
from onebox.spec.errors import OneboxError
from onebox.spec.heap import bound_heap, start_trimming
from onebox.spec.log import LogStyle
from onebox.spec.output import end_process, flush_output, log_in_background

__all__ = ["ParentConnection", "main"]

_log = logging.getLogger(__name__)


class ParentConnection:
    """The socket to the parent; any thread may send."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.engine: Engine | None = None
        """Set once there is one."""
        self._connection = connection
        self._lock = threading.Lock()

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            _exit()
        except BaseException:
            # Nobody knows whose message it was; the parent starts another process and fails what is open.
            _log.exception("a message to the engine could not be read")
            _exit()

    def send(self, message: object) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            _exit()

    def deliver(self, deliveries: Deliveries, stats: EngineStats, started_at: float) -> list[Failed]:
        """Called by the engine's thread once a step; returns failures of requests whose events cannot be pickled."""
        events = tuple(event for _, event in deliveries)
        health = self.engine.health() if self.engine else None
        died = health.message if health and health.status is not HealthStatus.OK else None
        try:
            self.send(StepEvents(events, stats, started_at, died))
        except Exception:
            # Pickling comes before anything is sent.
            failed = {event.request_id: _unsent(event) for event in events if not _can_send(event)}
            rest = tuple(event for event in events if event.request_id not in failed)
            self.send(StepEvents(rest, stats, started_at, died))
            return list(failed.values())
        return []


def _can_send(event: Event) -> bool:
    try:
        pickle.dumps(event)
    except Exception:
        _log.exception("an event of request %s cannot be sent", event.request_id)
        return False
    return True


def _unsent(event: Event) -> Failed:
    return Failed(event.request_id, "What the engine computed for this request could not be sent to the server.")


def main(socket: int, parent_id: int, style: LogStyle | None = None, device: str = "") -> None:
    bound_heap(maps_large_blocks=False)
    end_with_parent()
    if os.getppid() != parent_id:
        _exit()
    # The parent decides when the engine ends: a terminal's Ctrl-C and a service manager's SIGTERM reach this process
    # too, while the parent lets running requests finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_in_background(style)
    parent = ParentConnection(Connection(socket))
    # Starting creates objects that stay; collections would walk them again and again.
    gc.disable()
    if device:
        # What is wrong with torch is reported by the starter, which imports it too.
        with contextlib.suppress(Exception):
            import_engine(device)
    engine = parent.engine = _start(parent)
    if engine:
        # What was loaded stays: a collection that walks all of it takes a tenth of a second in some step.
        gc.enable()
        start_trimming()
        parent.send(Ready(engine.stats()))
        engine.warm_up_grammars()
        threading.Thread(target=_receive_all, args=(engine, parent), daemon=True).start()
        message = engine.wait_stopped()
        # The parent ends this process when it is told, so the log says why before that.
        flush_output()
        parent.send(EngineDied(message))
    _exit()


def _start(parent: ParentConnection) -> Engine | None:
    try:
        message: StartEngine = parent.receive()
        planned = message.planned
        if planned is None:
            planned = message.starter.plan(parent.send)
            parent.send(planned)
        return message.starter.start(planned, parent.send, parent.deliver)
    except OneboxError as error:
        parent.send(StartFailed(error))
    except Exception as error:
        _log.exception("the engine could not be started")
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        parent.send(StartFailed(OneboxError(f"The engine could not be started ({reason}); the log above says where.")))
    return None


def _receive_all(engine: Engine, parent: ParentConnection) -> None:
    """Passes the parent's messages to the engine, until the parent is gone."""
    lookups = ThreadPoolExecutor(1, "onebox-lookup")
    while True:
        message = parent.receive()
        if isinstance(message, Abort):
            engine.abort(message.request_id)
        elif isinstance(message, CloseEngine):
            engine.close()
        elif isinstance(message, Lookup):
            # On a thread of its own: digests of images take a while.
            lookups.submit(_look_up, engine, parent, message)
        elif isinstance(message, CheckGrammar):
            _answer(parent, message.number, (), partial(engine.check_grammar, message.grammar))
        else:
            _submit(engine, parent, message)


def _look_up(engine: Engine, parent: ParentConnection, message: Lookup) -> None:
    try:
        found: PrefixLookup | OneboxError = engine.lookup(message.request)
    except OneboxError as error:
        found = error
    except Exception as error:
        _log.exception("a lookup failed")
        found = OneboxError(f"The engine could not look the prompt up: {error}.")
    parent.send(LookupReply(message.number, found))


def _submit(engine: Engine, parent: ParentConnection, message: Submit) -> None:
    request_ids = tuple(request.request_id for request in message.requests)
    submit = partial(engine.submit_later, list(message.requests))
    _answer(parent, message.number, request_ids, submit, only_errors=not message.has_grammar)


def _answer(
    parent: ParentConnection,
    number: int,
    request_ids: tuple[str, ...],
    begin: Callable[[], "Future[Any]"],
    *,
    only_errors: bool = False,
) -> None:
    """Replies when what is begun is done; what comes in meanwhile does not wait for it."""

    def reply(done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None and not isinstance(error, OneboxError):
            _log.error("a request could not be accepted", exc_info=error)
            error = OneboxError(f"The engine could not accept the request: {error}.")
        if error or not only_errors:
            parent.send(SubmitReply(number, request_ids, error))

    try:
        begun = begin()
    except BaseException as error:
        begun = Future()
        begun.set_exception(error)
    begun.add_done_callback(reply)


def _exit() -> NoReturn:
    """Ends the process at once: there is nothing to save, and tearing a CUDA context down can hang."""
    end_process(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), LogStyle(*sys.argv[3:5]), sys.argv[5])
