"""Writing one entry: its chunks first, then its own file."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from onebox.store.chunk import Chunk
from onebox.store.chunk_file import write_chunk
from onebox.store.entry import PrefixEntry
from onebox.store.entry_file import write_entry
from onebox.store.family import Family
from onebox.store.files import PendingFile, make_directory
from onebox.store.pause import NotStoredError, WritePause
from onebox.store.room import Room
from onebox.store.tally import StoreTally

__all__ = ["EntryWriter"]


class EntryWriter:
    """An entry that is being written, by several threads at once if need be. Room for it is reserved.

    Every method raises `NotStoredError` alone. Leaving its context without `commit` cancels it.
    """

    def __init__(
        self,
        family: Family,
        room: Room,
        pause: WritePause,
        tally: StoreTally,
        entry: PrefixEntry,
        missing: Sequence[Chunk],
    ) -> None:
        self.entry = entry
        self.missing = tuple(missing)
        """The chunks that are not on disk yet."""
        self._family, self._room, self._pause, self._tally = family, room, pause, tally
        self._lock = threading.Lock()
        self._is_open = True
        self._written: list[Chunk] = []
        self._reserved_bytes = entry.file_bytes + sum(chunk.file_bytes for chunk in missing)
        room.reserve(self._names, self._reserved_bytes)

    @property
    def _names(self) -> list[str]:
        return [chunk.file_name for chunk in self.entry.chunks]

    def write_chunk(self, chunk: Chunk, parts: Sequence[memoryview]) -> None:
        """Writes a chunk whose payload is `parts` in order, `chunk.num_bytes` together; whole or not at all.

        Page-aligned parts of whole blocks (the last may be shorter) are written directly from where they are.
        """
        path = self._family.chunk_path(chunk.file_name)
        with self._pause.guard():
            self._require_open()
            with PendingFile(self._family.path / "tmp") as file:
                write_chunk(file.descriptor, self._family.fingerprint, chunk, parts)
                make_directory(path.parent)
                file.place(path)
        with self._lock:
            self._written.append(chunk)
            if self._is_open and chunk in self.missing:
                self._reserved_bytes -= chunk.file_bytes
                self._room.settle((), chunk.file_bytes)
        self._tally.wrote(chunk.file_bytes)

    def commit(self) -> PrefixEntry:
        """Writes the entry itself: from now on every process finds it."""
        with self._pause.guard():
            self._require_open()
            with PendingFile(self._family.path / "tmp") as file:
                write_entry(file.descriptor, self._family.fingerprint, self.entry)
                with self._room.exclusive():
                    if not all(map(self._family.has_chunk, self.entry.chunks)):
                        raise NotStoredError("lost", "Another process removed a chunk of a prefix before it was whole.")
                    file.place(self._family.entry_path(self.entry.key))
                    self._family.add(self.entry, time.time(), is_checked=True)
                    self._finish()
                    # Another process may have written at the same time.
                    with suppress(NotStoredError, OSError):
                        self._room.follow()
                        self._room.make_room()
        self._tally.stored()
        self._pause.succeed()
        return self.entry

    def cancel(self) -> None:
        """Gives the entry up and removes the chunks that it wrote and nobody else has. A second call does nothing."""
        if not self._finish():
            return
        # Where the lock cannot be had, the chunks stay until they are removed as leftovers.
        with suppress(OSError), self._room.exclusive():
            self._room.follow()
            kept = self._room.kept
            for chunk in self._written:
                if not self._family.is_used(chunk.file_name, kept):
                    self._family.remove_chunk(chunk.file_name)

    def _require_open(self) -> None:
        if not self._is_open:
            raise NotStoredError("closed", "The entry was committed or cancelled before.")

    def _finish(self) -> bool:
        with self._lock:
            was_open, self._is_open = self._is_open, False
            if was_open:
                self._room.settle(self._names, self._reserved_bytes)
            return was_open

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
