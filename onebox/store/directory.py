"""The directory of prefixes on disk: finds, reads, writes and keeps entries under a budget of bytes.

Every method may be called by any thread. `find`, `has` and `stats` touch no file and wait for no other thread; the rest
reads or writes files and belongs on a thread that may wait. Several processes may use one directory at once.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onebox.spec.errors import UnreadableError, WriteError
from onebox.store.about import fingerprint_of, read_rates, write_about, write_rates
from onebox.store.chunk import Chunk, ChunkError, Damage
from onebox.store.entry import ChunkLayout, PrefixEntry, new_entry, plan_chunks
from onebox.store.family import EntryRecord, Family
from onebox.store.files import make_directory, remove_file
from onebox.store.pause import NotStoredError, WritePause
from onebox.store.reader import EntryReader
from onebox.store.room import Room
from onebox.store.tally import StoreTally
from onebox.store.writer import EntryWriter

__all__ = ["DirectoryStats", "NotStoredError", "PrefixDirectory"]

FOLLOW_S = 1.0
"""Between two looks at what other processes changed."""
CLEAR_S = 60.0
"""Between two removals of leftovers."""
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Prefixes kept by onebox. Backups may leave them out.\n"


@dataclass(frozen=True)
class DirectoryStats:
    """The first six are current; the others count since the directory was opened."""

    num_entries: int
    num_pinned: int
    num_bytes: int
    """Of the own family's files."""
    total_bytes: int
    """Of all families' files."""
    budget_bytes: int
    is_writing: bool
    """False: the disk refused a write less than a minute ago."""
    read_bytes: int
    written_bytes: int
    num_written: int
    num_evicted: int
    not_stored: dict[str, int]
    """Entries that were not written, by `NotStoredError.reason`."""
    damaged: dict[str, int]
    """Entries that could not be read, by `Damage`."""


class PrefixDirectory:
    """The prefixes of one fingerprint in `root`; `parts` are what the fingerprint is made of, by name."""

    def __init__(
        self,
        root: Path,
        parts: Mapping[str, str],
        layout: ChunkLayout,
        budget_bytes: int,
        *,
        label: Mapping[str, str] | None = None,
    ) -> None:
        self._root = _open_root(root)
        self._parts, self._label = dict(parts), dict(label or {})
        self._layout = layout
        self._family = Family(self._root / fingerprint_of(parts))
        self._tally = StoreTally()
        self._room = Room(self._root, self._family, budget_bytes, self._tally)
        self._pause = WritePause(self._root)
        self._suspects: list[PrefixEntry] = []
        self._doubted: set[str] = set()
        """Files of chunks of an entry that had a damaged one: reading ended there, so the others may be damaged too."""
        self._next_follow = self._next_clear = 0.0
        self.tend()

    @property
    def fingerprint(self) -> str:
        return self._family.path.name

    @property
    def is_writing(self) -> bool:
        """False for a minute after the disk refused a write."""
        return self._pause.is_writing

    def find(self, keys: Sequence[bytes], deeper_than: int = 0) -> PrefixEntry | None:
        """The entry with the most pages, and more than `deeper_than`, on the path of these keys (`prefix_keys`)."""
        entries = self._family.entries
        for depth in range(len(keys), deeper_than, -1):
            record = entries.get(keys[depth - 1])
            if record is not None and self._is_right(record, keys[:depth]):
                return record.entry
        return None

    def has(self, key: bytes) -> bool:
        """Whether an entry ends with this key."""
        return key in self._family.entries

    def entry_keys(self) -> list[bytes]:
        """Those of all entries."""
        return list(self._family.entries)

    def _is_right(self, record: EntryRecord, keys: Sequence[bytes]) -> bool:
        """Whether an entry's chunks are those of the keys: a file with a right digest may still be made up."""
        if not record.is_checked:
            record.is_checked = record.entry.chunks == plan_chunks(keys, self._layout)
            if not record.is_checked:
                self._suspects.append(record.entry)
                self._family.refuse(record.entry.key, Damage.CONTENT)
        return record.is_checked

    def read(self, entry: PrefixEntry) -> EntryReader:
        """Begins to read an entry: it counts as used now, and this process does not evict it until the reader ends."""
        self._room.hold(entry.key)
        self.touch(entry.key)
        return EntryReader(self._family, entry, self._tally.read, self._drop, partial(self._room.release, entry.key))

    def write(self, keys: Sequence[bytes]) -> EntryWriter:
        """Begins to write the prefix that ends with the last key, and makes room for it. Raises `NotStoredError`."""
        with self._pause.guard():
            entry = self._admit(keys)
            make_directory(self._root)
            with self._room.exclusive():
                self._prepare()
                self._room.follow()
                if self.has(entry.key):
                    raise NotStoredError("exists", "The prefix is on disk.")
                missing = [chunk for chunk in entry.chunks if not self._reuse(chunk)]
                writer = EntryWriter(self._family, self._room, self._pause, self._tally, entry, missing)
                try:
                    self._room.make_room()
                except BaseException:
                    writer.cancel()
                    raise
        return writer

    def _admit(self, keys: Sequence[bytes]) -> PrefixEntry:
        if not self.is_writing:
            raise NotStoredError("paused", f"{self._root} cannot be written at the moment.")
        entry = new_entry(keys, self._layout)
        needed = entry.file_bytes + sum(chunk.file_bytes for chunk in entry.chunks)
        if needed > self._room.budget_bytes:
            raise NotStoredError(
                "too_large", f"A prefix of {needed:,} bytes is larger than the budget of {self._root}."
            )
        return entry

    def _reuse(self, chunk: Chunk) -> bool:
        """Whether a chunk is on disk and not in doubt; it then counts as new, so that no process removes it."""
        if chunk.file_name in self._doubted:
            self._doubted.discard(chunk.file_name)
            self._family.remove_chunk(chunk.file_name)
        if not self._family.has_chunk(chunk):
            return False
        os.utime(self._family.chunk_path(chunk.file_name), follow_symlinks=False)
        return True

    def _prepare(self) -> None:
        """Makes the directories, and says what they are for."""
        family = self._family.path
        for folder in (family, *(family / name for name in ("entries", "pins", "chunks", "tmp"))):
            make_directory(folder)
        tag = self._root / _TAG
        if not tag.exists():
            tag.write_text(_TAG_TEXT)
        write_about(family, self._parts, self._label)
        self._room.use.hold()

    def touch(self, key: bytes) -> bool:
        """Marks an entry as used now; False where there is none."""
        record = self._family.entries.get(key)
        if record is None:
            return False
        record.last_used = time.time()
        with suppress(OSError):
            os.utime(self._family.entry_path(key), follow_symlinks=False)
        return True

    def pin(self, key: bytes) -> bool:
        """Has an entry evicted after all others; False where there is none or the disk refuses."""
        return self.has(key) and self._family.pin(key)

    def unpin(self, key: bytes) -> bool:
        """Ends a pin; False where there is none."""
        return self._family.unpin(key)

    def remove(self, key: bytes) -> bool:
        """Removes an entry and the chunks that only it has; False where there is none or it cannot be removed."""
        if not self.has(key):
            return False
        try:
            with self._room.exclusive():
                self._room.follow()
                self._family.remove(key, self._room.kept)
        except OSError:
            return False
        return True

    def discard(self, entry: PrefixEntry) -> None:
        """Has an entry no longer found, for a reason of the caller's; its files are removed."""
        self._family.forget(entry.key)
        remove_file(self._family.entry_path(entry.key))

    def _drop(self, entry: PrefixEntry, chunk: Chunk, error: ChunkError) -> ChunkError:
        """Takes out every entry with a chunk that cannot be read; returns the error, which is counted and said."""
        path = self._family.entry_path(entry.key)
        if error.reason is Damage.MISSING and not os.path.lexists(path):
            error = ChunkError(Damage.EVICTED, error.path)
        self._tally.damage(error)
        for user in self._family.users_of(chunk):
            self._family.refuse(user.key, error.reason)
            if error.reason is not Damage.BUSY:
                remove_file(self._family.entry_path(user.key))
        if error.reason.is_lasting:
            remove_file(error.path)
            self._doubted.update(other.file_name for other in entry.chunks)
        return error

    def tend(self) -> None:
        """Follows other processes, removes leftovers and keeps the budget, as far as either is due.

        Cheap where nothing is: call it about every second.
        """
        now = time.monotonic()
        if now < self._next_follow:
            return
        self._next_follow = now + FOLLOW_S
        self._remove_suspects()
        self._room.follow()
        if now >= self._next_clear:
            self._next_clear = now + CLEAR_S
            # Read-only, or another process is at it.
            with suppress(OSError, NotStoredError), self._room.exclusive():
                if self._family.path.is_dir():
                    self._room.use.hold()
                self._room.follow()
                self._room.clear_leftovers()
                self._room.make_room(spares_disk=False)

    def _remove_suspects(self) -> None:
        while self._suspects:
            path = self._family.entry_path(self._suspects.pop().key)
            self._tally.damage(ChunkError(Damage.CONTENT, path))
            remove_file(path)

    def load_rates(self) -> dict[str, float]:
        """The figures that were last saved."""
        return read_rates(self._family.path)

    def save_rates(self, rates: Mapping[str, float]) -> None:
        """Keeps positive figures in the family, for the next start; where it has been written to at all."""
        with suppress(OSError):
            write_rates(self._family.path, rates)

    def stats(self) -> DirectoryStats:
        """What is there, and what happened since the start."""
        return DirectoryStats(
            num_entries=len(self._family.entries),
            num_pinned=self._family.num_pinned,
            num_bytes=self._family.num_bytes,
            total_bytes=self._room.total_bytes,
            budget_bytes=self._room.budget_bytes,
            is_writing=self.is_writing,
            read_bytes=self._tally.read_bytes,
            written_bytes=self._tally.written_bytes,
            num_written=self._tally.num_written,
            num_evicted=self._tally.num_evicted,
            not_stored=dict(self._pause.counts),
            damaged=dict(self._tally.damaged),
        )

    def close(self) -> None:
        """Ends this process's use of the family; nothing is found or written any more."""
        self._family.entries.clear()
        self._room.use.release()


def _open_root(root: Path) -> Path:
    """The directory, links followed; made where it is absent."""
    try:
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            make_directory(root)
        path = root.resolve()
        next(path.iterdir(), None)
    except FileNotFoundError as error:
        raise WriteError(f"--prefix-dir {root} cannot be made ({error.strerror}).") from None
    except NotADirectoryError:
        raise WriteError(f"--prefix-dir {root} is no directory: name one, or none.") from None
    except OSError as error:
        raise UnreadableError(f"--prefix-dir {root} cannot be made or listed ({error.strerror}).") from None
    return path
