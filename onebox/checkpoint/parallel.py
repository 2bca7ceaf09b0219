"""Runs work that waits for a network in several threads, so that Ctrl-C ends it at once."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["NUM_CONNECTIONS", "run_parallel"]

NUM_CONNECTIONS = 8
_JOIN_S = 5.0
Item = TypeVar("Item")


def run_parallel(work: Callable[[Item], None], items: Iterator[Item], stop: threading.Event) -> None:
    """Calls `work` with every item, a few at once; the first error sets `stop` and is raised.

    Threads that wait for a server cannot be interrupted. They are daemons, so the process need not wait for them.
    """
    lock = threading.Lock()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def loop() -> None:
        try:
            while not stop.is_set():
                with lock:
                    item = next(items, None)
                if item is None:
                    break
                work(item)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(NUM_CONNECTIONS)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            error = ended.get()
            if error is not None:
                raise error
    except Exception:
        stop.set()
        for thread in threads:
            thread.join(_JOIN_S)
        raise
    except BaseException:
        stop.set()
        raise
