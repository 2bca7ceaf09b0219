"""Re-reads a built checkpoint and compares every tensor with the manifest's sha256."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from onebox.checkpoint.bind import Problem, ProblemKind
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.manifest import read_manifest
from onebox.checkpoint.source import open_checkpoint, read_chunks

__all__ = ["verify_checkpoint"]

_CHUNK_BYTES = 16 << 20


def verify_checkpoint(directory: Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[Problem]:
    """The differences between `directory` and its manifest; none if every byte of every tensor is unchanged."""
    manifest = read_manifest(directory)
    checkpoint = open_checkpoint(directory)
    problems = []
    for name, record in manifest.tensors.items():
        entry = checkpoint.tensors.get(name)
        if entry is None:
            problems.append(
                Problem(ProblemKind.MISSING, name, f"{name} is in the manifest but in no file: build again.")
            )
        elif entry.path.name != record.file:
            problems.append(
                Problem(
                    ProblemKind.INDEX, name, f"{name} is in {entry.path.name} instead of {record.file}: build again."
                )
            )
        elif _sha256(entry, on_bytes) != record.sha256:
            problems.append(
                Problem(ProblemKind.VALUE, name, f"{name} in {record.file} has changed since the build: build again.")
            )
    problems += [
        Problem(ProblemKind.UNEXPECTED, name, f"{name} in {entry.path.name} is not in the manifest: remove that file.")
        for name, entry in checkpoint.tensors.items()
        if name not in manifest.tensors
    ]
    return problems


def _sha256(entry: TensorEntry, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    for chunk in read_chunks(entry, _CHUNK_BYTES):
        digest.update(chunk)
        on_bytes(len(chunk))
    return digest.hexdigest()
