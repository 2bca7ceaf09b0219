"""Codes and scales that a calibration found, for a build to write in the place of rounding to nearest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.rounding import TensorChunk
from onebox.checkpoint.source import read_chunks

__all__ = ["Calibration", "calibrated_matrix"]

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Calibration:
    """What a build takes from a calibration. Modules without tensors here are rounded to nearest."""

    inputs: dict[str, str]
    """What determines the result, by name, as in a build's own inputs."""
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    """The tensors of each calibrated module by suffix, by module name, as a build writes them."""
    report: list[dict[str, object]] = field(default_factory=list)
    """What was calibrated in each block, for the manifest."""


def calibrated_matrix(tensors: list[TensorEntry]) -> Iterator[TensorChunk]:
    """The bytes of a module's tensors."""
    for index, entry in enumerate(tensors):
        for chunk in read_chunks(entry, _CHUNK_BYTES):
            yield index, memoryview(chunk)
