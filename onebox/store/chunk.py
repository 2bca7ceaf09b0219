"""What a file of a prefix is called and what its header says. One block of header, the payload, zeros to a whole block.

    offset  bytes  header, little-endian
    0       8      magic
    8       4      version
    12      4      kind: 1 KV pages, 2 a part of a state, 3 an entry
    16      20     fingerprint of the family
    36      20     key of the prefix
    56      4      count: pages (KV), the number of the part (state), 0 (entry)
    64      8      bytes of the payload
    72      32     sha256 of the payload
    4064    32     sha256 of the 4,064 bytes before it

The header names the family, the kind and the key, so a file under another's name is recognised. Nothing is allocated
or read by what a header says: the reader knows every value but the digest before it opens the file, and of an entry,
whose length it does not know, it reads no more than the file has and an entry may have.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from hashlib import sha256
from pathlib import Path

from onebox.spec.errors import OneboxError
from onebox.store.keys import KEY_BYTES

__all__ = [
    "BLOCK_BYTES",
    "Chunk",
    "ChunkError",
    "ChunkKind",
    "Damage",
    "check_header",
    "claimed_bytes",
    "make_header",
    "stored_bytes",
]

BLOCK_BYTES = 4096
"""Of the header, and what the file's length is a multiple of: what direct reads need on any disk."""
MAGIC = b"oneboxPX"
VERSION = 1
_DIGEST_BYTES = 32
_FIELDS = struct.Struct(f"<8sII{KEY_BYTES}s{KEY_BYTES}sI4xQ{_DIGEST_BYTES}s")
_BODY_BYTES = BLOCK_BYTES - _DIGEST_BYTES


class ChunkKind(IntEnum):
    """What a file holds."""

    KV = 1
    STATE = 2
    ENTRY = 3


_WORDS = {kind: kind.name.lower() for kind in ChunkKind}


class Damage(StrEnum):
    """Why a file was not read. Each makes the request a miss."""

    MISSING = "missing"
    EVICTED = "evicted"
    """Missing because its entry was removed meanwhile: no damage."""
    BUSY = "busy"
    """The system could not open or read it now: too many open files, a server that does not answer."""
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not_a_file"
    TRUNCATED = "truncated"
    TOO_LONG = "too_long"
    HEADER = "header"
    VERSION = "version"
    OTHER_NAME = "other_name"
    """Whole, and another family's, kind's or key's."""
    DIGEST = "digest"
    CONTENT = "content"
    """An entry whose digest is right and whose list of chunks cannot be."""

    @property
    def is_lasting(self) -> bool:
        """Whether the file itself is wrong, so that removing it loses nothing."""
        return self not in (Damage.MISSING, Damage.EVICTED, Damage.BUSY)


_SENTENCES = {
    Damage.MISSING: "is missing",
    Damage.EVICTED: "was removed",
    Damage.BUSY: "cannot be read now",
    Damage.UNREADABLE: "cannot be read",
    Damage.NOT_A_FILE: "is no regular file",
    Damage.TRUNCATED: "is shorter than it was written",
    Damage.TOO_LONG: "is longer than it was written",
    Damage.HEADER: "has a damaged header",
    Damage.VERSION: "was written by another version of onebox",
    Damage.OTHER_NAME: "holds what belongs under another name",
    Damage.DIGEST: "does not match its checksum",
    Damage.CONTENT: "lists chunks that cannot be an entry's",
}


class ChunkError(OneboxError):
    """A file of a prefix that cannot be used: a miss."""

    def __init__(self, reason: Damage, path: Path, detail: str = "") -> None:
        super().__init__(f"{path} {_SENTENCES[reason]}{f' ({detail})' if detail else ''}.")
        self.reason = reason
        self.path = path


@dataclass(frozen=True, slots=True)
class Chunk:
    """One file of a prefix, by what it holds."""

    kind: ChunkKind
    key: bytes
    """Of the prefix up to the chunk's end."""
    count: int
    """Pages (KV), or the number of the part (state)."""
    num_bytes: int
    """Of the payload."""
    first_page: int = 0
    """A KV chunk has the pages from here on; a state's part has none."""

    @property
    def file_name(self) -> str:
        return f"{self.key.hex()}-{_WORDS[self.kind]}{self.count:02d}"

    @property
    def file_bytes(self) -> int:
        return stored_bytes(self.num_bytes)


def stored_bytes(payload_bytes: int) -> int:
    """The length of the file that holds a payload."""
    return BLOCK_BYTES * (1 + -(-payload_bytes // BLOCK_BYTES))


def make_header(fingerprint: bytes, chunk: Chunk, digest: bytes) -> bytes:
    """The first block of a chunk's file; `digest` is the payload's sha256."""
    body = _pack(fingerprint, chunk, digest)
    return body + sha256(body).digest()


def _pack(fingerprint: bytes, chunk: Chunk, digest: bytes) -> bytes:
    fields = (MAGIC, VERSION, chunk.kind, fingerprint, chunk.key, chunk.count, chunk.num_bytes, digest)
    return _FIELDS.pack(*fields).ljust(_BODY_BYTES, b"\0")


def claimed_bytes(header: bytes) -> int:
    """The payload's length as an unchecked header has it."""
    return int(_FIELDS.unpack_from(header)[6])


def check_header(header: bytes, fingerprint: bytes, chunk: Chunk, path: Path) -> bytes:
    """The payload's digest, if this is the header of that chunk."""
    body = header[:_BODY_BYTES]
    if sha256(body).digest() != header[_BODY_BYTES:] or not body.startswith(MAGIC):
        raise ChunkError(Damage.HEADER, path)
    fields = _FIELDS.unpack_from(body)
    digest: bytes = fields[-1]
    if fields[1] != VERSION:
        raise ChunkError(Damage.VERSION, path)
    if body != _pack(fingerprint, chunk, digest):
        raise ChunkError(Damage.OTHER_NAME, path)
    return digest
