"""Threads for work that a client shapes: few, with a bounded queue, apart from those that others wait for."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from onebox.server.errors import ServerBusyError

__all__ = ["WorkPool"]

P = ParamSpec("P")
T = TypeVar("T")


class WorkPool:
    """Runs calls on its threads, at most `max_waiting` of them beyond the running ones."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._name = name
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name.replace(" ", "-"))
        self._places = threading.BoundedSemaphore(num_threads + max_waiting)

    async def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        if not self._places.acquire(blocking=False):
            raise ServerBusyError(f"Too many requests wait for {self._name}; try again in a moment.")
        future: Future[T] = self._threads.submit(function, *args, **options)
        # Not with the awaiting task: a running call cannot be cancelled, and keeps its place until it has ended.
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)
