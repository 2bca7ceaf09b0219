"""Which answers are stored, the oldest first, in one array.

An object for each of them would be made while requests are under way, wherever the heap has room at that moment, and
then keep a page of it for as long as the answer is stored: after an hour of answers several megabytes.
"""

import re
from typing import NamedTuple

import numpy as np

__all__ = ["ResponseIndex", "StoredEntry", "is_response_id"]

_ID = re.compile(r"resp_[0-9a-f]{32}")
_FIRST_ROWS = 64
_ROW = np.dtype(
    [
        ("high", np.uint64),
        ("low", np.uint64),
        ("place", np.int64),  # in the order of adding, from 1 on; 0: the row is free
        ("owner", np.int32),
        ("num_bytes", np.int64),
        ("created_at", np.float64),
    ]
)


class StoredEntry(NamedTuple):
    owner: str
    num_bytes: int
    created_at: float


def is_response_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class ResponseIndex:
    """Entries by the id of their answer."""

    def __init__(self) -> None:
        self._rows = np.zeros(_FIRST_ROWS, _ROW)
        self._owners: list[str] = []
        """Names of keys; few."""
        self._last_place = self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, response_id: str) -> bool:
        return self._find(response_id) is not None

    def add(self, response_id: str, entry: StoredEntry) -> None:
        """As the newest one; its id must be new."""
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        if entry.owner not in self._owners:
            self._owners.append(entry.owner)
        owner = self._owners.index(entry.owner)
        self._last_place += 1
        self._count += 1
        free = int(np.argmin(self._rows["place"]))
        self._rows[free] = (*_key(response_id), self._last_place, owner, entry.num_bytes, entry.created_at)

    def get(self, response_id: str) -> StoredEntry | None:
        row = self._find(response_id)
        return None if row is None else self._entry(row)

    def remove(self, response_id: str) -> StoredEntry | None:
        """The entry that was there."""
        row = self._find(response_id)
        if row is None:
            return None
        entry = self._entry(row)
        self._rows[row] = 0
        self._count -= 1
        return entry

    def oldest(self) -> tuple[str, StoredEntry] | None:
        if not self._count:
            return None
        places = self._rows["place"]
        row = int(np.argmin(np.where(places > 0, places, np.iinfo(np.int64).max)))
        high, low = (int(self._rows[name][row]) for name in ("high", "low"))
        return f"resp_{high:016x}{low:016x}", self._entry(row)

    def _find(self, response_id: str) -> int | None:
        if not is_response_id(response_id):
            return None
        high, low = _key(response_id)
        rows = self._rows
        found = np.flatnonzero((rows["high"] == high) & (rows["low"] == low) & (rows["place"] > 0))
        return int(found[0]) if len(found) else None

    def _entry(self, row: int) -> StoredEntry:
        _, _, _, owner, num_bytes, created_at = self._rows[row].item()
        return StoredEntry(self._owners[owner], num_bytes, created_at)


def _key(response_id: str) -> tuple[int, int]:
    digits = response_id.removeprefix("resp_")
    return int(digits[:16], 16), int(digits[16:], 16)
