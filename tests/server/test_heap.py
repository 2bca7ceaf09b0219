"""Freed memory goes back to the system."""

import threading

from onebox.server import heap


def test_the_heap_is_trimmed_now_and_then(monkeypatch):
    was_called = threading.Event()

    class Library:
        @staticmethod
        def malloc_trim(_):
            was_called.set()

    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: Library)
    monkeypatch.setattr(heap, "INTERVAL_S", 0.01)
    heap.start_trimming()
    # The thread ends with the process; it must not spin until then.
    assert was_called.wait(20)
    monkeypatch.setattr(heap, "INTERVAL_S", 3600.0)


def test_a_library_that_cannot_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: object())
    heap.start_trimming()
