"""The engine's process: `python -m onebox.engine.child SOCKET PARENT`, started by `onebox.engine.supervise` alone.

Three threads. The main one opens the engine and then waits for its end; one takes messages in; the engine's own sends
what each step gave. It never outlives its parent: the kernel is told to end it, and a closed socket does so too.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from onebox.engine.api import Engine, EngineStats, Event, RequestHandle
from onebox.engine.wire import Abort, Died, NotOpened, Open, Ready, Step, Submit, Verdict
from onebox.spec.errors import OneboxError

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


class Line:
    """The socket to the parent, for several threads to speak on."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def hear(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            _leave()

    def say(self, message: object) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            _leave()

    def deliver(self, posts: list[tuple[RequestHandle, Event]], stats: EngineStats, began: float) -> None:
        """Called by the engine's thread once a step."""
        self.say(Step(tuple(event for _, event in posts), stats, began))


def main(socket: int, parent_id: int) -> None:
    _end_with(parent_id)
    # The parent decides when the engine ends: a terminal's Ctrl-C and a service manager's SIGTERM reach this process
    # too, while the parent lets running requests finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    line = Line(Connection(socket))
    engine = _open(line)
    if engine:
        # What was loaded stays. Without this a collection looks through all of it, a tenth of a second in some step.
        gc.collect()
        gc.freeze()
        line.say(Ready(engine.stats()))
        threading.Thread(target=_take_in, args=(engine, line), daemon=True).start()
        line.say(Died(engine.wait_stopped()))
    _leave()


def _open(line: Line) -> Engine | None:
    try:
        message: Open = line.hear()
        planned = message.planned
        if planned is None:
            planned = message.opening.plan(line.say)
            line.say(planned)
        return message.opening.start(planned, line.say, line.deliver)
    except OneboxError as error:
        line.say(NotOpened(error))
    except Exception as error:
        _log.exception("the engine could not be opened")
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        line.say(NotOpened(OneboxError(f"The engine could not be opened ({reason}); the log above says where.")))
    return None


def _take_in(engine: Engine, line: Line) -> None:
    """Hands on what the parent says, until it is gone."""
    while True:
        message = line.hear()
        if isinstance(message, Abort):
            engine.abort(message.request_id)
        else:
            _submit(engine, line, message)


def _submit(engine: Engine, line: Line, message: Submit) -> None:
    request_ids = tuple(request.request_id for request in message.requests)
    try:
        engine.submit_all(list(message.requests))
    except OneboxError as error:
        line.say(Verdict(message.number, request_ids, error))
    except Exception as error:
        _log.exception("a request could not be taken in")
        line.say(Verdict(message.number, request_ids, OneboxError(f"The engine could not take the request: {error}.")))
    else:
        if any(request.sampling.grammar for request in message.requests):
            line.say(Verdict(message.number, request_ids, None))


def _end_with(parent_id: int) -> None:
    """Has the kernel end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:
        _leave()


def _leave() -> NoReturn:
    """Ends the process at once: there is nothing to save, and tearing a CUDA context down can hang."""
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
