"""Writes one output shard: header first, then every unit's bytes streamed behind it, hashed on the way.

Under its final name a shard is whole: it is written as `NAME.tmp`, flushed to disk, and renamed last.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from onebox.checkpoint.convert import OutputTensor, Piece, Unit
from onebox.checkpoint.header import TensorEntry, write_header
from onebox.checkpoint.manifest import TensorRecord, write_json
from onebox.checkpoint.source import read_into
from onebox.spec.errors import MismatchError
from onebox.spec.model import read_json

__all__ = ["Shard", "read_record", "split_shards", "write_shard"]

_BUFFER_BYTES = 8 << 20
_BUFFERS = 4
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Shard:
    """One file of the output and the units that go into it."""

    name: str
    units: tuple[Unit, ...]

    @property
    def tensors(self) -> list[tuple[Unit, OutputTensor]]:
        return [(unit, tensor) for unit in self.units for tensor in unit.tensors]

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)


def split_shards(units: list[Unit], shard_bytes: int) -> list[Shard]:
    """Cuts the units, in order, into shards of at most `shard_bytes`, unless one unit alone is larger."""
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


def _record_path(directory: Path, shard: Shard) -> Path:
    return directory / f"{shard.name}.json"


def read_record(directory: Path, shard: Shard) -> dict[str, TensorRecord] | None:
    """The tensors of a shard that an earlier run finished, or None if it must be written."""
    path = directory / shard.name
    if not path.exists() or not _record_path(directory, shard).exists():
        return None
    saved = read_json(_record_path(directory, shard))
    if saved.get("file_bytes") != path.stat().st_size:
        return None
    return {name: TensorRecord(**record) for name, record in saved["tensors"].items()}


def write_shard(directory: Path, shard: Shard, on_bytes: Callable[[int], None]) -> dict[str, TensorRecord]:
    """Writes `shard` into `directory` and returns its tensors' records; `on_bytes` hears of each piece written."""
    header = write_header([(tensor.name, tensor.stored, tensor.nbytes) for _, tensor in shard.tensors], _METADATA)
    temporary = directory / f"{shard.name}.tmp"
    try:
        with temporary.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
            writer = _Writer(file.fileno(), len(header), hasher, on_bytes)
            os.pwrite(file.fileno(), header, 0)
            digests = [digest for unit in shard.units for digest in writer.write(unit)]
            os.fsync(file.fileno())
            # Written pages would otherwise push the model that is being served out of the page cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    records = {
        tensor.name: TensorRecord(shard.name, tensor.nbytes, digest, unit.action.value, unit.origin)
        for (unit, tensor), digest in zip(shard.tensors, digests, strict=True)
    }
    # The record goes first: a shard under its final name always has one.
    saved = {"file_bytes": len(header) + shard.nbytes, "tensors": {n: asdict(r) for n, r in records.items()}}
    write_json(_record_path(directory, shard), saved)
    temporary.replace(directory / shard.name)
    return records


class _Writer:
    """Writes units one behind the other. Hashing runs in a thread of its own beside reading and writing."""

    def __init__(self, file: int, begin: int, hasher: ThreadPoolExecutor, on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._position = begin
        self._hasher = hasher
        self._on_bytes = on_bytes
        self._buffers = [memoryview(bytearray(_BUFFER_BYTES)) for _ in range(_BUFFERS)]
        self._busy: list[Future[None] | None] = [None] * _BUFFERS
        self._turn = 0

    def write(self, unit: Unit) -> list[str]:
        """Writes all tensors of `unit`; returns their sha256 in hexadecimal."""
        hashes = [hashlib.sha256() for _ in unit.tensors]
        last = self._make(unit.make, unit, hashes) if unit.make else self._move(unit, hashes)
        self._position += unit.nbytes
        if last:
            last.result()
        return [value.hexdigest() for value in hashes]

    def _move(self, unit: Unit, hashes: list["hashlib._Hash"]) -> Future[None] | None:
        position, last = self._position, None
        for tensor, digest in zip(unit.tensors, hashes, strict=True):
            if tensor.source:
                last = self._copy(tensor.source, position, digest) or last
            position += tensor.nbytes
        return last

    def _copy(self, entry: TensorEntry, position: int, digest: "hashlib._Hash") -> Future[None] | None:
        last = None
        with _opened(entry.path) as source:
            for offset in range(0, entry.nbytes, _BUFFER_BYTES):
                buffer = self._free_buffer()[: min(_BUFFER_BYTES, entry.nbytes - offset)]
                read_into(source, entry, offset, buffer)
                last = self._busy[self._turn] = self._hasher.submit(digest.update, buffer)
                self._put(buffer, position + offset)
        return last

    def _free_buffer(self) -> memoryview:
        """The next buffer in turn, once its hash is done."""
        self._turn = (self._turn + 1) % _BUFFERS
        pending = self._busy[self._turn]
        if pending:
            pending.result()
        return self._buffers[self._turn]

    def _make(
        self, make: Callable[[], Iterator[Piece]], unit: Unit, hashes: list["hashlib._Hash"]
    ) -> Future[None] | None:
        sizes = [tensor.nbytes for tensor in unit.tensors]
        starts = [self._position + begin for begin in itertools.accumulate(sizes, initial=0)][:-1]
        ends, last = list(starts), None
        for index, piece in make():
            last = self._hasher.submit(hashes[index].update, piece)
            self._put(piece, ends[index])
            ends[index] += len(piece)
        for tensor, start, end in zip(unit.tensors, starts, ends, strict=True):
            if end - start != tensor.nbytes:
                raise MismatchError(
                    f"{tensor.name} came out with {end - start} bytes where {tensor.nbytes} were planned."
                )
        return last

    def _put(self, data: memoryview, position: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], position + done)
        self._on_bytes(len(data))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
