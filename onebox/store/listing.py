"""The files of a directory that other processes change too: listed again when its time of change differs."""

import os
import re
import stat
import time
from pathlib import Path

__all__ = ["Listing"]

SETTLED_NS = 2_000_000_000
"""Two changes within a tick of the file system's clock have one time: a change this young may hide another."""


class Listing:
    """Names that match a pattern, with the bytes of each. Links are not followed; other names are ignored."""

    def __init__(self, path: Path, pattern: re.Pattern[str]) -> None:
        self._path = path
        self._pattern = pattern
        self._seen: tuple[int, int] | None = None
        self.sizes: dict[str, int] = {}
        """Any thread may look a name up; to iterate, take a list of it first."""
        self.num_bytes = 0

    def refresh(self) -> bool:
        """Lists the directory if it changed; returns whether it was listed."""
        try:
            found = self._path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError
            seen = (found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return False
            sizes = self._list()
        except OSError:
            # Absent, a link, or not ours to list: nothing is there to be read.
            was_empty, self._seen = not self.sizes, None
            self.sizes, self.num_bytes = {}, 0
            return not was_empty
        self._seen = seen if time.time_ns() - found.st_mtime_ns > SETTLED_NS else None
        self.sizes, self.num_bytes = sizes, sum(sizes.values())
        return True

    def _list(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with os.scandir(self._path) as files:
            for file in files:
                if self._pattern.fullmatch(file.name):
                    # A file has its length from the moment it has its name.
                    known = self.sizes.get(file.name)
                    sizes[file.name] = _size(file) if known is None else known
        return sizes

    def drop(self, name: str) -> int:
        """Takes note of a file that was removed; returns its bytes."""
        num_bytes = self.sizes.pop(name, 0)
        self.num_bytes -= num_bytes
        return num_bytes


def _size(file: "os.DirEntry[str]") -> int:
    try:
        return file.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
