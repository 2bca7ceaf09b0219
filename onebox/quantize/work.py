"""The directory in which a calibration keeps its finished blocks, so that it can go on after being killed anywhere.

OUT.calibration/onebox_build.json     what the calibration is made of
                block-003.safetensors codes and scales of the fourth block's calibrated modules, as a build writes them
                block-003.json        its report, written last: the block is finished
                streams-004.bin       both streams behind it, float32; the next block's are written before these go
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from onebox.checkpoint.header import TensorEntry, read_header, write_header
from onebox.checkpoint.inputs import difference
from onebox.checkpoint.manifest import write_json
from onebox.checkpoint.output import discard, is_empty, read_marker, sync_directory, write_marker
from onebox.checkpoint.tensors import dtype_name, to_bytes
from onebox.quantize.block_tuning import BlockReport, Streams
from onebox.quantize.sign_round import MatrixTensors
from onebox.spec.errors import UnreadableError, WriteError
from onebox.spec.model import read_json
from onebox.spec.weights import StoredTensor

__all__ = ["CalibrationWork"]


class CalibrationWork:
    """The unfinished calibration of `out`."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(out.name + ".calibration")

    def open(self, inputs: dict[str, str], *, restart: bool) -> None:
        """Makes this the directory of a calibration of `inputs`, new or from an interrupted run."""
        if self.path.exists():
            marker = read_marker(self.path)
            if restart or marker == {}:
                discard(self.path)
            elif marker != inputs and not is_empty(self.path):
                other = difference(marker, inputs) if marker else ""
                raise WriteError(
                    f"{self.path} holds an unfinished calibration of something else"
                    f"{f' (this one has {other})' if other else ''}: finish that one, or pass --restart to discard it."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_marker(self.path, inputs)

    def remove(self) -> None:
        """Removes the directory if it is a calibration's."""
        if self.path.exists() and read_marker(self.path) is not None:
            shutil.rmtree(self.path)

    @property
    def num_done(self) -> int:
        """The number of finished blocks."""
        number = 0
        while self._report_path(number).exists():
            number += 1
        return number

    def finish_block(
        self, number: int, found: Mapping[str, MatrixTensors], report: BlockReport, behind: Streams | None
    ) -> None:
        """Keeps a block's result and the streams behind it; None behind the last block."""
        _write_tensors(self._codes_path(number), found)
        if behind is not None:
            _write_parts(self._streams_path(number + 1), [to_bytes(behind.source), to_bytes(behind.built)])
        write_json(self._report_path(number), asdict(report))
        self._streams_path(number).unlink(missing_ok=True)
        sync_directory(self.path)

    def load_streams(self, number: int, shape: tuple[int, ...]) -> Streams:
        """The streams before block `number`, each of this shape."""
        path, parts = self._streams_path(number), [torch.empty(shape), torch.empty(shape)]
        try:
            with path.open("rb") as file:
                read = [file.readinto(to_bytes(part)) for part in parts]
                if read != [4 * part.numel() for part in parts] or file.read(1):
                    raise UnreadableError(f"{path} does not hold the streams of this calibration: pass --restart.")
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read ({error.strerror}): pass --restart.") from None
        return Streams(*parts)

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all finished blocks."""
        return [read_json(self._report_path(number)) for number in range(self.num_done)]

    def tensors(self) -> dict[str, dict[str, TensorEntry]]:
        """The calibrated modules' tensors by suffix, by module name."""
        found: dict[str, dict[str, TensorEntry]] = {}
        for number in range(self.num_done):
            for entry in read_header(self._codes_path(number)):
                module, _, suffix = entry.name.rpartition(".")
                found.setdefault(module, {})[suffix] = entry
        return found

    def _report_path(self, number: int) -> Path:
        return self.path / f"block-{number:03}.json"

    def _codes_path(self, number: int) -> Path:
        return self.path / f"block-{number:03}.safetensors"

    def _streams_path(self, number: int) -> Path:
        return self.path / f"streams-{number:03}.bin"


def _write_tensors(path: Path, found: Mapping[str, MatrixTensors]) -> None:
    tensors = {f"{module}.{suffix}": tensor for module, matrix in found.items() for suffix, tensor in matrix.items()}
    declared = [
        (name, StoredTensor(dtype_name(tensor.dtype), tuple(tensor.shape)), tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    ]
    _write_parts(path, [write_header(declared, {"format": "pt"}), *map(to_bytes, tensors.values())])


def _write_parts(path: Path, parts: list[bytes | memoryview]) -> None:
    """Writes a file atomically: a temporary file, flushed to disk, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
