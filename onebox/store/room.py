"""The bytes of a directory: kept under its budget, shared with other processes, cleared of what nobody will read."""

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from onebox.store.chunk import ChunkError, Damage
from onebox.store.eviction import Tenant, free_bytes
from onebox.store.family import Family, list_families
from onebox.store.files import directory_lock, remove_file
from onebox.store.pause import NotStoredError
from onebox.store.tally import StoreTally
from onebox.store.use import FamilyUse, is_in_use

__all__ = ["ORPHAN_GRACE_S", "Room"]

ORPHAN_GRACE_S = 900.0
"""Age at which a chunk of no entry is removed, where another server might be about to write its entry."""

SPARE_BYTES = 1 << 30
"""Left free on the disk, or a twentieth of a small one: others write to it too."""


class Room:
    """One family of this process and all others in its directory.

    Any thread may call it; `make_room` and `clear_leftovers` inside `exclusive`.
    """

    def __init__(self, root: Path, own: Family, budget_bytes: int, tally: StoreTally) -> None:
        self._root = root
        self._own = own
        self._tally = tally
        self._care = threading.RLock()
        self._depth = 0
        self._others: dict[Path, Family] = {}
        self.budget_bytes = budget_bytes
        self._allowed_bytes = budget_bytes
        self.use = FamilyUse(own.path)
        self.total_bytes = 0
        """Of all families, as last listed."""
        self._lock = threading.Lock()
        self._held: Counter[bytes] = Counter()
        self._kept: Counter[str] = Counter()
        self._reserved_bytes = 0

    def hold(self, key: bytes) -> None:
        """Keeps an entry from being evicted by this process."""
        with self._lock:
            self._held[key] += 1

    def release(self, key: bytes) -> None:
        """Ends one `hold`."""
        with self._lock:
            self._held -= Counter((key,))

    def reserve(self, names: Iterable[str], num_bytes: int) -> None:
        """Keeps chunks from being removed and bytes free until `settle`."""
        with self._lock:
            self._kept.update(names)
            self._reserved_bytes += num_bytes

    def settle(self, names: Iterable[str], num_bytes: int) -> None:
        """Ends (a part of) what `reserve` began."""
        with self._lock:
            self._kept -= Counter(names)
            self._reserved_bytes -= num_bytes

    @property
    def kept(self) -> frozenset[str]:
        """Names of chunks of entries that are being written."""
        with self._lock:
            return frozenset(self._kept)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Makes this thread the only one of all processes that adds or removes entries. Raises OSError."""
        with self._care, ExitStack() as stack:
            if not self._depth:  # else this thread is inside already
                stack.enter_context(directory_lock(self._root / "lock"))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def follow(self) -> None:
        """Takes note of what changed on disk; entries of the own family that are damaged are removed."""
        with self._care:
            for error in self._own.refresh():
                self._tally.damage(error)
                if error.reason.is_lasting:
                    remove_file(error.path)
            paths = [path for path in list_families(self._root) if path != self._own.path]
            self._others = {path: self._others.get(path) or Family(path) for path in paths}
            for family in self._others.values():
                family.refresh()
            self._add_up()

    def _add_up(self) -> None:
        self.total_bytes = sum(family.num_bytes for family in (self._own, *self._others.values()))

    def make_room(self, *, spares_disk: bool = True) -> None:
        """Evicts until all bytes and the reserved ones fit the budget, and the disk if `spares_disk`.

        Raises `NotStoredError` and OSError where they cannot. Call `follow` before it.
        """
        available = self._available_bytes() if spares_disk else self.budget_bytes
        self._allowed_bytes = min(self.budget_bytes, available)
        # What cannot fit must not cost what is there.
        if self._excess_bytes() > 0 and self._reserved_bytes <= self._allowed_bytes:
            unused = {path for path in self._others if not is_in_use(path)}
            for path in unused:
                if self._excess_bytes() > 0 and not self._others[path].entries:
                    self._remove_family(self._others[path])  # nothing in it can be read by this version
            self._evict(unused)
        if self._excess_bytes() > 0:
            if available < self.budget_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise NotStoredError("no_room", f"What {self._root} holds is being read or written: nothing was evicted.")

    def _evict(self, unused: set[Path]) -> None:
        tenants = [Tenant(self._own, True, self.kept, self._held.__contains__)]
        for path, family in self._others.items():
            tenants.append(Tenant(family, path not in unused))
        freed, num_removed = free_bytes(tenants, self._excess_bytes())
        self.total_bytes -= freed
        self._tally.evicted(num_removed)

    def _excess_bytes(self) -> int:
        return self.total_bytes + self._reserved_bytes - self._allowed_bytes

    def _available_bytes(self) -> int:
        """What all families may have on this disk."""
        found = os.statvfs(self._root)
        spare = found.f_bavail * found.f_frsize - min(SPARE_BYTES, found.f_blocks * found.f_frsize // 20)
        return self.total_bytes + spare

    def clear_leftovers(self) -> None:
        """Removes what nobody will read, here and in families that nobody uses. Call `follow` before it."""
        for entry in self._own.incomplete():
            self._tally.damage(ChunkError(Damage.MISSING, self._own.entry_path(entry.key), "of its chunks"))
            self._own.remove(entry.key, self.kept)
        min_age_s = 0.0 if self.use.is_alone() else ORPHAN_GRACE_S
        self._own.remove_leftovers(self.kept, min_age_s)
        for path, family in self._others.items():
            if not is_in_use(path):
                family.remove_leftovers((), 0.0)
                if not family.num_files:
                    self._remove_family(family)
        self._add_up()

    def _remove_family(self, family: Family) -> None:
        self.total_bytes -= family.num_bytes
        with suppress(OSError):
            family.remove_all()
