"""Writing stops while the disk refuses it, and is tried again after a while; reading goes on."""

import errno
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onebox.spec.errors import OneboxError

__all__ = ["NotStoredError", "WritePause"]

RETRY_S = 60.0
_PASSING = (errno.ENOENT, errno.EISDIR, errno.EWOULDBLOCK)
"""Somebody removed a directory, made one under a file's name, or holds the lock: the next entry may work."""
_log = logging.getLogger(__name__)


class NotStoredError(OneboxError):
    """An entry that was not written. `reason` is one of:

    paused: the disk refused a write a moment ago. failed: it refuses this one. busy: another process holds the lock.
    exists: the entry is there. too_large: it is larger than the budget. no_room: what is there is in use.
    lost: another process removed a chunk meanwhile. closed: the writer was cancelled or has committed.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WritePause:
    """Whether writing is tried, and what is said when that changes. By any thread."""

    def __init__(self, root: Path, retry_s: float = RETRY_S) -> None:
        self._root = root
        self._retry_s = retry_s
        self._until = 0.0
        self._is_said = False
        self.counts: Counter[str] = Counter()
        """Entries that were not stored, by reason."""

    @property
    def is_writing(self) -> bool:
        return time.monotonic() >= self._until

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Makes `NotStoredError` of what the system raises, and counts it."""
        try:
            yield
        except NotStoredError as error:
            self.counts[error.reason] += 1
            raise
        except OSError as error:
            reason = "busy" if error.errno == errno.EWOULDBLOCK else "failed"
            self.counts[reason] += 1
            if error.errno not in _PASSING:
                self._stop(error)
            raise NotStoredError(
                reason, f"A prefix was not written to {self._root} ({error.strerror or error})."
            ) from error

    def succeed(self) -> None:
        """Takes note that an entry was written."""
        self._until = 0.0
        if self._is_said:
            self._is_said = False
            _log.warning("Prefixes are written to %s again.", self._root)

    def _stop(self, error: OSError) -> None:
        self._until = time.monotonic() + self._retry_s
        if not self._is_said:
            self._is_said = True
            _log.warning(
                "Prefixes are no longer written to %s (%s); those on it are still read, and writing is tried again "
                "every %.0f s.",
                self._root,
                error.strerror or error,
                self._retry_s,
            )
