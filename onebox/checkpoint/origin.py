"""`onebox_source.json`: which repository, commit and ranges a fetched directory came from; also an open fetch's plan.

    {"repo": "Qwen/...", "commit": "...", "only": ["shared expert"], "is_complete": true,
     "files": {"model-00001-of-00039.safetensors": {"nbytes": ..., "sha256": "...", "tensors":
               {"model.layers.0...weight": {"dtype": "F8_E4M3", "shape": [1024, 3072], "range": [begin, end]}}}}}

A range counts from the start of the hub's file. A file without `tensors` is the whole one.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from onebox.checkpoint.header import TensorEntry, write_header
from onebox.checkpoint.manifest import write_json
from onebox.checkpoint.repository import HubId, RemoteFile
from onebox.spec.errors import UnreadableError
from onebox.spec.model import read_json

__all__ = ["ORIGIN_NAME", "Origin", "SourceFile", "read_origin", "write_origin"]

ORIGIN_NAME = "onebox_source.json"
_VERSION = 1


@dataclass(frozen=True)
class SourceFile:
    """One file of a fetched directory; `tensors`, in the order of the hub's file, are None if it is whole."""

    remote: RemoteFile
    tensors: tuple[TensorEntry, ...] | None = None

    @property
    def name(self) -> str:
        return self.remote.name

    @cached_property
    def header(self) -> bytes:
        """What the local file begins with: a header of the fetched tensors alone."""
        if self.tensors is None:
            return b""
        return write_header([(entry.name, entry.stored, entry.nbytes) for entry in self.tensors], {"format": "pt"})

    @property
    def nbytes(self) -> int:
        """Size of the local file."""
        if self.tensors is None:
            return self.remote.nbytes
        return len(self.header) + self.tensor_bytes

    @property
    def tensor_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors or ())


@dataclass(frozen=True)
class Origin:
    """A commit of a repository and the files, or tensors, of it that a directory holds. `only` is empty for all."""

    hub_id: HubId
    commit: str
    only: tuple[str, ...]
    files: tuple[SourceFile, ...]
    is_complete: bool = False

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def completed(self) -> "Origin":
        return replace(self, is_complete=True)


def read_origin(directory: Path) -> Origin | None:
    """The origin of `directory`, or None if it was not fetched from a hub by onebox."""
    path = directory / ORIGIN_NAME
    if not path.is_file():
        return None
    value = read_json(path)
    try:
        if value["version"] != _VERSION:
            raise UnreadableError(f"{path} has version {value['version']}; this onebox reads {_VERSION}.")
        files = tuple(_file(name, file) for name, file in value["files"].items())
        hub_id = HubId(value["repo"], value["revision"])
        return Origin(hub_id, value["commit"], tuple(value["only"]), files, bool(value["is_complete"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UnreadableError(f"{path} was not written by onebox pull ({error!r}): remove it and pull again.") from None


def write_origin(directory: Path, origin: Origin) -> None:
    """Writes the origin of `directory`, atomically."""
    value = {
        "version": _VERSION,
        "repo": origin.hub_id.repo,
        "revision": origin.hub_id.revision,
        "commit": origin.commit,
        "only": list(origin.only),
        "is_complete": origin.is_complete,
        "files": {file.name: _file_json(file) for file in origin.files},
    }
    write_json(directory / ORIGIN_NAME, value)


def _file_json(file: SourceFile) -> dict[str, Any]:
    remote = _remote_json(file.remote)
    if file.tensors is None:
        return remote
    return {**remote, "tensors": {entry.name: _tensor_json(entry) for entry in file.tensors}}


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    span = [entry.begin, entry.begin + entry.nbytes]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "range": span}


def _remote_json(remote: RemoteFile) -> dict[str, Any]:
    return {key: value for key, value in remote._asdict().items() if key != "name"}


def _file(name: str, value: dict[str, Any]) -> SourceFile:
    if "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name of a file")
    remote = RemoteFile(name, int(value["nbytes"]), value["sha256"], value["blob_id"])
    if "tensors" not in value:
        return SourceFile(remote)
    return SourceFile(remote, tuple(_tensor(name, key, tensor) for key, tensor in value["tensors"].items()))


def _tensor(file: str, name: str, value: dict[str, Any]) -> TensorEntry:
    begin, end = value["range"]
    return TensorEntry(name, value["dtype"], tuple(value["shape"]), Path(file), begin, end - begin)
