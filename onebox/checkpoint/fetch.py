"""Fetches a checkpoint, or the tensors of it that are needed, from the hub: plan, read by range, verify, resume.

A plan is written to the directory before the first byte (`origin.py`), so a second run goes on from what is there
without planning again. Large files arrive as parts (`part.py`); a file under its final name is complete: a whole file
has the hub's hash, a shard of chosen tensors has all of their ranges.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from onebox.checkpoint.disk import require_disk
from onebox.checkpoint.header import TensorEntry, read_header
from onebox.checkpoint.hub_errors import write_error
from onebox.checkpoint.manifest import write_json
from onebox.checkpoint.origin import Origin, SourceFile, read_origin, write_origin
from onebox.checkpoint.parallel import run_parallel
from onebox.checkpoint.part import PartFile, gaps
from onebox.checkpoint.partial import sample_norms, tensors_of
from onebox.checkpoint.remote import CONFIG_FILES, RemoteHeaders
from onebox.checkpoint.repository import HubId, RemoteFile, RemoteRepository, describe_remote, endpoint_url
from onebox.checkpoint.source import INDEX_NAME, Checkpoint
from onebox.checkpoint.transfer import Transfer
from onebox.spec.errors import UnreadableError, UsageError, WriteError
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass

__all__ = ["FetchPlan", "foresee_checkpoint", "plan_tensors", "plan_whole", "run_fetch"]

REQUEST_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_MARGIN_BYTES = 256 << 20


@dataclass(frozen=True)
class FetchPlan:
    """What a fetch will put into `directory`."""

    origin: Origin
    directory: Path

    @property
    def nbytes(self) -> int:
        """Size of the directory when it is complete."""
        return self.origin.nbytes

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not arrived."""
        return 0 if self.is_complete else sum(_missing_bytes(self.directory, file) for file in self.origin.files)

    @property
    def is_complete(self) -> bool:
        return self.origin.is_complete

    @property
    def repo(self) -> str:
        return str(self.origin.hub_id)

    @property
    def commit(self) -> str:
        return self.origin.commit

    @property
    def repository(self) -> RemoteRepository:
        """The files on the hub that are fetched, or parts of which are."""
        files = {file.name: file.remote for file in self.origin.files}
        return RemoteRepository(endpoint_url(), self.origin.hub_id.repo, self.origin.commit, files)


def plan_whole(source: str | HubId, directory: Path) -> FetchPlan:
    """Plans to fetch all files of a checkpoint. Asks the hub only if no earlier run has."""
    hub_id = HubId.checked(source)
    known = _known(hub_id, directory, ())
    if known:
        return known
    repository = describe_remote(hub_id)
    if not any(name.endswith(".safetensors") for name in repository.files):
        raise UnreadableError(f"{hub_id} holds no .safetensors file: onebox reads safetensors checkpoints only.")
    files = tuple(SourceFile(file) for file in repository.files.values())
    return FetchPlan(Origin(hub_id, repository.commit, (), files), directory)


def plan_tensors(source: str | HubId, classes: Iterable[ModuleClass], directory: Path) -> FetchPlan:
    """Plans to fetch the tensors of `classes` and the files that describe them. Reads headers, once.

    With the embedding, as for the base of a build, come the files that a build copies: tokenizer, templates, licence.
    """
    hub_id, wanted = HubId.checked(source), frozenset(classes)
    only = tuple(sorted(kind.value for kind in wanted))
    known = _known(hub_id, directory, only)
    if known:
        return known
    headers = RemoteHeaders(describe_remote(hub_id))
    spec = spec_from_config(headers.config)
    index = headers.index or {}
    # A shard that the index does not name may hold anything; one that it names holds what it says.
    unindexed = headers.read(name for name in headers.shards if name not in set(index.values()))
    names = {*index, *(entry.name for entries in unindexed.values() for entry in entries)}
    used = tensors_of(spec, names, wanted)
    if not used:
        raise UnreadableError(f"{hub_id} holds no tensor of: {', '.join(only)}.")
    chosen = used | sample_norms(spec, names)
    read = headers.read({*unindexed, *(file for name, file in index.items() if name in chosen)})
    files = [SourceFile(file) for file in headers.repository.files.values() if _is_described_by(file, wanted)]
    for shard, entries in read.items():
        taken = tuple(entry for entry in entries if entry.name in chosen)
        if taken:
            files.append(SourceFile(headers.repository.files[shard], taken))
    _check_all_found(hub_id, chosen, files)
    return FetchPlan(Origin(hub_id, headers.repository.commit, only, tuple(files)), directory)


def _is_described_by(file: RemoteFile, wanted: frozenset[ModuleClass]) -> bool:
    """Whether a file that holds no weights comes with the tensors of `wanted`."""
    is_side_file = not file.name.endswith((".safetensors", ".index.json"))
    return file.name in CONFIG_FILES or (is_side_file and ModuleClass.EMBEDDING in wanted)


def foresee_checkpoint(plan: FetchPlan) -> Checkpoint:
    """The checkpoint as it will lie in the plan's directory, before it is fetched; its tensors cannot be read."""
    chosen = {file.name: list(file.tensors) for file in plan.origin.files if file.tensors is not None}
    return RemoteHeaders(plan.repository).open(plan.directory, chosen or None)


def _known(hub_id: HubId, directory: Path, only: tuple[str, ...]) -> FetchPlan | None:
    """The plan of an earlier run into `directory`. Refuses a directory that holds something else."""
    origin = read_origin(directory)
    if origin is None:
        return None
    if (origin.hub_id, origin.only) != (hub_id, only):
        only_text = f" (only {', '.join(origin.only)})" if origin.only else ""
        raise UsageError(
            f"{directory} holds {origin.hub_id}{only_text}, not what is asked for: name another directory or remove it."
        )
    return FetchPlan(origin, directory)


def _check_all_found(hub_id: HubId, chosen: set[str], files: list[SourceFile]) -> None:
    lost = chosen - {entry.name for file in files for entry in file.tensors or ()}
    if lost:
        raise UnreadableError(
            f"{min(lost)} is listed by {INDEX_NAME} of {hub_id} and is not in the file it names: try another revision."
        )


def _missing_bytes(directory: Path, file: SourceFile) -> int:
    """What has not arrived, by the sizes and the journal alone."""
    path = directory / file.name
    if path.is_file() and path.stat().st_size == file.nbytes:
        return 0
    try:
        lines = path.with_name(f"{path.name}.part.journal").read_text(encoding="utf-8").splitlines()[1:]
        return max(0, file.nbytes - sum(int(line.split()[1]) for line in lines if len(line.split()) == 3))
    except (OSError, ValueError):
        return file.nbytes


def run_fetch(
    plan: FetchPlan, on_bytes: Callable[[int], None] = lambda _: None, on_wait: Callable[[str], None] = lambda _: None
) -> Path:
    """Fetches what is missing and returns the directory. `on_bytes` gets all bytes, those already here first.

    `on_wait` gets a sentence when a request is sent again after a pause. Both are called from several threads.
    """
    if plan.is_complete:
        _check_still_there(plan)
        on_bytes(plan.nbytes)
        return plan.directory
    require_disk(f"The rest of {plan.origin.hub_id}", plan.directory, plan.missing_bytes + _MARGIN_BYTES)
    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
        with _locked(plan.directory):
            _Fetch(plan, on_bytes, on_wait).run()
    except OSError as error:
        raise write_error(error, plan.directory) from error
    return plan.directory


def _check_still_there(plan: FetchPlan) -> None:
    for file in plan.origin.files:
        path = plan.directory / file.name
        if not path.is_file() or path.stat().st_size != file.nbytes:
            raise UnreadableError(
                f"{path} was fetched and has been removed or changed since: remove {plan.directory} and fetch it again."
            )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds `directory` for this process."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WriteError(f"Another onebox is writing to {directory}: wait for it, or stop it.") from None
        yield
    finally:
        os.close(descriptor)


class _Job(NamedTuple):
    """Bytes [begin, end) of a part, which are the remote file's from `remote_begin` on."""

    file: SourceFile
    part: PartFile
    begin: int
    end: int
    remote_begin: int


class _Fetch:
    """One run of a plan."""

    def __init__(self, plan: FetchPlan, on_bytes: Callable[[int], None], on_wait: Callable[[str], None]) -> None:
        self._plan, self._on_bytes = plan, on_bytes
        self._directory = plan.directory
        self._stop = threading.Event()
        self._transfer = Transfer(plan.repository, self._stop, on_wait)
        self._lock = threading.Lock()
        self._jobs_left: dict[str, int] = {}
        self._parts: list[PartFile] = []

    def run(self) -> None:
        write_origin(self._directory, self._plan.origin)
        try:
            run_parallel(self._do, self._jobs(), self._stop)
        finally:
            for part in self._parts:
                part.close()
        self._write_index()
        write_origin(self._directory, self._plan.origin.completed())

    def _jobs(self) -> Iterator[_Job | SourceFile]:
        """What is left to do: small files as a whole, the missing stretches of the others."""
        for file in self._plan.origin.files:
            path = self._directory / file.name
            if path.exists() and self._is_complete(file, path):
                self._on_bytes(file.nbytes)
            elif file.remote.sha256 is None:
                yield file
            else:
                yield from self._part_jobs(file, path)

    def _is_complete(self, file: SourceFile, path: Path) -> bool:
        """Whether a file under its final name is the one that is wanted; it is not overwritten if it is not."""
        if file.tensors is None:
            is_same = path.stat().st_size == file.nbytes and _has_hash(file.remote, _read(path))
        else:
            is_same = path.stat().st_size == file.nbytes and read_header(path) == _local_entries(file, path)
        if not is_same:
            raise WriteError(f"{path} exists and is not the hub's file: remove it, or choose another directory.")
        return True

    def _part_jobs(self, file: SourceFile, path: Path) -> list[_Job]:
        identity = f"{self._plan.origin.commit} {file.remote.sha256} {zlib.crc32(file.header)}"
        part = PartFile(path, file.nbytes, identity)
        self._parts.append(part)
        header = file.header
        if header and gaps(part.done, 0, len(header)):
            with part.writer(0) as write:
                write(header)
        self._on_bytes(file.nbytes - sum(end - begin for begin, end in gaps(part.done, 0, file.nbytes)))
        jobs = [
            _Job(file, part, begin, min(begin + REQUEST_BYTES, gap_end), remote_begin + begin - local_begin)
            for remote_begin, local_begin, nbytes in stretches(file)
            for gap_begin, gap_end in gaps(part.done, local_begin, local_begin + nbytes)
            for begin in range(gap_begin, gap_end, REQUEST_BYTES)
        ]
        # A part that has all its bytes still has to be checked and named.
        jobs = jobs or [_Job(file, part, file.nbytes, file.nbytes, 0)]
        self._jobs_left[file.name] = len(jobs)
        return jobs

    def _do(self, job: _Job | SourceFile) -> None:
        if isinstance(job, SourceFile):
            self._fetch_small(job)
            return
        self._fetch_range(job)
        with self._lock:
            self._jobs_left[job.file.name] -= 1
            is_last = not self._jobs_left[job.file.name]
        if is_last:
            self._finish(job.file, job.part)

    def _fetch_small(self, file: SourceFile) -> None:
        content = self._transfer.read_whole(file.remote)
        if len(content) != file.nbytes or not _has_hash(file.remote, [content]):
            raise self._damaged(file)
        path = self._directory / file.name
        temporary = path.with_name(f"{path.name}.part")
        temporary.write_bytes(content)
        temporary.replace(path)
        self._on_bytes(len(content))

    def _fetch_range(self, job: _Job) -> None:
        remote_end = job.remote_begin + job.end - job.begin
        with job.part.writer(job.begin) as write:

            def take(data: bytes) -> None:
                write(data)
                self._on_bytes(len(data))

            self._transfer.stream(job.file.remote, job.remote_begin, remote_end, take)

    def _finish(self, file: SourceFile, part: PartFile) -> None:
        if file.tensors is None and not _has_hash(file.remote, part.read(0, file.nbytes)):
            part.discard()
            raise self._damaged(file)
        part.finish()

    def _damaged(self, file: SourceFile) -> UnreadableError:
        return UnreadableError(
            f"{file.name} of {self._plan.origin.hub_id} arrived with another hash than the hub states and was dropped: "
            "run the same command again; if it stays, a proxy changes what comes through it."
        )

    def _write_index(self) -> None:
        """The index of chosen tensors; a whole checkpoint has its own."""
        weight_map = {entry.name: file.name for file in self._plan.origin.files for entry in file.tensors or ()}
        if weight_map:
            total = sum(file.tensor_bytes for file in self._plan.origin.files)
            write_json(self._directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def stretches(file: SourceFile) -> list[tuple[int, int, int]]:
    """(remote begin, local begin, bytes) of what is fetched of a file; tensors that lie side by side are one."""
    if file.tensors is None:
        return [(0, 0, file.nbytes)]
    result: list[tuple[int, int, int]] = []
    local = len(file.header)
    for entry in file.tensors:
        if result and sum(result[-1][::2]) == entry.begin:
            remote_begin, local_begin, nbytes = result.pop()
            result.append((remote_begin, local_begin, nbytes + entry.nbytes))
        else:
            result.append((entry.begin, local, entry.nbytes))
        local += entry.nbytes
    return result


def _local_entries(file: SourceFile, path: Path) -> list[TensorEntry]:
    """The entries that the local file of chosen tensors has."""
    begin, entries = len(file.header), []
    for entry in file.tensors or ():
        entries.append(TensorEntry(entry.name, entry.dtype, entry.shape, path, begin, entry.nbytes))
        begin += entry.nbytes
    return entries


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            yield data


def _has_hash(remote: RemoteFile, content: Iterable[bytes]) -> bool:
    """Whether the content has the hash that the hub states: sha256 of a large file, git's of any other."""
    if remote.sha256 is None and remote.blob_id is None:
        return True
    digest = hashlib.sha256() if remote.sha256 else hashlib.sha1(b"blob %d\0" % remote.nbytes, usedforsecurity=False)
    for data in content:
        digest.update(data)
    return digest.hexdigest() == (remote.sha256 or remote.blob_id)
