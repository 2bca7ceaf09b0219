"""Gives freed memory back to the system.

By default the C library has a heap for each thread, and raises its thresholds with the largest block that was ever
freed. So what clients send leaves free memory in many places: after five minutes of hostile bodies a server had 150 MB
of it, half of it resident, and `malloc_trim` does not reach the end of such a heap.

What is left then are pages held by something small. Two caches put such things all over the heap and fill up within an
hour: the C library's of each thread (`bound_thread_caches`), and the interpreter's of attribute lookups.
"""

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

__all__ = ["bound_heap", "bound_thread_caches", "collections_paused", "free_thread_caches", "start_trimming"]

INTERVAL_S = 10.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt."""
_MMAP_BYTES = 1 << 20
"""Larger blocks are the system's again as soon as they are freed."""
_TRIM_BYTES = 4 << 20
_TUNABLES = "GLIBC_TUNABLES"
_THREAD_CACHES = "glibc.malloc.tcache_max=128"
"""By default a thread keeps seven freed blocks of each of 64 sizes, up to 1 KiB, and `malloc_trim` leaves them alone:
30 threads 13,000 blocks. Now it keeps those of 8 sizes. (None at all would take 9 to 25% more time.)"""


def bound_thread_caches(environment: MutableMapping[str, str]) -> None:
    """Bounds what each thread keeps of its freed blocks, in a process that is started with this environment.

    The C library reads this when a process starts, and nowhere else. What the operator has set there comes later in the
    line, and so counts.
    """
    given = environment.get(_TUNABLES)
    environment[_TUNABLES] = f"{_THREAD_CACHES}:{given}" if given else _THREAD_CACHES


def free_thread_caches(environment: MutableMapping[str, str]) -> None:
    """Undoes that for the processes that are started next."""
    given = environment.pop(_TUNABLES, "").removeprefix(_THREAD_CACHES).removeprefix(":")
    if given:
        environment[_TUNABLES] = given


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
    """Starts a thread that collects garbage, forgets attribute lookups and trims the heap now and then.

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
        _forget_lookups()
        # Takes milliseconds, and other Python threads run meanwhile.
        trim(0)


def _forget_lookups() -> None:
    """Empties the interpreter's cache of attribute lookups, which the next lookups fill again.

    It keeps the names of 4,096 lookups, also those made for a single one, as `json.loads`, `pickle` and `match` do all
    the time. Where such a name lies in memory decides on its place in the cache, so they drive out all others in time.
    """
    forget = getattr(sys, "_clear_internal_caches", None) or getattr(sys, "_clear_type_cache", None)
    if forget:
        forget()


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
