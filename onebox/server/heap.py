"""Gives freed memory back to the system.

The C library keeps what large bodies took in the heap of the thread that read them, and threads are many: after some
dozens of bodies of 10 MB a server held 200 MB for nothing.
"""

import ctypes
import threading
from collections.abc import Callable

__all__ = ["start_trimming"]

INTERVAL_S = 10.0


def start_trimming() -> None:
    """Starts a thread that does it now and then; where the C library cannot, nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        threading.Thread(target=_trim_forever, args=(trim,), name="onebox-heap", daemon=True).start()


def _trim_forever(trim: Callable[[int], int]) -> None:
    pause = threading.Event()
    while not pause.wait(INTERVAL_S):
        # Takes milliseconds, and other Python threads run meanwhile.
        trim(0)
