"""Opens a checkpoint on the hub: config, index and the headers of its shards, by range. Reads no tensor."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from onebox.checkpoint.header import LENGTH_BYTES, TensorEntry, header_length, parse_header
from onebox.checkpoint.parallel import run_parallel
from onebox.checkpoint.repository import HubId, RemoteFile, RemoteRepository, describe_remote
from onebox.checkpoint.source import INDEX_NAME, Checkpoint, join_shards
from onebox.checkpoint.transfer import Transfer
from onebox.spec.errors import UnreadableError
from onebox.spec.model import spec_from_config

__all__ = ["CONFIG_FILES", "RemoteHeaders", "open_remote"]

CONFIG_FILES = ("config.json", "quantization_config.json", "hf_quant_config.json")
"""Files that describe the weights."""
_MAX_SMALL_BYTES = 256 << 10


class RemoteHeaders:
    """The small files and shard headers of one commit, each read at most once."""

    def __init__(self, repository: RemoteRepository, on_wait: Callable[[str], None] = lambda _: None) -> None:
        self.repository = repository
        self._stop = threading.Event()
        self._transfer = Transfer(repository, self._stop, on_wait)
        self._json: dict[str, dict[str, Any]] = {}
        self._headers: dict[str, list[TensorEntry]] = {}

    @property
    def config(self) -> dict[str, Any]:
        return self._read_json("config.json")

    @property
    def index(self) -> dict[str, str] | None:
        """The index's map from tensor to file, if the repository has one."""
        if INDEX_NAME not in self.repository.files:
            return None
        weight_map = self._read_json(INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UnreadableError(f"{INDEX_NAME} of {self.repository.repo} has no weight_map: name another revision.")
        return weight_map

    @property
    def shards(self) -> list[str]:
        names = sorted(name for name in self.repository.files if name.endswith(".safetensors"))
        if not names:
            raise UnreadableError(
                f"{self.repository.repo} holds no .safetensors file: onebox reads safetensors checkpoints only."
            )
        return names

    def read(self, shards: Iterable[str]) -> dict[str, list[TensorEntry]]:
        """The tensors of each of `shards`, from its header; a path is the shard's name."""
        wanted = sorted(set(shards))
        run_parallel(self._read_header, iter([name for name in wanted if name not in self._headers]), self._stop)
        return {name: self._headers[name] for name in wanted}

    def copy_side_files(self, directory: Path) -> None:
        """Writes the files beside the weights to `directory`; of large ones, such as a tokenizer, an empty object."""
        for name, file in self.repository.files.items():
            if not name.endswith((".safetensors", ".index.json", ".md")):
                is_small = file.nbytes <= _MAX_SMALL_BYTES
                (directory / name).write_bytes(self._transfer.read_whole(file) if is_small else b"{}")

    def _read_header(self, name: str) -> None:
        file, path = self._file(name), Path(name)
        prefix = self._transfer.read(file, 0, min(LENGTH_BYTES, file.nbytes))
        length = header_length(path, prefix, file.nbytes)
        raw = self._transfer.read(file, LENGTH_BYTES, LENGTH_BYTES + length)
        self._headers[name] = parse_header(path, raw, file.nbytes)

    def _read_json(self, name: str) -> dict[str, Any]:
        if name not in self._json:
            try:
                value = json.loads(self._transfer.read_whole(self._file(name)))
            except ValueError as error:
                raise UnreadableError(f"{name} of {self.repository.repo} is not valid JSON ({error}).") from None
            if not isinstance(value, dict):
                raise UnreadableError(f"{name} of {self.repository.repo} is not a JSON object.")
            self._json[name] = value
        return self._json[name]

    def _file(self, name: str) -> RemoteFile:
        try:
            return self.repository.files[name]
        except KeyError:
            raise UnreadableError(
                f"{self.repository.repo} has no {name} in its top directory, so onebox cannot read it."
            ) from None

    def open(
        self,
        directory: Path,
        chosen: dict[str, list[TensorEntry]] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """The checkpoint, as if it lay in `directory`; with `chosen` tensors by shard, these alone."""
        config = dict(self.config)
        side = CONFIG_FILES[1]
        if side in self.repository.files and not isinstance(config.get("quantization_config"), dict):
            config["quantization_config"] = self._read_json(side)
        by_shard = self.read(self.shards) if chosen is None else chosen
        tensors, duplicates = join_shards(by_shard.values())
        index = self.index if chosen is None else {name: entry.path.name for name, entry in tensors.items()}
        shards = tuple(directory / name for name in by_shard)
        return Checkpoint(directory, config, spec_from_config(config, overrides), shards, tensors, duplicates, index)


def open_remote(source: str | HubId, on_wait: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """A checkpoint on the hub, as `open_checkpoint` opens a directory; its tensors can be named but not read."""
    return RemoteHeaders(describe_remote(source), on_wait).open(Path(str(source)))
