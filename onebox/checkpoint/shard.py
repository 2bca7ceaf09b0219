"""Writes one output shard: header first, then the bytes of every unit, hashed while they are written.

A shard under its final name is complete: it is written as `NAME.tmp`, flushed to disk, then renamed.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from onebox.checkpoint.convert import OutputTensor, Unit
from onebox.checkpoint.header import TensorEntry, write_header
from onebox.checkpoint.manifest import TensorRecord, write_json
from onebox.checkpoint.rounding import TensorChunk
from onebox.checkpoint.source import read_into
from onebox.spec.errors import MismatchError, UnreadableError
from onebox.spec.model import read_json

__all__ = ["Shard", "read_record", "record_name", "split_shards", "write_shard"]

# Small enough that the buffer is still in the CPU cache when it is hashed and written.
_BUFFER_BYTES = 1 << 20
_WRITEBACK_BYTES = 64 << 20
_METADATA = {"format": "pt"}
Digest: TypeAlias = "hashlib._Hash"


@dataclass(frozen=True)
class Shard:
    """One file of the output and its units."""

    name: str
    units: tuple[Unit, ...]

    @property
    def tensors(self) -> list[tuple[Unit, OutputTensor]]:
        return [(unit, tensor) for unit in self.units for tensor in unit.tensors]

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    @cached_property
    def header(self) -> bytes:
        """The first bytes of the file: the length field and the header."""
        return write_header([(tensor.name, tensor.stored, tensor.nbytes) for _, tensor in self.tensors], _METADATA)


def split_shards(units: list[Unit], shard_bytes: int) -> list[Shard]:
    """Splits the units, in order, into shards of at most `shard_bytes`, unless one unit alone is larger."""
    cuts: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if cuts[-1] and size + unit.nbytes > shard_bytes:
            cuts.append([])
            size = 0
        cuts[-1].append(unit)
        size += unit.nbytes
    if len(cuts) == 1:
        return [Shard("model.safetensors", tuple(cuts[0]))]
    return [
        Shard(f"model-{number:05}-of-{len(cuts):05}.safetensors", tuple(cut))
        for number, cut in enumerate(cuts, start=1)
    ]


def record_name(shard: Shard) -> str:
    """The file that holds the hashes of a finished shard until the manifest does."""
    return f"{shard.name}.json"


def read_record(directory: Path, shard: Shard) -> dict[str, TensorRecord] | None:
    """The records of a shard that an earlier run completed, or None if it must be written."""
    path = directory / shard.name
    if not path.exists() or not (directory / record_name(shard)).exists():
        return None
    try:
        saved = read_json(directory / record_name(shard))
    except UnreadableError:
        return None
    if saved.get("file_bytes") != path.stat().st_size:
        return None
    return _records(shard, saved["sha256"])


def _records(shard: Shard, digests: list[str]) -> dict[str, TensorRecord]:
    return {
        tensor.name: TensorRecord(
            shard.name, tensor.nbytes, digest, unit.action.value, unit.origin, tensor.stored.dtype, tensor.stored.shape
        )
        for (unit, tensor), digest in zip(shard.tensors, digests, strict=True)
    }


def write_shard(directory: Path, shard: Shard, on_bytes: Callable[[int], None]) -> dict[str, TensorRecord]:
    """Writes `shard` into `directory` and returns its tensors' records; calls `on_bytes` after each write."""
    header = shard.header
    temporary = directory / f"{shard.name}.tmp"
    try:
        with (
            temporary.open("wb", buffering=0) as file,
            closing(_Writer(file.fileno(), len(header), on_bytes)) as writer,
        ):
            os.pwrite(file.fileno(), header, 0)
            digests = [digest for unit in shard.units for digest in writer.write(unit)]
            writer.finish()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The record is written first: a shard under its final name always has one.
    saved = {"file_bytes": len(header) + shard.nbytes, "sha256": digests}
    write_json(directory / record_name(shard), saved)
    temporary.replace(directory / shard.name)
    return _records(shard, digests)


class _Writer:
    """Writes units back to back. Moved tensors are collected in one small buffer, many per write.

    No operation overlaps within a writer: several shards are written in parallel, each in its own thread, and reading,
    hashing and writing release the GIL.
    """

    def __init__(self, file: int, begin: int, on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._position = begin
        self._on_bytes = on_bytes
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._filled = 0
        self._source: tuple[Path, int] | None = None
        self._unsynced = 0

    def write(self, unit: Unit) -> list[str]:
        """Writes all tensors of `unit` and returns their sha256; the last bytes may stay buffered until `finish`."""
        digests = [hashlib.sha256() for _ in unit.tensors]
        if unit.make:
            self._flush()
            self._make(unit.make, unit, digests)
        else:
            for tensor, digest in zip(unit.tensors, digests, strict=True):
                if tensor.source:
                    self._copy(tensor.source, digest)
        return [digest.hexdigest() for digest in digests]

    def finish(self) -> None:
        """Writes the remaining buffer and closes the source file."""
        self._flush()
        self.close()

    def close(self) -> None:
        if self._source:
            os.close(self._source[1])
            self._source = None

    def _copy(self, entry: TensorEntry, digest: Digest) -> None:
        source, offset = self._open(entry.path), 0
        while offset < entry.nbytes:
            count = min(entry.nbytes - offset, _BUFFER_BYTES - self._filled)
            piece = self._buffer[self._filled : self._filled + count]
            read_into(source, entry, offset, piece)
            digest.update(piece)
            self._filled += count
            offset += count
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        self._put(self._buffer[: self._filled], self._position)
        self._position += self._filled
        self._filled = 0

    def _make(self, make: Callable[[], Iterator[TensorChunk]], unit: Unit, digests: list[Digest]) -> None:
        sizes = [tensor.nbytes for tensor in unit.tensors]
        starts = [self._position + begin for begin in itertools.accumulate(sizes, initial=0)][:-1]
        ends = list(starts)
        for index, piece in make():
            digests[index].update(piece)
            self._put(piece, ends[index])
            ends[index] += len(piece)
        for tensor, start, end in zip(unit.tensors, starts, ends, strict=True):
            if end - start != tensor.nbytes:
                raise MismatchError(f"{tensor.name} has {end - start} bytes instead of the planned {tensor.nbytes}.")
        self._position += unit.nbytes

    def _put(self, data: memoryview, position: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], position + done)
        self._unsynced += len(data)
        if self._unsynced >= _WRITEBACK_BYTES:
            # Starts writing these bytes to disk now instead of at the final fsync, and drops earlier ones from the page
            # cache, so that a build of 70 GB does not fill the memory that the GPU of such a box shares.
            begin = max(0, position - 2 * _WRITEBACK_BYTES)
            os.posix_fadvise(self._file, begin, position - begin, os.POSIX_FADV_DONTNEED)
            self._unsynced = 0
        self._on_bytes(len(data))

    def _open(self, path: Path) -> int:
        """A descriptor of `path`; the last one stays open, because consecutive tensors mostly come from one file."""
        if self._source is None or self._source[0] != path:
            self.close()
            self._source = (path, os.open(path, os.O_RDONLY))
        return self._source[1]
