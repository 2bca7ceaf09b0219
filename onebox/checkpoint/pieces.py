"""Reads files ahead in pieces, bypassing the page cache, into a ring of buffers.

    pieces   0  1  2  3  4  5 ...        two threads fill buffers in this order
    buffers  a  b  c  d  a  b ...        at most 4 of 32 MiB, pinned if the target is a GPU

Direct reads (O_DIRECT) prevent a checkpoint from filling memory a second time as page cache; on a file system without
them, buffered reads drop their pages afterwards. Handles reads and buffers only; the caller copies the bytes.
"""

import errno
import fcntl
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.checkpoint.header import TensorEntry
from onebox.spec.errors import DoesNotFitError, UnreadableError

__all__ = ["NUM_PIECES", "PIECE_BYTES", "FilePiece", "PieceRing", "Stretch", "plan_pieces"]

PIECE_BYTES = 32 << 20
NUM_PIECES = 4
_NUM_THREADS = 2
# Alignment that direct reads require of offsets, lengths and addresses: covers common disk blocks, and a page.
_ALIGNMENT = 4096
# Gaps up to this size between two stretches are read rather than skipped, which is cheaper.
_GAP_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `offset` .. `offset + nbytes` of a tensor, at position `begin` in its file."""

    entry: TensorEntry
    offset: int
    nbytes: int

    @property
    def begin(self) -> int:
        return self.entry.begin + self.offset

    @property
    def is_last(self) -> bool:
        return self.offset + self.nbytes == self.entry.nbytes


@dataclass(slots=True)
class FilePiece:
    """One read: bytes `begin` (a multiple of the alignment) to `end` of a file, and the stretches in them."""

    path: Path
    begin: int
    end: int
    stretches: list[Stretch] = field(default_factory=list)

    def takes(self, stretch: Stretch, piece_bytes: int) -> bool:
        """Whether `stretch` follows close enough, and fits."""
        gap = stretch.begin - self.end
        fits = stretch.begin + stretch.nbytes - self.begin <= piece_bytes
        return self.path == stretch.entry.path and 0 <= gap <= _GAP_BYTES and fits

    def add(self, stretch: Stretch) -> None:
        self.end = stretch.begin + stretch.nbytes
        self.stretches.append(stretch)


def plan_pieces(groups: Iterable[Sequence[TensorEntry]], piece_bytes: int = PIECE_BYTES) -> Iterator[FilePiece]:
    """The reads for all tensors, group by group; inside a group in file order.

    Neighbouring tensors share a piece, also across groups; a larger tensor is split. `piece_bytes` is a multiple of
    4096. Pieces are planned lazily, so that the first read does not wait for the plan of 100,000 tensors.
    """
    piece: FilePiece | None = None
    for group in groups:
        for entry in sorted(group, key=lambda entry: (str(entry.path), entry.begin)):
            for stretch in _cut(entry, piece_bytes):
                if piece is None or not piece.takes(stretch, piece_bytes):
                    if piece is not None:
                        yield piece
                    begin = stretch.begin // _ALIGNMENT * _ALIGNMENT
                    piece = FilePiece(entry.path, begin, begin)
                piece.add(stretch)
    if piece is not None:
        yield piece


def _cut(entry: TensorEntry, piece_bytes: int) -> Iterable[Stretch]:
    """Splits a tensor into stretches that fit into a piece, which begins at the aligned offset before the stretch."""
    offset = 0
    while offset < entry.nbytes:
        room = piece_bytes - (entry.begin + offset) % _ALIGNMENT
        nbytes = min(room, entry.nbytes - offset)
        yield Stretch(entry, offset, nbytes)
        offset += nbytes


def _aligned_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _File:
    """A file read with O_DIRECT or, where that is not supported, through the page cache with its pages dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_direct = hasattr(os, "O_DIRECT")
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None

    def _open(self) -> int:
        if self._is_direct:
            try:
                return os.open(self._path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
        return os.open(self._path, os.O_RDONLY)

    def fill(self, buffer: memoryview, piece: FilePiece) -> None:
        """Reads `piece` to the start of `buffer`, which has space up to the aligned offset after its end."""
        wanted, done = piece.end - piece.begin, 0
        room = _aligned_up(wanted)
        while done < wanted:
            count = self._read(buffer[done:room], piece.begin + done)
            done += count
            # A direct read ends at an unaligned offset only at the end of the file.
            if done < wanted and (count == 0 or (self._is_direct and done % _ALIGNMENT)):
                name = piece.stretches[0].entry.name
                raise UnreadableError(f"{self._path} ended while {name} was read: the file has changed.")
        if not self._is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, piece.begin, room, os.POSIX_FADV_DONTNEED)

    def _read(self, buffer: memoryview, position: int) -> int:
        was_direct = self._is_direct
        try:
            return os.preadv(self._descriptor, [buffer], position)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise UnreadableError(f"{self._path} cannot be read: {error.strerror}.") from None
        # Some file systems accept the flag and reject the read. The other thread may be here too: the descriptor is
        # changed before `_is_direct`, so that a thread that reads False can rely on it.
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False
        return self._read(buffer, position)

    def close(self) -> None:
        os.close(self._descriptor)


class _Buffer:
    """Memory for one piece, page-aligned, pinned for a GPU; returned to the system when closed and unreferenced."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = device
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Not torch's pinned memory, which is rounded up to a power of two and never returned to the system.
            address = self.tensor.data_ptr()
            code = int(_cuda_runtime().cudaHostRegister(address, nbytes, 0))
            if code:
                raise DoesNotFitError(f"{nbytes >> 20} MiB could not be pinned for reading ahead: CUDA error {code}.")
            # Also if nobody closes it: the addresses of memory that was returned pinned could not be pinned again.
            self._unpin = weakref.finalize(self, _cuda_runtime().cudaHostUnregister, address)
            self._unpin.atexit = False

    def note_copies(self) -> None:
        """Records an event after the copies out of the buffer that were queued on the current stream."""
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait_until_free(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._unpin()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class PieceRing:
    """Pieces in order, read ahead by its own threads into a ring of buffers."""

    def __init__(self, pieces: Iterator[FilePiece], device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._pieces = pieces
        self._files: dict[Path, _File] = {}
        self._buffers: list[_Buffer] = []
        self._reads: deque[tuple[FilePiece, _Buffer, Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="onebox-load")
        try:
            for piece in islice(pieces, NUM_PIECES):
                self._buffers.append(_Buffer(piece_bytes, device))
                self._start(piece, self._buffers[-1])
        except BaseException:
            self.close()
            raise

    def take(self, use: Callable[[FilePiece, Tensor], None]) -> bool:
        """Waits for the next piece and passes it with its bytes to `use`; False after the last.

        `use` may queue copies but must not keep a reference to the bytes: the buffer is reused.
        """
        if not self._reads:
            return False
        piece, buffer, filled = self._reads.popleft()
        filled.result()
        use(piece, buffer.tensor)
        buffer.note_copies()
        for following in islice(self._pieces, 1):
            self._start(following, buffer)
        return True

    def _start(self, piece: FilePiece, buffer: _Buffer) -> None:
        if piece.path not in self._files:
            self._files[piece.path] = _File(piece.path)
        self._reads.append((piece, buffer, self._threads.submit(self._fill, piece, buffer)))

    def _fill(self, piece: FilePiece, buffer: _Buffer) -> None:
        buffer.wait_until_free()
        self._files[piece.path].fill(buffer.bytes, piece)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for buffer in self._buffers:
            buffer.close()
        for file in self._files.values():
            file.close()
        self._reads.clear()
        self._buffers.clear()
