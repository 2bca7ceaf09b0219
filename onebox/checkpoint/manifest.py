"""The manifest that a build writes next to its shards: recipe, sources, and every tensor's sha256."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError
from onebox.spec.model import read_json

__all__ = ["MANIFEST_NAME", "Manifest", "TensorRecord", "read_manifest", "write_json"]

MANIFEST_NAME = "onebox_manifest.json"
_VERSION = 1


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the output: its file, size, hash, action and origin."""

    file: str
    nbytes: int
    sha256: str
    action: str
    origin: str


@dataclass(frozen=True)
class Manifest:
    """The data that `onebox verify` checks a directory against. `fingerprint` identifies recipe and sources."""

    onebox_version: str
    fingerprint: str
    recipe: dict[str, str]
    sources: dict[str, str]
    tensors: dict[str, TensorRecord]

    def to_json(self) -> dict[str, Any]:
        return {"manifest_version": _VERSION, **asdict(self)}


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`."""
    path = directory / MANIFEST_NAME
    if directory.is_dir() and not path.exists():
        raise UnreadableError(
            f"{directory} has no {MANIFEST_NAME}, so it was not built by onebox: "
            "`onebox inspect --deep` checks such a checkpoint."
        )
    value = read_json(path)
    try:
        if value["manifest_version"] != _VERSION:
            raise UnreadableError(f"{path} has version {value['manifest_version']}; this onebox reads {_VERSION}.")
        tensors = {name: TensorRecord(**record) for name, record in value["tensors"].items()}
        return Manifest(value["onebox_version"], value["fingerprint"], value["recipe"], value["sources"], tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path} is not a manifest of onebox ({error}): build again.") from None


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically: a temporary file, flushed to disk, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
