"""The directory for files that onebox can regenerate: compiled code, tuning tables, small checkpoints.

Nothing depends on it: where it cannot be written (no home, read-only, full), the temporary directory takes its place.
"""

import logging
import os
import stat
import tempfile
from pathlib import Path

__all__ = ["redirect_kernel_cache", "temporary_cache_directory", "user_cache_directory", "writable_cache_directory"]

KERNEL_ROOM_BYTES = 64 << 20
_log = logging.getLogger(__name__)


def user_cache_directory() -> Path:
    """The `onebox` directory in the user's cache directory; it may not exist yet.

    `$XDG_CACHE_HOME`, else `~/.cache`. As the XDG standard requires, an empty value counts as unset and a relative one
    is ignored. Raises RuntimeError if neither is set.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = given if given.is_absolute() else Path.home() / ".cache"
    return home / "onebox"


def temporary_cache_directory() -> Path:
    """The user's directory in the temporary one; made here. OSError where it cannot be, or is another user's.

    What it holds is run as machine code, so nobody else may be able to write there.
    """
    directory = Path(tempfile.gettempdir()) / f"onebox-cache-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{directory} can be written by other users")
    return directory


def writable_cache_directory(name: str, room_bytes: int) -> Path | None:
    """A directory of this name with so much room in the user's cache, else in the temporary one; None: in neither."""
    problem = ""
    for home in (user_cache_directory, temporary_cache_directory):
        try:
            directory = home() / name
            _try_writing(directory, room_bytes)
        except (OSError, RuntimeError) as error:  # the second where there is no home
            problem = problem or f"The cache cannot be written ({error})"
            continue
        if problem:
            _log.warning("%s; %s is used instead.", problem, directory)
        return directory
    _log.warning("%s; starting takes longer without it.", problem)
    return None


def redirect_kernel_cache() -> None:
    """Has Triton use a directory that can be written, where its own cannot. Called before a kernel is compiled."""
    try:
        home = os.environ.get("TRITON_HOME") or Path.home()
        _try_writing(Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")), KERNEL_ROOM_BYTES)
    except (OSError, RuntimeError):
        directory = writable_cache_directory("triton", KERNEL_ROOM_BYTES)
        if directory:
            os.environ["TRITON_CACHE_DIR"] = str(directory)


def _try_writing(directory: Path, num_bytes: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        part = bytes(min(num_bytes, 1 << 20))
        for _ in range(-(-num_bytes // len(part))):
            file.write(part)
