"""Where prefixes are kept on disk: the directory that `--prefix-dir` names, and what is wrong with it."""

import os
import shutil
from pathlib import Path

from onebox.spec.cache import user_cache_directory
from onebox.spec.errors import UsageError

__all__ = ["default_prefix_directory", "prefix_directory", "prefix_directory_line"]


def default_prefix_directory() -> Path:
    """In the user's cache directory; it may not exist yet."""
    try:
        return user_cache_directory() / "prefixes"
    except RuntimeError:
        raise UsageError("There is no home directory for --prefix-dir auto; name a directory.") from None


def prefix_directory(given: str | Path | None) -> Path | None:
    """The absolute path that `none`, `auto` or a path means; refuses one that cannot be used. Nothing is created."""
    if given is None or str(given) == "none":
        return None
    if not str(given).strip():
        raise UsageError("--prefix-dir is empty; give a directory, auto or none.")
    named = default_prefix_directory() if str(given) == "auto" else Path(given)
    directory = named.expanduser().absolute()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"--prefix-dir {given}: {there} is not a directory; give another path.")
    if there != directory and not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--prefix-dir {given}: {there} cannot be written, so {directory} cannot be made there.")
    if there == directory and not os.access(there, os.R_OK | os.X_OK):
        raise UsageError(f"--prefix-dir {given}: {directory} cannot be read; change its mode or give another path.")
    return directory


def prefix_directory_line(directory: Path, max_bytes: int) -> str:
    """What the operator should know of a directory that can be used, as a sentence."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return f"Prefixes on disk: read from {directory}, which cannot be written; none is added."
    free = shutil.disk_usage(there).free
    return f"Prefixes on disk: {directory}, at most {max_bytes / 1e9:,.1f} GB; {free / 1e9:,.1f} GB are free there."
