"""One family: the directory of one fingerprint, and what is known of its files.

    DIR/<fingerprint>/about.json     the fingerprint in clear, for people
                      rates.json     figures that the engine measured
                      lock           held (shared flock) by every server that uses the family
                      entries/<key>  one file for each entry; its time of change is the entry's last use
                      pins/<key>     present: the entry is pinned
                      chunks/<xx>/   chunk files, by the first two digits of their key
                      tmp/           files that are being written, each locked by its writer

What is known follows the disk: a directory whose time of change differs is listed again. Several processes change a
family at once, so any file may be gone when it is wanted. Whatever has a name that is not listed here is left alone.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onebox.store.chunk import Chunk, ChunkError, Damage
from onebox.store.entry import PrefixEntry
from onebox.store.entry_file import read_entry
from onebox.store.files import is_directory, is_writer_dead, list_names, make_directory, remove_file
from onebox.store.listing import Listing

__all__ = ["EntryRecord", "Family", "list_families"]

RETRY_S = 60.0
"""Until a file that the system refused to read is tried again."""
_FINGERPRINT = re.compile(r"[0-9a-f]{40}")
_KEY = re.compile(r"[0-9a-f]{40}")
_CHUNK = re.compile(r"[0-9a-f]{40}-(kv|state)[0-9]{2,5}")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_PENDING = re.compile(r"[0-9a-f]{32}")
_UNDECIDED = (Damage.BUSY, Damage.VERSION)
_FILES = ("about.json", "rates.json", "lock")


@dataclass(slots=True)
class EntryRecord:
    """An entry and what changes about it."""

    entry: PrefixEntry
    last_used: float
    """Unix seconds, as far as this process knows."""
    is_checked: bool = False
    """Whether its chunks were found to be those of its tokens."""


class Family:
    """The files of one fingerprint.

    `entries` is read by any thread without a lock. `refresh` and what removes files are called by one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fingerprint = bytes.fromhex(path.name)
        self.entries: dict[bytes, EntryRecord] = {}
        self.refused: dict[str, tuple[Damage, float]] = {}
        """Entry files that cannot be used: why, and when (monotonic seconds) each is tried again."""
        self._names = Listing(path / "entries", _KEY)
        self._pins = Listing(path / "pins", _KEY)
        self._folder_names = Listing(path / "chunks", _FOLDER)
        self._folders: dict[str, Listing] = {}
        self._references: Counter[str] = Counter()
        self._memory = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of all entry and chunk files, as last listed."""
        return self._names.num_bytes + sum(folder.num_bytes for folder in list(self._folders.values()))

    @property
    def num_files(self) -> int:
        """Of entries that can be read, and of those that cannot."""
        return len(self._names.sizes)

    def entry_path(self, key: bytes) -> Path:
        return self.path / "entries" / key.hex()

    def pin_path(self, key: bytes) -> Path:
        return self.path / "pins" / key.hex()

    def chunk_path(self, name: str) -> Path:
        return self.path / "chunks" / name[:2] / name

    def is_pinned(self, key: bytes) -> bool:
        return key.hex() in self._pins.sizes

    @property
    def num_pinned(self) -> int:
        return len(self._pins.sizes)

    def pin(self, key: bytes) -> bool:
        """Marks an entry as pinned; False where the disk refuses. By any thread."""
        try:
            make_directory(self.path / "pins")
            self.pin_path(key).touch(mode=0o600)
        except OSError:
            return False
        self._pins.sizes[key.hex()] = 0
        return True

    def unpin(self, key: bytes) -> bool:
        """Takes a pin away; False where there is none. By any thread."""
        self._pins.drop(key.hex())
        return remove_file(self.pin_path(key))

    def has_chunk(self, chunk: Chunk) -> bool:
        """Whether its file is there and has its length; asks the disk."""
        try:
            return self.chunk_path(chunk.file_name).lstat().st_size == chunk.file_bytes
        except OSError:
            return False

    def refresh(self) -> list[ChunkError]:
        """Follows what has changed on disk; returns what is wrong with entries that were read for the first time."""
        self._pins.refresh()
        errors: list[ChunkError] = []
        if self._names.refresh() or self._is_retry_due():
            errors = list(self._read_new())
            for key in [key for key in list(self.entries) if key.hex() not in self._names.sizes]:
                self.forget(key)
            for name in [name for name in list(self.refused) if name not in self._names.sizes]:
                self.refused.pop(name, None)
        self._refresh_chunks()
        return errors

    def _is_retry_due(self) -> bool:
        now = time.monotonic()
        return any(until < now for _, until in list(self.refused.values()))

    def _read_new(self) -> Iterator[ChunkError]:
        now = time.monotonic()
        for name in list(self._names.sizes):
            key = bytes.fromhex(name)
            refused = self.refused.get(name)
            if key in self.entries or (refused and refused[1] > now):
                continue
            try:
                self.add(*read_entry(self.entry_path(key), self.fingerprint, key))
            except ChunkError as error:
                if error.reason is not Damage.MISSING:  # else removed since it was listed
                    self.refuse(key, error.reason)
                    yield error

    def _refresh_chunks(self) -> None:
        if self._folder_names.refresh():
            names = self._folder_names.sizes
            kept = {name: folder for name, folder in self._folders.items() if name in names}
            new = {name: Listing(self.path / "chunks" / name, _CHUNK) for name in names if name not in kept}
            self._folders = kept | new
        for folder in self._folders.values():
            folder.refresh()

    def add(self, entry: PrefixEntry, last_used: float, *, is_checked: bool = False) -> None:
        """Knows an entry whose file is in place. By any thread."""
        with self._memory:
            if entry.key not in self.entries:
                self._references.update(chunk.file_name for chunk in entry.chunks)
            self.entries[entry.key] = EntryRecord(entry, last_used, is_checked)
        self.refused.pop(entry.key.hex(), None)

    def forget(self, key: bytes) -> EntryRecord | None:
        """No longer knows an entry; its files stay. By any thread."""
        with self._memory:
            record = self.entries.pop(key, None)
            if record:
                for chunk in record.entry.chunks:
                    self._references[chunk.file_name] -= 1
                    if not self._references[chunk.file_name]:
                        del self._references[chunk.file_name]
            return record

    def refuse(self, key: bytes, reason: Damage) -> None:
        """Forgets an entry and does not read its file again for a while. By any thread."""
        self.refused[key.hex()] = (reason, time.monotonic() + RETRY_S)
        self.forget(key)

    def users_of(self, chunk: Chunk) -> list[PrefixEntry]:
        """The entries that have this chunk."""
        return [record.entry for record in list(self.entries.values()) if chunk in record.entry.chunks]

    def last_used(self, key: bytes) -> float | None:
        """When an entry was last used by any process (unix seconds); None where its file is gone."""
        try:
            return self.entry_path(key).lstat().st_mtime
        except OSError:
            return None

    def remove(self, key: bytes, keep: Collection[str] = ()) -> int:
        """Removes an entry, and its chunks that no other has and that are not in `keep`; returns the bytes freed."""
        path = self.entry_path(key)
        removed = remove_file(path)
        remove_file(self.pin_path(key))
        freed = self._names.drop(path.name) if removed else 0
        record = self.forget(key)
        if record is None:
            return freed
        names = (chunk.file_name for chunk in record.entry.chunks)
        return freed + sum(self.remove_chunk(name) for name in names if not self.is_used(name, keep))

    def is_used(self, name: str, keep: Collection[str]) -> bool:
        return name in keep or self._references[name] > 0

    def remove_chunk(self, name: str) -> int:
        """Removes a chunk's file; returns the bytes freed."""
        if not remove_file(self.chunk_path(name)):
            return 0
        folder = self._folders.get(name[:2])
        return folder.drop(name) if folder else 0

    def remove_leftovers(self, keep: Collection[str], min_age_s: float) -> None:
        """Removes what interrupted writers left: temporary files, chunks of no entry, pins of no entry.

        Chunks that are younger than `min_age_s` may belong to an entry that another process is writing.
        """
        for name in list_names(self.path / "tmp"):
            if _PENDING.fullmatch(name) and is_writer_dead(self.path / "tmp" / name):
                remove_file(self.path / "tmp" / name)
        for name in [name for name in list(self._pins.sizes) if name not in self._names.sizes]:
            remove_file(self.path / "pins" / name)
        for name in list(self._orphans(keep)):
            if abs(_age_s(self.chunk_path(name))) >= min_age_s:  # a time far ahead is no writer's of now
                self.remove_chunk(name)

    def _orphans(self, keep: Collection[str]) -> Iterator[str]:
        if any(reason in _UNDECIDED for reason, _ in list(self.refused.values())):
            return  # an entry that can be read another time, or by another version, would lose its chunks
        for folder in self._folders.values():
            yield from (name for name in list(folder.sizes) if not self.is_used(name, keep))

    def incomplete(self) -> list[PrefixEntry]:
        """The entries of which a chunk is gone, as last listed."""
        listed = {name for folder in self._folders.values() for name in list(folder.sizes)}
        gone = set(self._references) - listed
        records = list(self.entries.values()) if gone else []
        return [record.entry for record in records if any(chunk.file_name in gone for chunk in record.entry.chunks)]

    def remove_all(self, *, keep_folders: bool = False) -> None:
        """Removes every file and directory of the family, and nothing that has another name.

        The directories, the lock and what describes the family stay with `keep_folders`: a server uses them.
        """
        for name in list(self._names.sizes):
            remove_file(self.path / "entries" / name)
        for key in list(self.entries):
            self.forget(key)
        self.refused.clear()
        self.refresh()
        self.remove_leftovers((), 0.0)
        if keep_folders:
            return
        for name in _FILES:
            remove_file(self.path / name)
        folders = [self.path / "chunks" / name for name in self._folders]
        names = ("chunks", "entries", "pins", "tmp")
        for folder in (*folders, *(self.path / name for name in names), self.path):
            with suppress(OSError):
                folder.rmdir()


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def list_families(root: Path) -> list[Path]:
    """The directories in `root` that have a family's name."""
    names = sorted(name for name in list_names(root) if _FINGERPRINT.fullmatch(name))
    return [root / name for name in names if is_directory(root / name)]
