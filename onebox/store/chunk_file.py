"""Reads and writes chunk files without copying: payloads go between the disk and the caller's memory.

Page-aligned memory is read and written directly (O_DIRECT), past the page cache; other memory, and file systems without
direct access, through it. `os.preadv`, `os.pwritev` and sha256 release the interpreter lock, so several threads read
several chunks at once.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from onebox.store.chunk import BLOCK_BYTES, Chunk, ChunkError, Damage, check_header, make_header, stored_bytes

__all__ = ["aligned_buffer", "check_chunk", "open_file", "read_chunk", "read_whole", "require_length", "write_chunk"]

_DIRECT = getattr(os, "O_DIRECT", 0)  # absent on macOS
_PIECE_BYTES = 4 << 20
_MAX_PARTS = 512
"""Buffers in one call; the kernel takes 1,024."""
_PASSING = ("EMFILE", "ENFILE", "ENOMEM", "EINTR", "EAGAIN", "ESTALE", "ETIMEDOUT", "EHOSTDOWN", "ENOTCONN")
_DAMAGE = {
    **{getattr(errno, name): Damage.BUSY for name in _PASSING},
    errno.ENOENT: Damage.MISSING,
    errno.ENOTDIR: Damage.MISSING,
    errno.ELOOP: Damage.NOT_A_FILE,
    errno.ENXIO: Damage.NOT_A_FILE,
    errno.EISDIR: Damage.NOT_A_FILE,
}


class _Scratch(threading.local):
    """Two aligned blocks for each thread: a header, and the end of a payload."""

    def __init__(self) -> None:
        blocks = aligned_buffer(2 * BLOCK_BYTES)
        self.header, self.tail = blocks[:BLOCK_BYTES], blocks[BLOCK_BYTES:]


def aligned_buffer(num_bytes: int) -> memoryview:
    """Page-aligned memory, zeroed."""
    return memoryview(mmap.mmap(-1, num_bytes))[:num_bytes]


def read_chunk(path: Path, fingerprint: bytes, chunk: Chunk, into: memoryview) -> None:
    """Reads a chunk's payload into `into`, which has its length, and checks all of the file. Raises `ChunkError`."""
    target = into.cast("B")
    if len(target) != chunk.num_bytes or target.readonly:
        raise ValueError(f"A chunk of {chunk.num_bytes:,} bytes needs a writable buffer of that length.")
    descriptor, num_bytes = open_file(path)
    try:
        require_length(path, num_bytes, chunk.file_bytes)
        header, tail = _SCRATCH.header, _SCRATCH.tail
        whole = len(target) - len(target) % BLOCK_BYTES
        blocks = [header, target[:whole]] if whole else [header]
        _read_all(descriptor, blocks if whole == len(target) else [*blocks, tail], path)
    finally:
        os.close(descriptor)
    digest = check_header(bytes(header), fingerprint, chunk, path)
    if whole < len(target):
        target[whole:] = tail[: len(target) - whole]
        if bytes(tail[len(target) - whole :]).strip(b"\0"):
            raise ChunkError(Damage.DIGEST, path, "after its end")
    if sha256(target).digest() != digest:
        raise ChunkError(Damage.DIGEST, path)


def check_chunk(path: Path, fingerprint: bytes, chunk: Chunk) -> None:
    """Reads a chunk's file piece by piece and checks all of it, as `read_chunk` does. Raises `ChunkError`."""
    descriptor, num_bytes = open_file(path)
    try:
        require_length(path, num_bytes, chunk.file_bytes)
        expected = check_header(os.pread(descriptor, BLOCK_BYTES, 0), fingerprint, chunk, path)
        digest, offset, left = sha256(), BLOCK_BYTES, chunk.num_bytes
        while left:
            piece = os.pread(descriptor, min(_PIECE_BYTES, left), offset)
            if not piece:
                raise ChunkError(Damage.TRUNCATED, path)
            digest.update(piece)
            offset, left = offset + len(piece), left - len(piece)
        if digest.digest() != expected or os.pread(descriptor, BLOCK_BYTES, offset).strip(b"\0"):
            raise ChunkError(Damage.DIGEST, path)
    except OSError as error:
        raise _unreadable(error, path) from None
    finally:
        os.close(descriptor)


def open_file(path: Path) -> tuple[int, int]:
    """A descriptor of a regular file, and its length. Raises `ChunkError`."""
    # A symbolic link is not followed, and a pipe does not block.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise _unreadable(error, path) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ChunkError(Damage.NOT_A_FILE, path)
    return descriptor, found.st_size


def require_length(path: Path, num_bytes: int, expected_bytes: int) -> None:
    """Raises `ChunkError` where a file is shorter or longer than it was written."""
    if num_bytes != expected_bytes:
        raise ChunkError(Damage.TRUNCATED if num_bytes < expected_bytes else Damage.TOO_LONG, path)


def write_chunk(descriptor: int, fingerprint: bytes, chunk: Chunk, parts: Sequence[memoryview]) -> None:
    """Writes a chunk's file whose payload is `parts` in order, and has the disk confirm it. Raises OSError."""
    views = [part.cast("B") for part in parts if part.nbytes]
    if sum(map(len, views)) != chunk.num_bytes:
        raise ValueError(f"A chunk of {chunk.num_bytes:,} bytes was given {sum(map(len, views)):,}.")
    digest = sha256()
    for view in views:
        digest.update(view)
    header, tail = _SCRATCH.header, _SCRATCH.tail
    header[:] = make_header(fingerprint, chunk, digest.digest())
    rest = chunk.num_bytes % BLOCK_BYTES
    if rest and len(views[-1]) >= rest:
        # The last block is written from here, padded; the caller's memory ends where the payload does.
        tail[:rest], tail[rest:] = views[-1][-rest:], bytes(BLOCK_BYTES - rest)
        views[-1] = views[-1][:-rest]
        views.append(tail)
    elif rest:
        views.append(memoryview(bytes(BLOCK_BYTES - rest)))
    _write_all(descriptor, [header, *(view for view in views if len(view))])
    os.fsync(descriptor)
    with suppress(OSError, AttributeError):  # absent on macOS
        os.posix_fadvise(descriptor, 0, stored_bytes(chunk.num_bytes), os.POSIX_FADV_DONTNEED)


def read_whole(path: Path, max_bytes: int) -> tuple[bytes, float]:
    """A small file's bytes and its time of change (unix seconds). Raises `ChunkError`, also where it is longer."""
    descriptor, num_bytes = open_file(path)
    try:
        if num_bytes > max_bytes:
            raise ChunkError(Damage.TOO_LONG, path)
        return os.pread(descriptor, num_bytes, 0), os.fstat(descriptor).st_mtime
    except OSError as error:
        raise _unreadable(error, path) from None
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, blocks: list[memoryview], path: Path) -> None:
    try:
        if _move_all(os.preadv, descriptor, blocks):
            raise ChunkError(Damage.TRUNCATED, path)
    except OSError as error:
        raise _unreadable(error, path) from None


def _write_all(descriptor: int, blocks: list[memoryview]) -> None:
    if _move_all(os.pwritev, descriptor, blocks):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _move_all(move: Callable[[int, list[memoryview], int], int], descriptor: int, blocks: list[memoryview]) -> int:
    """Reads or writes whole buffers from offset 0, directly where that works; returns the bytes that are left."""
    is_direct = all(map(_is_aligned, blocks)) and _set_direct(descriptor, True)
    left, offset = sum(map(len, blocks)), 0
    while left:
        try:
            moved = move(descriptor, blocks[:_MAX_PARTS], offset)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            is_direct = _set_direct(descriptor, False)  # refused by this file system after all
            continue
        if not moved:
            break
        if is_direct and moved % BLOCK_BYTES:
            is_direct = _set_direct(descriptor, False)  # the rest is no longer aligned
        left, offset = left - moved, offset + moved
        blocks = _without(blocks, moved)
    return left


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Switches direct access; returns whether it is on."""
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
    except OSError:
        return False
    return wanted and _DIRECT != 0


def _is_aligned(view: memoryview) -> bool:
    """Whether a buffer's address and length are whole blocks. A read-only one has no address to ask for."""
    if view.readonly or len(view) % BLOCK_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK_BYTES == 0


def _without(blocks: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the buffers after their first `num_bytes`."""
    for index, block in enumerate(blocks):
        if num_bytes < len(block):
            return [block[num_bytes:], *blocks[index + 1 :]]
        num_bytes -= len(block)
    return []


def _unreadable(error: OSError, path: Path) -> ChunkError:
    return ChunkError(_DAMAGE.get(error.errno or 0, Damage.UNREADABLE), path, error.strerror or "")


_SCRATCH = _Scratch()
