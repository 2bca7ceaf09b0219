"""Reads a safetensors header strictly: every declaration is checked against the file before it is used.

    +--------------------+----------------------+------------------------------------------+
    | 8 bytes: n, u64 LE | n bytes: JSON header | data: tensors back to back, no gap       |
    +--------------------+----------------------+------------------------------------------+
      {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, "__metadata__": {..}}

Offsets count from the start of the data. Stdlib only: a 120 GB checkpoint's headers are read in seconds, without torch.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError
from onebox.spec.weights import DTYPE_BITS, StoredTensor

__all__ = [
    "LENGTH_BYTES",
    "MAX_HEADER_BYTES",
    "TensorEntry",
    "header_length",
    "parse_header",
    "read_header",
    "write_header",
]

# The safetensors library's own limit; a header of 113,000 tensors takes about 15 MB.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8


_MAX_DIMENSIONS = 64
"""As many as torch has; without a limit, the product of a million sizes takes for ever."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, or a slice of whole rows of one, and its byte range. `begin` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    nbytes: int
    on_host: bool = False
    """Whether it is loaded to host memory, whatever the model's device."""

    @property
    def stored(self) -> StoredTensor:
        return StoredTensor(self.dtype, self.shape)


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors in `path`, in the order of their data. Rejects any deviation from the format."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(path, file.read(LENGTH_BYTES), size)
            raw = file.read(length)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None
    return parse_header(path, raw, size)


def parse_header(path: Path, raw: bytes, size: int) -> list[TensorEntry]:
    """The tensors that the header `raw` of a file of `size` bytes declares. `path` need not be on this machine."""
    header = _parse(path, raw)
    data_begin = LENGTH_BYTES + len(raw)
    entries = [_entry(path, name, value, data_begin) for name, value in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.nbytes))
    _check_coverage(path, entries, data_begin, size)
    return entries


def write_header(tensors: list[tuple[str, StoredTensor, int]], metadata: dict[str, str]) -> bytes:
    """The length field and header of a file with `tensors` (name, declaration, bytes) in this order; 8-byte aligned."""
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, tensor, nbytes in tensors:
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def _broken(path: Path, what: str) -> UnreadableError:
    return UnreadableError(f"{path} is not a whole safetensors file: {what}; download or copy this file again.")


def header_length(path: Path, prefix: bytes, size: int) -> int:
    """The length of a header, from the first bytes of a file of `size` bytes."""
    if len(prefix) < LENGTH_BYTES:
        raise _broken(path, f"it has {size} bytes, fewer than the {LENGTH_BYTES} of its length field")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _broken(path, f"its header claims {length:,} bytes, more than the allowed {MAX_HEADER_BYTES:,}")
    if length > size - LENGTH_BYTES:
        raise _broken(path, f"its header claims {length:,} bytes, past the end of the file ({size:,} bytes)")
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise _broken(path, "its header does not start with '{'")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its __metadata__ is not a map of strings")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(path: Path, name: str, value: Any, data_begin: int) -> TensorEntry:
    if not name.isprintable():
        # It is printed in many places, and a terminal would obey it.
        raise _broken(path, f"the name of tensor {name[:80]!r} has characters that cannot be printed")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"the entry of tensor {name!r} is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _broken(path, f"tensor {name!r} has dtype {dtype!r}, which safetensors does not define")
    if isinstance(shape, list) and len(shape) > _MAX_DIMENSIONS:
        raise _broken(path, f"tensor {name!r} has {len(shape):,} dimensions, more than {_MAX_DIMENSIONS}")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise _broken(path, f"tensor {name!r} has shape {shape!r}, which is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise _broken(path, f"tensor {name!r} has data_offsets {offsets!r}, which is not a pair of offsets")
    begin, end = offsets
    nbytes = _nbytes(path, name, dtype, shape)
    if end - begin != nbytes:
        raise _broken(path, f"tensor {name!r} spans {end - begin:,} bytes where {dtype} {shape} takes {nbytes:,}")
    return TensorEntry(name, dtype, tuple(shape), path, data_begin + begin, nbytes)


def _nbytes(path: Path, name: str, dtype: str, shape: list[int]) -> int:
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    if bits % 8:
        raise _broken(path, f"tensor {name!r} of {dtype} {shape} does not fill whole bytes")
    return bits // 8


def _check_coverage(path: Path, entries: list[TensorEntry], data_begin: int, size: int) -> None:
    """Tensors must cover the data exactly: an overlap or a gap means wrong offsets, an early end missing bytes."""
    end = data_begin
    for entry in entries:
        if entry.begin != end:
            what = "overlaps the tensor before it" if entry.begin < end else "leaves a gap before it"
            raise _broken(path, f"tensor {entry.name!r} {what}")
        end += entry.nbytes
    if end > size:
        raise _broken(path, f"it is truncated: its tensors end at byte {end:,} and the file at {size:,}")
    if end < size:
        raise _broken(path, f"{size - end:,} bytes follow its last tensor")
