"""Threads for text work: templates, tokenising, detokenising.

They are the server's own, so that nothing else waits for them, and small work has its own, so that it does not wait for
large. Tokenising lets other threads run; a template does so every few milliseconds.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from onebox.engine.api import QueueFullError

__all__ = ["TextLanes", "is_small"]

_Result = TypeVar("_Result")

_SMALL_SIZE = 1 << 16
"""Characters, or values in lists and objects: some tens of milliseconds of work."""
_NUM_THREADS = 2
_MAX_WAITING = {"small": 1024, "large": 16}
"""Large work holds large bodies in memory while it waits."""


class TextLanes:
    """Two lanes of threads, started when first needed. They end with the process, whatever they are doing."""

    def __init__(self) -> None:
        self._lanes = {name: _Lane(name, limit) for name, limit in _MAX_WAITING.items()}

    async def run(self, work: Callable[[], _Result], *, is_small: bool) -> _Result:
        """The result of `work` on a thread. Work that nobody awaits any more is not begun."""
        lane = self._lanes["small" if is_small else "large"]
        return await asyncio.wrap_future(lane.submit(work))


def is_small(value: Any) -> bool:
    """Whether work on a client's value belongs into the lane of small work. Looks at no more of it than needed."""
    size, waiting = 0, [value]
    while waiting and size <= _SMALL_SIZE:
        held = waiting.pop()
        if isinstance(held, str):
            size += len(held)
        elif isinstance(held, Mapping):
            size += len(held)
            waiting += (*held, *held.values()) if size <= _SMALL_SIZE else ()
        elif isinstance(held, list | tuple):
            size += len(held)
            waiting += held if size <= _SMALL_SIZE else ()
        else:
            size += 1
    return size <= _SMALL_SIZE


class _Lane:
    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._waiting: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue(max_waiting)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._start()
        try:
            self._waiting.put_nowait((future, work))
        except queue.Full:
            raise QueueFullError(
                f"{self._waiting.maxsize} {self._name} prompts already wait to be tokenised; try again in a moment."
            ) from None
        return future

    def _start(self) -> None:
        with self._lock:
            while len(self._threads) < _NUM_THREADS:
                thread = threading.Thread(target=self._work, name=f"text-{self._name}", daemon=True)
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
