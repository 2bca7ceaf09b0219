"""Reads and writes the file of an entry."""

from hashlib import sha256
from pathlib import Path

from onebox.store.chunk import BLOCK_BYTES, Chunk, ChunkError, ChunkKind, Damage, check_header, claimed_bytes
from onebox.store.chunk_file import read_whole, require_length, write_chunk
from onebox.store.entry import MAX_ENTRY_BYTES, PrefixEntry, decode_entry, encode_entry

__all__ = ["read_entry", "write_entry"]


def read_entry(path: Path, fingerprint: bytes, key: bytes) -> tuple[PrefixEntry, float]:
    """The entry in a file and when it was last used (unix seconds). Raises `ChunkError`."""
    data, last_used = read_whole(path, BLOCK_BYTES + MAX_ENTRY_BYTES)
    if len(data) < BLOCK_BYTES:
        raise ChunkError(Damage.TRUNCATED, path)
    header = data[:BLOCK_BYTES]
    chunk = Chunk(ChunkKind.ENTRY, key, 0, claimed_bytes(header))
    digest = check_header(header, fingerprint, chunk, path)
    require_length(path, len(data), chunk.file_bytes)
    payload = data[BLOCK_BYTES : BLOCK_BYTES + chunk.num_bytes]
    if sha256(payload).digest() != digest or data[BLOCK_BYTES + chunk.num_bytes :].strip(b"\0"):
        raise ChunkError(Damage.DIGEST, path)
    return decode_entry(payload, key, path), last_used


def write_entry(descriptor: int, fingerprint: bytes, entry: PrefixEntry) -> None:
    """Writes an entry to an open, empty file, and has the disk confirm it. Raises OSError."""
    payload = encode_entry(entry)
    chunk = Chunk(ChunkKind.ENTRY, entry.key, 0, len(payload))
    write_chunk(descriptor, fingerprint, chunk, [memoryview(payload)])
