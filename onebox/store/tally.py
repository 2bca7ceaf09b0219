"""What a directory counts since it was opened, and what it says of damage: each kind once."""

import logging
import threading
from collections import Counter

from onebox.store.chunk import ChunkError, Damage

__all__ = ["StoreTally"]

_log = logging.getLogger(__name__)


class StoreTally:
    """Counters that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.damaged: Counter[str] = Counter()
        """Entries that could not be read, by `Damage`."""
        self.read_bytes = self.written_bytes = self.num_written = self.num_evicted = 0

    def read(self, num_bytes: int) -> None:
        with self._lock:
            self.read_bytes += num_bytes

    def wrote(self, num_bytes: int) -> None:
        with self._lock:
            self.written_bytes += num_bytes

    def stored(self) -> None:
        with self._lock:
            self.num_written += 1

    def evicted(self, count: int) -> None:
        with self._lock:
            self.num_evicted += count

    def damage(self, error: ChunkError) -> None:
        """Counts an entry that could not be read; the first of each kind is logged."""
        with self._lock:
            self.damaged[error.reason.value] += 1
            is_first = self.damaged[error.reason.value] == 1
        if is_first and error.reason is not Damage.EVICTED:
            _log.warning("%s Its prefix is computed instead; further ones of this kind are only counted.", error)
