"""Which families are in use: every server holds a shared lock on its family's lock file for as long as it lives."""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["FamilyUse", "is_in_use"]

_WAIT_S = 1.0
_POLL_S = 0.005


class FamilyUse:
    """A mark that this process uses a family. Called with the directory's lock held, where there can be one."""

    def __init__(self, family: Path) -> None:
        self._path = family / "lock"
        self._descriptor: int | None = None

    def hold(self) -> None:
        """Marks the family; again where its lock file was removed or replaced. Without locks there is no mark."""
        if self._descriptor is not None and self._is_current(self._descriptor):
            return
        self.release()
        with suppress(OSError):
            self._descriptor = _open(self._path)
            self._share(self._descriptor)

    def is_alone(self) -> bool:
        """Whether no other process uses the family."""
        if self._descriptor is None:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            with suppress(OSError):
                self._share(self._descriptor)

    def release(self) -> None:
        """Takes the mark away."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except OSError:
            return False

    def _share(self, descriptor: int) -> None:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:  # another process asks whether the family is in use
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)


def is_in_use(family: Path) -> bool:
    """Whether a process uses the family; True where the file system cannot tell. Call it with the directory's lock."""
    try:
        descriptor = os.open(family / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return os.open(path, os.O_RDONLY | flags)
