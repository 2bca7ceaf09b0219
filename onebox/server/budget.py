"""Memory that all requests share: bytes are taken before they are held, and returned when they are freed."""

import threading
from types import TracebackType

from onebox.server.errors import ServerBusyError

__all__ = ["ByteBudget", "HeldBytes"]


class ByteBudget:
    """Bytes that may be held at once. Used from several threads."""

    def __init__(self, max_bytes: int, what: str) -> None:
        self.max_bytes = max_bytes
        self._what = what
        self._num_held = 0
        self._lock = threading.Lock()

    @property
    def num_held(self) -> int:
        return self._num_held

    def take(self, num_bytes: int) -> None:
        with self._lock:
            if self._num_held + num_bytes > self.max_bytes:
                raise ServerBusyError(
                    f"{self._what} of the requests at work hold {self._num_held} bytes, {num_bytes} more are needed "
                    f"and the limit is {self.max_bytes}; try again in a moment."
                )
            self._num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_held -= num_bytes

    def hold(self, num_free_bytes: int = 0) -> "HeldBytes":
        return HeldBytes(self, num_free_bytes)


class HeldBytes:
    """What one request holds, returned at the end of a `with` block. The first `num_free_bytes` do not count."""

    def __init__(self, budget: ByteBudget, num_free_bytes: int) -> None:
        self.num_bytes = 0
        self._budget = budget
        self._num_free_bytes = num_free_bytes
        self._num_taken = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        needed = max(0, self.num_bytes - self._num_free_bytes) - self._num_taken
        self._budget.take(needed)
        self._num_taken += needed

    def __enter__(self) -> "HeldBytes":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._budget.give_back(self._num_taken)
        self._num_taken = 0
