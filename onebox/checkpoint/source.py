"""Opens a Hugging Face checkpoint directory (config, every shard's header, index) and reads tensors' bytes.

Handles files and tensor names. Modules are bound in `bind.py`, packed bytes are decoded in `onebox.formats`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onebox.checkpoint.header import TensorEntry, read_header
from onebox.spec.errors import UnreadableError
from onebox.spec.model import ModelSpec, read_json, spec_from_config

__all__ = [
    "INDEX_NAME",
    "Checkpoint",
    "gptq_zeros_offset",
    "join_checkpoints",
    "join_shards",
    "list_shards",
    "open_checkpoint",
    "read_chunks",
    "read_index",
    "read_into",
    "read_tensor",
]

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `tensors` comes from the shards' headers alone; `index` is the index file, unchecked."""

    directory: Path
    config: dict[str, Any]
    spec: ModelSpec
    shards: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    duplicates: dict[str, tuple[str, str]] = field(default_factory=dict)
    index: dict[str, str] | None = None

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The checkpoint's quantization_config: from config.json, else from a separate file."""
        value = self.config.get("quantization_config")
        if isinstance(value, dict):
            return value
        side = self.directory / "quantization_config.json"
        return read_json(side) if side.exists() else None

    @property
    def gptq_zeros_offset(self) -> int:
        """The offset subtracted from each stored GPTQ zero point: 1 in version 1, the usual one, 0 in version 2."""
        return gptq_zeros_offset(self.quantization_config)


def gptq_zeros_offset(quantization_config: Mapping[str, Any] | None) -> int:
    """1, or 0 where the config names GPTQ's version 2."""
    return 0 if (quantization_config or {}).get("checkpoint_format") == "gptq_v2" else 1


def open_checkpoint(directory: Path, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Reads config.json, the index and the header of every *.safetensors file in `directory`. Reads no tensor.

    `overrides` are those of `--hf-overrides`; they change the spec, not `config`.
    """
    shards = list_shards(directory)
    config = read_json(directory / "config.json")
    tensors, duplicates = join_shards(read_header(shard) for shard in shards)
    spec = spec_from_config(config, overrides)
    return Checkpoint(directory, config, spec, shards, tensors, duplicates, read_index(directory))


def join_shards(
    headers: Iterable[list[TensorEntry]],
) -> tuple[dict[str, TensorEntry], dict[str, tuple[str, str]]]:
    """All tensors of the shards' headers by name, and the two files of each that is stored twice."""
    tensors: dict[str, TensorEntry] = {}
    duplicates: dict[str, tuple[str, str]] = {}
    for entry in (entry for header in headers for entry in header):
        first = tensors.setdefault(entry.name, entry)
        if first is not entry:
            duplicates[entry.name] = (first.path.name, entry.path.name)
    return tensors, duplicates


def join_checkpoints(first: Checkpoint, others: Sequence[Checkpoint]) -> Checkpoint:
    """One checkpoint whose tensors lie in several directories; of a tensor that two have, the first one's is taken."""
    if not others:
        return first
    parts = (first, *others)
    tensors = {name: entry for part in reversed(parts) for name, entry in part.tensors.items()}
    shards = tuple(shard for part in parts for shard in part.shards)
    return replace(first, shards=shards, tensors=tensors, index=None)


def list_shards(directory: Path) -> tuple[Path, ...]:
    """The *.safetensors files in `directory`, sorted."""
    try:
        shards = tuple(sorted(path for path in directory.iterdir() if path.name.endswith(".safetensors")))
    except FileNotFoundError:
        raise UnreadableError(f"{directory} does not exist: name a checkpoint directory.") from None
    except NotADirectoryError:
        raise UnreadableError(f"{directory} is a file: name the directory that holds config.json and shards.") from None
    except OSError as error:
        raise UnreadableError(f"{directory} cannot be listed: {error.strerror}.") from None
    if not shards:
        raise UnreadableError(f"{directory} holds no .safetensors file: onebox reads safetensors checkpoints only.")
    return shards


def read_index(directory: Path) -> dict[str, str] | None:
    """The map from tensor to file in the index of `directory`, or None if it has no index."""
    path = directory / INDEX_NAME
    if not path.exists():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise UnreadableError(f"{path} has no weight_map of names to files: download it again.")
    return weight_map


def read_into(file: int, entry: TensorEntry, offset: int, buffer: memoryview) -> None:
    """Fills `buffer` with the bytes of `entry` from `offset` on; `file` is a descriptor of `entry.path`."""
    position, done = entry.begin + offset, 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], position + done)
        if count == 0:
            raise UnreadableError(f"{entry.path} ended while {entry.name} was read: the file has changed.")
        done += count


def read_chunks(entry: TensorEntry, chunk_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor in chunks of at most `chunk_bytes`, each in its own buffer."""
    with entry.path.open("rb", buffering=0) as file:
        for offset in range(0, entry.nbytes, chunk_bytes):
            buffer = memoryview(bytearray(min(chunk_bytes, entry.nbytes - offset)))
            read_into(file.fileno(), entry, offset, buffer)
            yield buffer


def read_tensor(entry: TensorEntry) -> bytearray:
    """All bytes of a tensor."""
    buffer = bytearray(entry.nbytes)
    with entry.path.open("rb", buffering=0) as file:
        read_into(file.fileno(), entry, 0, memoryview(buffer))
    return buffer
