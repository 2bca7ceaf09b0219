"""Reading one entry."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from onebox.store.chunk import Chunk, ChunkError
from onebox.store.chunk_file import read_chunk
from onebox.store.entry import PrefixEntry
from onebox.store.family import Family

__all__ = ["EntryReader"]


class EntryReader:
    """Reads an entry's chunks, by several threads at once; until it is closed this process does not evict the entry."""

    def __init__(
        self,
        family: Family,
        entry: PrefixEntry,
        on_read: Callable[[int], None],
        on_damage: Callable[[PrefixEntry, Chunk, ChunkError], ChunkError],
        on_close: Callable[[], None],
    ) -> None:
        self.entry = entry
        self._family = family
        self._on_read = on_read
        self._on_damage = on_damage
        self._on_close = on_close
        self._is_open = True

    def read_chunk(self, chunk: Chunk, into: memoryview) -> None:
        """Fills `into` (`chunk.num_bytes` bytes, page-aligned for a direct read) with a chunk's payload, checked.

        Raises `ChunkError`, and the entry is no longer found; `into` then holds anything.
        """
        try:
            read_chunk(self._family.chunk_path(chunk.file_name), self._family.fingerprint, chunk, into)
        except ChunkError as error:
            raise self._on_damage(self.entry, chunk, error) from None
        self._on_read(chunk.num_bytes)

    def close(self) -> None:
        """Ends reading. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
