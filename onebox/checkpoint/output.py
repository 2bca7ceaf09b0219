"""The directory that a build writes to: where it is, who may write to it, and what an earlier run has left in it.

OUT                absent, empty or a complete build
OUT.partial        a build under way, renamed to OUT when complete; its onebox_build.json says of what
OUT.partial.lock   held (flock) by the one process that writes; the kernel frees it however that process ends

A build that was stopped at any point leaves a state that the next run can tell from every other one.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onebox.checkpoint.manifest import MANIFEST_NAME, write_json
from onebox.spec.errors import UnreadableError, UsageError, WriteError
from onebox.spec.model import read_json

__all__ = [
    "MARKER_NAME",
    "build_lock",
    "discard",
    "is_empty",
    "output_directory",
    "read_marker",
    "staging_of",
    "sync_directory",
    "write_marker",
]

MARKER_NAME = "onebox_build.json"


def output_directory(out: Path) -> Path:
    """The directory that `out` names, links followed. Refuses one that cannot be replaced by a rename."""
    real = Path(os.path.realpath(out))
    if real == Path.cwd() or not real.name:
        raise UsageError(f"--out {out} is the current directory or the root: name a new directory, such as --out NEW.")
    if os.path.ismount(real):
        raise UsageError(f"--out {out} is a mount point, which cannot be replaced: name a directory below it.")
    return real


def staging_of(out: Path) -> Path:
    """The directory in which `out` is prepared."""
    return out.with_name(out.name + ".partial")


@contextmanager
def build_lock(out: Path) -> Iterator[None]:
    """Makes this process the only one that builds `out`. Raises `WriteError` if another one does."""
    if not out.parent.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(out.name + ".partial.lock")
    lock = _take(path, out)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def _take(path: Path, out: Path) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder removes the file: a lock on a removed file excludes nobody.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BlockingIOError:
            os.close(lock)
            raise WriteError(f"Another process is building {out}: wait for it, or choose another --out.") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def read_marker(staging: Path) -> dict[str, Any] | None:
    """What `write_marker` wrote; None if nothing was, or if it cannot be read."""
    try:
        return read_json(staging / MARKER_NAME)
    except UnreadableError:
        return None


def write_marker(staging: Path, value: dict[str, Any]) -> None:
    """Says what the unfinished build in `staging` is made of."""
    write_json(staging / MARKER_NAME, value)


def is_empty(staging: Path) -> bool:
    """Whether `staging` holds nothing that a build would keep."""
    return {path.name for path in staging.iterdir()} <= {f"{MARKER_NAME}.tmp"}


def discard(staging: Path) -> None:
    """Empties the directory of an unfinished build. Refuses a directory that onebox did not write."""
    is_own = (staging / MARKER_NAME).exists() or (staging / MANIFEST_NAME).exists() or is_empty(staging)
    if not is_own:
        raise WriteError(f"{staging} holds files that no build of onebox wrote: move it away, or choose another --out.")
    # An empty marker stays until the end: a run that is stopped in between leaves what the next one discards.
    write_marker(staging, {})
    for path in staging.iterdir():
        if path.name != MARKER_NAME:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync_directory(path: Path) -> None:
    """Flushes the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
