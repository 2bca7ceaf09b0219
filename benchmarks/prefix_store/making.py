"""Directories of small prefixes whose bytes are known: what is read back is compared with what was written."""

import random
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

from onebox.spec.kv import PAGE_TOKENS
from onebox.store.chunk import Chunk
from onebox.store.chunk_file import aligned_buffer
from onebox.store.directory import PrefixDirectory
from onebox.store.entry import ChunkLayout, PrefixEntry
from onebox.store.keys import prefix_keys

LAYOUT = ChunkLayout(page_bytes=700, state_bytes=(5000, 4096))
PARTS = {"weights": "a", "kv_format": "fp8"}
BUDGET = 1 << 30


def opened(root: Path, budget_bytes: int = BUDGET, parts: dict[str, str] = PARTS) -> PrefixDirectory:
    return PrefixDirectory(root, parts, LAYOUT, budget_bytes)


def tokens_of(seed: int, num_pages: int, shared_pages: int = 0) -> list[int]:
    """Tokens whose first pages are the same for all seeds."""
    common, own = random.Random(0), random.Random(seed + 1)
    shared = [common.randrange(1 << 40) for _ in range(shared_pages * PAGE_TOKENS)]
    return shared + [own.randrange(1 << 40) for _ in range((num_pages - shared_pages) * PAGE_TOKENS)]


@cache
def keys_of(seed: int, num_pages: int, shared_pages: int = 0) -> list[bytes]:
    return prefix_keys(tokens_of(seed, num_pages, shared_pages))


def payload_of(chunk: Chunk) -> bytes:
    """Bytes that follow from the chunk's name alone, as an engine's follow from the tokens."""
    seed = blake2b(chunk.file_name.encode(), digest_size=64).digest()
    return (seed * (chunk.num_bytes // len(seed) + 1))[: chunk.num_bytes]


def store(directory: PrefixDirectory, keys: Sequence[bytes]) -> PrefixEntry:
    with directory.write(keys) as writer:
        for chunk in writer.missing:
            writer.write_chunk(chunk, [memoryview(payload_of(chunk))])
        return writer.commit()


def read_back(directory: PrefixDirectory, entry: PrefixEntry) -> None:
    """Reads every chunk and compares it; raises what the directory raises."""
    with directory.read(entry) as reader:
        for chunk in entry.chunks:
            into = aligned_buffer(chunk.num_bytes)
            reader.read_chunk(chunk, into)
            require(bytes(into) == payload_of(chunk), f"{chunk.file_name} was read with wrong bytes.")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
