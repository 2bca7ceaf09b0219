"""Checks for free disk space before anything is written."""

import shutil
from pathlib import Path

from onebox.spec.errors import DoesNotFitError

__all__ = ["require_disk"]


def require_disk(what: str, directory: Path, needed_bytes: int, flag: str = "--out") -> None:
    """Raises `DoesNotFitError`, with both sizes, if the file system of `directory`, set by `flag`, has less free."""
    where = directory.absolute()
    while not where.exists():
        where = where.parent
    free_bytes = shutil.disk_usage(where).free
    if free_bytes < needed_bytes:
        raise DoesNotFitError(
            f"{what} needs {needed_bytes / 1e9:.2f} GB in {where} and {free_bytes / 1e9:.2f} GB are free: "
            f"free some space or choose another {flag}."
        )
