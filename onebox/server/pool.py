"""Threads for work that a client shapes: few, with a bounded queue, apart from those that others wait for."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from onebox.server.errors import ServerBusyError

__all__ = ["WorkPool"]

P = ParamSpec("P")
T = TypeVar("T")


class WorkPool:
    """Runs calls on its threads, with at most `max_waiting` calls that no thread has taken yet.

    The threads are started when first needed and end with the process, whatever they are doing. Work that nobody awaits
    any more is not begun; it keeps its place until then, because it holds what the client sent.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._waiting: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue(max_waiting)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    async def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        future: Future[T] = Future()
        self._start()
        try:
            self._waiting.put_nowait((future, partial(function, *args, **options)))
        except queue.Full:
            raise ServerBusyError(f"Too many requests wait for {self._name}; try again in a moment.") from None
        return await asyncio.wrap_future(future)

    def _start(self) -> None:
        with self._lock:
            while len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name=self._name.replace(" ", "-"), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        while True:
            future, work = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            # Not held until the next work comes: it may be large.
            del future, work
