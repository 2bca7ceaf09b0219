"""Files that several processes share: written whole or not at all, locks that end with their holder, bounded reads."""

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = [
    "PendingFile",
    "directory_lock",
    "is_directory",
    "is_writer_dead",
    "list_names",
    "make_directory",
    "read_json_object",
    "remove_file",
    "write_json_object",
]

MAX_JSON_BYTES = 1 << 16
LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.001
ABANDONED_S = 3600.0
"""Age at which a temporary file is its dead writer's, on a file system without locks."""


class PendingFile:
    """A temporary file in `folder` that becomes a file of another name once it is whole.

    Its writer holds a lock on it: a temporary file without a lock has no writer and may be removed.
    """

    def __init__(self, folder: Path) -> None:
        while True:
            self._path = folder / secrets.token_hex(16)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor = os.open(self._path, flags, 0o600)
            if self._lock():
                break
            os.close(self.descriptor)
        self._is_placed = False

    def _lock(self) -> bool:
        """False where another process took the file for a dead writer's before it was locked."""
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(self.descriptor).st_nlink > 0

    def place(self, path: Path) -> None:
        """Gives the file its name, replacing what is there."""
        self._path.replace(path)
        self._is_placed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_placed:
            with suppress(OSError):
                self._path.unlink()
        os.close(self.descriptor)


def is_writer_dead(path: Path) -> bool:
    """Whether a temporary file's writer is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return error.errno == errno.ELOOP  # no writer makes a link
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > ABANDONED_S
    finally:
        os.close(descriptor)


@contextmanager
def directory_lock(path: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Makes this process the only one inside; raises `BlockingIOError` where another stays inside for `wait_s`."""
    deadline = time.monotonic() + wait_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise BlockingIOError(errno.EWOULDBLOCK, "Another process holds its lock")
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            return descriptor  # without locks two processes may remove what the other needs: a miss
        # A lock on a file that was removed excludes nobody.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def make_directory(path: Path) -> None:
    """Makes a directory that its owner alone may enter. Raises OSError where something else has its name."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "It is no directory", str(path))


def is_directory(path: Path) -> bool:
    """Whether it is a directory and no link; False where the system does not tell."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def list_names(path: Path) -> list[str]:
    """The names in a directory; none where it is absent, a link, or cannot be listed."""
    try:
        return [file.name for file in path.iterdir()] if is_directory(path) else []
    except OSError:
        return []


def remove_file(path: Path) -> bool:
    """Removes a file or a link; False where there is none or it cannot be."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def read_json_object(path: Path) -> dict[str, Any]:
    """A small file's JSON object; empty where there is none that can be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            # One read is all of a small regular file; of anything else it is an error or no JSON.
            data = os.read(descriptor, MAX_JSON_BYTES + 1)
        finally:
            os.close(descriptor)
        found = json.loads(data) if len(data) <= MAX_JSON_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json_object(path: Path, value: dict[str, Any], pending: Path) -> None:
    """Writes a small JSON file whole or not at all, by way of the folder `pending`. Raises OSError."""
    data = json.dumps(value, indent=1, sort_keys=True).encode()
    with PendingFile(pending) as file:
        with open(file.descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        os.fsync(file.descriptor)
        file.place(path)
