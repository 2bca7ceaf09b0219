"""Gives freed memory back to the system.

By default the C library has a heap for each thread, and raises its thresholds with the largest block that was ever
freed. So what clients send leaves free memory in many places: after five minutes of hostile bodies a server had 150 MB
of it, half of it resident, and `malloc_trim` does not reach the end of such a heap.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bound_heap", "collections_paused", "start_trimming"]

INTERVAL_S = 10.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt."""
_MMAP_BYTES = 1 << 20
"""Larger blocks are the system's again as soon as they are freed."""
_TRIM_BYTES = 4 << 20


def bound_heap(*, maps_large_blocks: bool) -> None:
    """One heap for all threads; called before there are threads. Nothing happens where the C library is not glibc.

    `maps_large_blocks` is for a process whose large blocks come and go with its clients. One that computes with them
    should not have the system clear their pages each time.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    set_option(_M_ARENA_MAX, 1)
    if maps_large_blocks:
        set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        set_option(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def start_trimming() -> None:
    """Starts a thread that collects garbage and trims the heap now and then.

    What exists by now stays: later collections do not walk it. Those of the interpreter come with new objects, so
    an idle process would keep for hours what its last clients left.
    """
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", _leave)
    # Now, while nobody waits: what loading has freed may be much.
    trim(0)
    threading.Thread(target=_trim_forever, args=(trim,), name="onebox-heap", daemon=True).start()


def _leave(_: int) -> int:
    """In place of malloc_trim where there is none."""
    return 0


def _trim_forever(trim: Callable[[int], int]) -> None:
    pause = threading.Event()
    while not pause.wait(INTERVAL_S):
        if not _pauses.count:
            gc.collect()
        # Takes milliseconds, and other Python threads run meanwhile.
        trim(0)


class _Pauses:
    """How many blocks run without collections."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.count += number
            if self.count:
                gc.disable()
            else:
                gc.enable()


_pauses = _Pauses()


@contextmanager
def collections_paused() -> Iterator[None]:
    """A block that makes many objects and no garbage: collections would walk them again and again, alone."""
    _pauses.add(1)
    try:
        yield
    finally:
        _pauses.add(-1)
