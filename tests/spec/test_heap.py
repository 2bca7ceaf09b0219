"""Freed memory goes back to the system."""

import gc
import os
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

# Prints how many bytes are in use, by the C library's count, because 20 threads once freed blocks of up to 1,000 bytes.
_COUNT_KEPT = """
import ctypes, threading
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
class Usage(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
library.mallinfo2.restype = Usage
gate = threading.Barrier(21)
def free_blocks():
    for size in range(200, 1000, 16):
        for block in [library.malloc(size) for _ in range(7)]:
            library.free(block)
    gate.wait()
    gate.wait()
threads = [threading.Thread(target=free_blocks) for _ in range(20)]
before = library.mallinfo2().uordblks
for thread in threads: thread.start()
gate.wait()
print(library.mallinfo2().uordblks - before)
gate.wait()
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


@linux
@pytest.mark.parametrize(("how", "is_much"), [("bound", False), ("free", True), ("bound by the operator", True)])
def test_threads_keep_few_freed_blocks_once_their_caches_are_bound(how, is_much):
    """What they keep is nowhere near the end of the heap, so each block holds a page that cannot be given back."""
    if not hasattr(heap.ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("an older glibc does not count as much")
    environment = dict(os.environ)
    environment.pop("GLIBC_TUNABLES", None)
    # Objects are blocks of the C library's too, as in a server.
    environment |= {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1"}
    if how == "bound by the operator":
        environment["GLIBC_TUNABLES"] = "glibc.malloc.tcache_max=1000"
    if how != "free":
        heap.bound_thread_caches(environment)
    command = [sys.executable, "-c", _COUNT_KEPT]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    # 20 threads, 50 sizes of 600 bytes on average, 7 blocks each: 4.2 MB.
    assert (int(printed) > 3_000_000) is is_much
    assert is_much or int(printed) < 1_000_000


@pytest.mark.parametrize("given", [None, "glibc.malloc.check=0", "glibc.malloc.tcache_max=64"])
def test_bounds_of_thread_caches_leave_an_operators_settings_as_they_were(given):
    environment = {"GLIBC_TUNABLES": given} if given else {}
    before = dict(environment)
    heap.bound_thread_caches(environment)
    bound = environment["GLIBC_TUNABLES"].split(":")
    # The last one counts.
    assert bound[0] == "glibc.malloc.tcache_max=128"
    assert bound[1:] == ([given] if given else [])
    heap.free_thread_caches(environment)
    assert environment == before


def test_names_of_single_lookups_are_not_kept(monkeypatch):
    """The interpreter's cache of lookups would keep 4,096 of them, each in a page of its own."""
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: object())
    monkeypatch.setattr(heap, "INTERVAL_S", 0.01)
    name = "".join(["made_for_", "one_lookup"])
    num_before = sys.getrefcount(name)
    getattr(_Node(), name, None)
    if sys.getrefcount(name) == num_before:
        pytest.skip("this interpreter's cache does not hold names")
    heap.start_trimming()
    until = time.monotonic() + 20
    try:
        while sys.getrefcount(name) > num_before and time.monotonic() < until:
            time.sleep(0.01)
        assert sys.getrefcount(name) == num_before
    finally:
        monkeypatch.setattr(heap, "INTERVAL_S", 3600.0)


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
