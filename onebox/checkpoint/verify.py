"""Re-reads a built checkpoint and compares every file, every header field and every tensor with its manifest."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from onebox.checkpoint.bind import Problem, ProblemKind
from onebox.checkpoint.header import TensorEntry, read_header
from onebox.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, read_manifest
from onebox.checkpoint.origin import ORIGIN_NAME
from onebox.checkpoint.source import INDEX_NAME, read_chunks
from onebox.spec.errors import UnreadableError
from onebox.spec.model import read_json

__all__ = ["changed_files", "unproved", "verify_checkpoint"]

_CHUNK_BYTES = 16 << 20
_LENGTH_BYTES = 8
# What a hub and its tools put beside a build; nothing reads them.
_HUB_FILES = {ORIGIN_NAME, ".cache", ".gitattributes", "README.md"}


def verify_checkpoint(directory: Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[Problem]:
    """The differences between `directory` and its manifest; none if every byte that the manifest holds is unchanged.

    `unproved` says what a manifest of an earlier version does not hold.
    """
    manifest = read_manifest(directory)
    entries, problems = _compare_headers(directory, manifest)
    problems += _file_problems(directory, manifest)
    for name, entry in entries.items():
        if _sha256(entry, on_bytes) != manifest.tensors[name].sha256:
            problems.append(_changed(ProblemKind.VALUE, name, f"{name} in {entry.path.name} has changed"))
    return problems


def changed_files(directory: Path, manifest: Manifest) -> list[Problem]:
    """The same without the tensors' values, which takes seconds."""
    return _compare_headers(directory, manifest)[1] + _file_problems(directory, manifest)


def unproved(directory: Path, manifest: Manifest) -> str | None:
    """What in `directory` the manifest says nothing about; None if it covers everything."""
    if manifest.version > 1:
        return None
    held = {MANIFEST_NAME, INDEX_NAME, *_shards(manifest)}
    others = sorted(path.name for path in directory.iterdir() if path.name not in held)
    return (
        "The manifest is of an earlier version, which holds the tensors' bytes alone: the dtypes and shapes in the "
        f"shards' headers and {', '.join(others)} may have changed since the build; build again to have them covered."
    )


def _changed(kind: ProblemKind, name: str, what: str) -> Problem:
    return Problem(kind, name, f"{what} since the build: build again.")


# Shards.


def _compare_headers(directory: Path, manifest: Manifest) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """The tensors whose values can be compared, and the differences between the shards' headers and the manifest."""
    found, problems = _read_headers(directory, _shards(manifest))
    explained = {problem.tensor for problem in problems}
    entries = {}
    for name, record in manifest.tensors.items():
        entry = found.get(name)
        problem = _tensor_problem(name, record, entry)
        if problem is None and entry:
            entries[name] = entry
        elif problem and record.file not in explained:
            problems.append(problem)
    for name, entry in found.items():
        if name not in manifest.tensors:
            message = f"{name} in {entry.path.name} is not in the manifest: build again."
            problems.append(Problem(ProblemKind.UNEXPECTED, name, message))
    explained |= {manifest.tensors[problem.tensor].file for problem in problems if problem.tensor in manifest.tensors}
    explained |= {found[problem.tensor].path.name for problem in problems if problem.tensor in found}
    for name, shard in manifest.shards.items():
        if name not in explained:
            problems += _shard_problems(directory / name, shard)
    return entries, problems


def _shards(manifest: Manifest) -> list[str]:
    return sorted({record.file for record in manifest.tensors.values()})


def _read_headers(directory: Path, names: list[str]) -> tuple[dict[str, TensorEntry], list[Problem]]:
    entries: dict[str, TensorEntry] = {}
    problems = []
    for name in names:
        try:
            for entry in read_header(directory / name):
                first = entries.setdefault(entry.name, entry)
                if first is not entry:
                    message = f"{entry.name} is in both {first.path.name} and {name}: build again."
                    problems.append(Problem(ProblemKind.DUPLICATE, entry.name, message))
        except UnreadableError as error:
            kind = ProblemKind.VALUE if (directory / name).exists() else ProblemKind.MISSING
            problems.append(Problem(kind, name, str(error)))
    return entries, problems


def _tensor_problem(name: str, record: TensorRecord, entry: TensorEntry | None) -> Problem | None:
    if entry is None:
        return Problem(ProblemKind.MISSING, name, f"{name} is in the manifest but in no file: build again.")
    if entry.path.name != record.file:
        message = f"{name} is in {entry.path.name} instead of {record.file}: build again."
        return Problem(ProblemKind.INDEX, name, message)
    declared = (record.dtype or entry.dtype, entry.shape if record.shape is None else record.shape)
    if (entry.dtype, entry.shape) != declared or entry.nbytes != record.nbytes:
        was = f"{declared[0]} {list(declared[1])}, {record.nbytes:,} bytes"
        now = f"{entry.dtype} {list(entry.shape)}, {entry.nbytes:,} bytes"
        message = f"{name} in {record.file} was written as {was} and is declared as {now}: build again."
        return Problem(ProblemKind.MISSHAPEN, name, message)
    return None


def _shard_problems(path: Path, record: FileRecord) -> list[Problem]:
    """A shard's header and size, beyond its tensors' declarations: their order, offsets, metadata, padding."""
    try:
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            header = length + file.read(int.from_bytes(length, "little"))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return [Problem(ProblemKind.MISSING, path.name, f"{path} cannot be read ({error.strerror}): build again.")]
    if (size, hashlib.sha256(header).hexdigest()) == (record.nbytes, record.sha256):
        return []
    return [_changed(ProblemKind.VALUE, path.name, f"The header of {path.name} has changed")]


def _sha256(entry: TensorEntry, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    for chunk in read_chunks(entry, _CHUNK_BYTES):
        digest.update(chunk)
        on_bytes(len(chunk))
    return digest.hexdigest()


# Other files.


def _file_problems(directory: Path, manifest: Manifest) -> list[Problem]:
    known = {MANIFEST_NAME, *manifest.files, *_shards(manifest), *_HUB_FILES}
    problems = [
        Problem(ProblemKind.UNEXPECTED, path.name, f"{path.name} is not in the manifest: remove it.")
        for path in sorted(directory.iterdir())
        if path.name not in known and (manifest.version > 1 or path.suffix == ".safetensors")
    ]
    if manifest.version == 1:
        return problems + list(_index_problems(directory, manifest))
    for name, record in manifest.files.items():
        try:
            content = (directory / name).read_bytes()
        except FileNotFoundError:
            message = f"{name} is in the manifest but not in {directory}: build again."
            problems.append(Problem(ProblemKind.MISSING, name, message))
        except OSError as error:
            problems.append(Problem(ProblemKind.MISSING, name, f"{name} cannot be read ({error.strerror})."))
        else:
            if FileRecord.of(content) != record:
                problems.append(_changed(ProblemKind.VALUE, name, f"{name} has changed"))
    return problems


def _index_problems(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    """Of an earlier manifest: the index can be compared, because the tensors' files are known."""
    files = {name: record.file for name, record in manifest.tensors.items()}
    path = directory / INDEX_NAME
    if not path.exists():
        if len(set(files.values())) > 1:
            yield Problem(ProblemKind.MISSING, INDEX_NAME, f"{INDEX_NAME} is missing: build again.")
    elif _weight_map(path) != files:
        yield _changed(ProblemKind.INDEX, INDEX_NAME, f"{INDEX_NAME} has changed")


def _weight_map(path: Path) -> object:
    try:
        return read_json(path).get("weight_map")
    except UnreadableError:
        return None
