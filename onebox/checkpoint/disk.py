"""Checks for free disk space before anything is written."""

import shutil
from pathlib import Path

from onebox.spec.errors import DoesNotFitError

__all__ = ["require_disk"]


def require_disk(what: str, directory: Path, needed_bytes: int) -> None:
    """Raises `DoesNotFitError`, with both sizes, if the file system of `directory` has less space free."""
    where = directory.absolute()
    while not where.exists():
        where = where.parent
    free_bytes = shutil.disk_usage(where).free
    if free_bytes < needed_bytes:
        raise DoesNotFitError(
            f"{what} needs {needed_bytes / 1e9:.2f} GB in {where} and {free_bytes / 1e9:.2f} GB are free: "
            "free some space or choose another --out."
        )
