"""Freed memory goes back to the system."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from onebox.spec import heap

linux = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")

# Prints how many heaps the C library has after threads took memory at the same time.
_COUNT_HEAPS = """
import ctypes, os, sys, tempfile, threading
from onebox.spec.heap import bound_heap
if sys.argv[1] == "bound":
    bound_heap(maps_large_blocks=True)
library = ctypes.CDLL(None)
library.malloc.restype = library.fopen.restype = ctypes.c_void_p
gate = threading.Barrier(6)
def take():
    gate.wait()
    library.malloc(100_000)
    gate.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with tempfile.NamedTemporaryFile() as target:
    stream = ctypes.c_void_p(library.fopen(target.name.encode(), b"w"))
    library.malloc_info(0, stream)
    library.fclose(stream)
    print(target.read().count(b"<heap "))
"""


@pytest.fixture(autouse=True)
def _unfrozen():
    yield
    gc.unfreeze()


@linux
@pytest.mark.parametrize(("how", "is_one"), [("bound", True), ("free", False)])
def test_all_threads_share_one_heap_once_it_is_bound(how, is_one):
    command = [sys.executable, "-c", _COUNT_HEAPS, how]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (int(printed) == 1) is is_one


def test_the_heap_is_trimmed_now_and_then(monkeypatch):
    calls, was_repeated = [], threading.Event()

    class Library:
        @staticmethod
        def malloc_trim(_):
            calls.append(threading.current_thread())
            if len(calls) > 2:
                was_repeated.set()

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Library)
    monkeypatch.setattr(heap, "INTERVAL_S", 0.01)
    heap.start_trimming()
    # The thread ends with the process; it must not spin until then.
    assert was_repeated.wait(20)
    monkeypatch.setattr(heap, "INTERVAL_S", 3600.0)
    # At once, before anybody waits, and then on a thread of its own.
    assert calls[0] is threading.current_thread()
    assert calls[1] is not calls[0]


class _Node:
    pass


def test_garbage_is_collected_though_nothing_new_is_made(monkeypatch):
    """Also where the C library cannot trim."""
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: object())
    monkeypatch.setattr(heap, "INTERVAL_S", 0.01)
    gc.disable()
    try:
        heap.start_trimming()
        node = _Node()
        node.itself = node
        found = weakref.ref(node)
        del node
        until = time.monotonic() + 20
        while found() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert found() is None
    finally:
        gc.enable()
        monkeypatch.setattr(heap, "INTERVAL_S", 3600.0)


def test_collections_are_paused_until_the_last_block_is_left():
    with heap.collections_paused():
        with heap.collections_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
