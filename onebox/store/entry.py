"""An entry: one prefix that can be restored, as the list of its chunks.

KV pages are cut into runs of 16 that start at multiples of 16, so prefixes with a common beginning share the files of
their whole runs. An entry's file is written after its chunks, in the same form: header, payload, zeros.

    payload, little-endian
    tokens (u64), created (f64, unix seconds), KV chunks (u32), parts of the state (u32)
    then for each chunk, KV first, by depth: key (20), count (u32), payload bytes (u64)
"""

import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onebox.spec.kv import PAGE_TOKENS
from onebox.store.chunk import Chunk, ChunkError, ChunkKind, Damage, stored_bytes
from onebox.store.keys import KEY_BYTES

__all__ = [
    "MAX_ENTRY_BYTES",
    "RUN_PAGES",
    "ChunkLayout",
    "PrefixEntry",
    "decode_entry",
    "encode_entry",
    "new_entry",
    "plan_chunks",
]

RUN_PAGES = 16
MAX_ENTRY_BYTES = 1 << 20
"""Of a payload: 32,000 chunks. A longer file is damaged."""
MAX_PARTS = 10_000
_HEAD = struct.Struct("<QdII")
_CHUNK = struct.Struct(f"<{KEY_BYTES}sIQ")


@dataclass(frozen=True)
class ChunkLayout:
    """The sizes that an engine gives its chunks."""

    page_bytes: int
    """Payload of one page in a KV chunk: all layers with a KV cache."""
    state_bytes: tuple[int, ...]
    """Payload of each part of a state."""

    def __post_init__(self) -> None:
        if self.page_bytes < 1 or not self.state_bytes or min(self.state_bytes) < 1:
            raise ValueError("A page and every part of a state have at least one byte.")
        if len(self.state_bytes) > MAX_PARTS:
            raise ValueError(f"A state has at most {MAX_PARTS:,} parts.")


@dataclass(frozen=True)
class PrefixEntry:
    """A prefix on disk."""

    key: bytes
    num_pages: int
    created: float
    """Unix seconds."""
    chunks: tuple[Chunk, ...]
    """KV chunks by depth, then the parts of the state."""

    @property
    def num_tokens(self) -> int:
        return self.num_pages * PAGE_TOKENS

    @property
    def kv_chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.kind is ChunkKind.KV)

    @property
    def state_chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.kind is ChunkKind.STATE)

    @property
    def num_bytes(self) -> int:
        """Of its payloads: what is read to restore it."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def file_bytes(self) -> int:
        """Of its own file."""
        return stored_bytes(_HEAD.size + len(self.chunks) * _CHUNK.size)


def plan_chunks(keys: Sequence[bytes], layout: ChunkLayout) -> tuple[Chunk, ...]:
    """The chunks of the prefix that ends with the last of its keys (`prefix_keys`)."""
    return tuple(_plan(keys, layout))


def _plan(keys: Sequence[bytes], layout: ChunkLayout) -> Iterator[Chunk]:
    for first in range(0, len(keys), RUN_PAGES):
        count = min(RUN_PAGES, len(keys) - first)
        yield Chunk(ChunkKind.KV, keys[first + count - 1], count, count * layout.page_bytes, first)
    for part, num_bytes in enumerate(layout.state_bytes):
        yield Chunk(ChunkKind.STATE, keys[-1], part, num_bytes)


def new_entry(keys: Sequence[bytes], layout: ChunkLayout) -> PrefixEntry:
    """The entry of the prefix that ends with the last of its keys, created now."""
    return PrefixEntry(keys[-1], len(keys), time.time(), plan_chunks(keys, layout))


def encode_entry(entry: PrefixEntry) -> bytes:
    """The payload of an entry's file."""
    num_kv = len(entry.kv_chunks)
    head = _HEAD.pack(entry.num_tokens, entry.created, num_kv, len(entry.chunks) - num_kv)
    return head + b"".join(_CHUNK.pack(chunk.key, chunk.count, chunk.num_bytes) for chunk in entry.chunks)


def decode_entry(payload: bytes, key: bytes, path: Path) -> PrefixEntry:
    """The entry that a payload describes. Raises `ChunkError` where it cannot be one's."""
    if len(payload) < _HEAD.size or (len(payload) - _HEAD.size) % _CHUNK.size:
        raise ChunkError(Damage.CONTENT, path)
    num_tokens, created, num_kv, num_parts = _HEAD.unpack_from(payload)
    rows = list(_CHUNK.iter_unpack(payload[_HEAD.size :]))
    num_pages = num_tokens // PAGE_TOKENS
    if len(rows) != num_kv + num_parts or num_tokens % PAGE_TOKENS or not num_parts or not created >= 0:
        raise ChunkError(Damage.CONTENT, path)
    first = range(0, num_pages, RUN_PAGES) if num_kv == -(-num_pages // RUN_PAGES) else range(0)
    kv = [
        Chunk(ChunkKind.KV, end, count, num_bytes, page)
        for (end, count, num_bytes), page in zip(rows, first, strict=False)
    ]
    state = [Chunk(ChunkKind.STATE, end, count, num_bytes) for end, count, num_bytes in rows[num_kv:]]
    if not kv or not _is_possible(kv, state, key, num_pages):
        raise ChunkError(Damage.CONTENT, path)
    return PrefixEntry(key, num_pages, created, (*kv, *state))


def _is_possible(kv: Sequence[Chunk], state: Sequence[Chunk], key: bytes, num_pages: int) -> bool:
    counts = [min(RUN_PAGES, num_pages - chunk.first_page) for chunk in kv]
    return (
        [chunk.count for chunk in kv] == counts
        and [chunk.count for chunk in state] == list(range(len(state)))
        and _ends(kv, state) == {key}
        and all(0 < chunk.num_bytes < 1 << 48 for chunk in (*kv, *state))
    )


def _ends(kv: Sequence[Chunk], state: Iterable[Chunk]) -> set[bytes]:
    return {kv[-1].key, *(chunk.key for chunk in state)}
