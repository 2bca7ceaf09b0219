"""The manifest that a build writes next to its shards: recipe, inputs, and every file and tensor of the output.

Version 1, of earlier builds, holds the tensors' bytes alone; `onebox verify` says what it cannot prove.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError
from onebox.spec.model import read_json

__all__ = [
    "MANIFEST_NAME",
    "FileRecord",
    "Manifest",
    "TensorRecord",
    "json_bytes",
    "read_manifest",
    "write_bytes",
    "write_json",
]

MANIFEST_NAME = "onebox_manifest.json"
_VERSION = 2


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the output: its file, size, hash, action and origin; its declaration since version 2."""

    file: str
    nbytes: int
    sha256: str
    action: str
    origin: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class FileRecord:
    """One file of the output: its size, and the sha256 of its bytes, or of a shard's header and length field."""

    nbytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> "FileRecord":
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The data that `onebox verify` checks a directory against. `fingerprint` identifies recipe and sources."""

    onebox_version: str
    fingerprint: str
    recipe: dict[str, str]
    sources: dict[str, str]
    tensors: dict[str, TensorRecord]
    inputs: dict[str, str] = field(default_factory=dict)
    """What the build was made of, one digest each (`inputs.py`)."""
    shards: dict[str, FileRecord] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    """Every other file but the manifest."""
    calibration: list[dict[str, Any]] = field(default_factory=list)
    """What `onebox quantize` tuned in each block; absent from the file if nothing was."""
    version: int = _VERSION

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        if not self.calibration:
            del value["calibration"]
        return _sealed({"manifest_version": value.pop("version"), **value})


def _sealed(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with the sha256 of itself."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return {**value, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`."""
    path = directory / MANIFEST_NAME
    if directory.is_dir() and not path.exists():
        raise UnreadableError(
            f"{directory} has no {MANIFEST_NAME}, so it was not built by onebox: "
            "`onebox inspect --deep` checks such a checkpoint."
        )
    value = read_json(path)
    version = value.pop("manifest_version", None)
    if version not in (1, _VERSION):
        raise UnreadableError(f"{path} has version {version}; this onebox reads 1 and {_VERSION}.")
    if version == _VERSION:
        seal = value.pop("sha256", None)
        if _sealed({"manifest_version": version, **value})["sha256"] != seal:
            raise UnreadableError(f"{path} has been edited or damaged since the build: build again.")
    try:
        return Manifest(
            **{
                **value,
                "tensors": {name: _tensor_record(record) for name, record in value["tensors"].items()},
                "shards": {name: FileRecord(**record) for name, record in value.get("shards", {}).items()},
                "files": {name: FileRecord(**record) for name, record in value.get("files", {}).items()},
            },
            version=version,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path} is not a manifest of onebox ({error}): build again.") from None


def _tensor_record(value: dict[str, Any]) -> TensorRecord:
    shape = value.get("shape")
    return TensorRecord(**{**value, "shape": None if shape is None else tuple(shape)})


def json_bytes(value: Any) -> bytes:
    """The text of a JSON file."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically."""
    write_bytes(path, json_bytes(value))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically: a temporary file, flushed to disk, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
