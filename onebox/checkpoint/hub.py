"""Where a checkpoint that is named on the command line lies: a directory, the Hugging Face cache, or a pulled copy.

What is nowhere on this machine is an error that says what to pull, how large it is, and the command.
"""

import queue
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from onebox.checkpoint.fetch import plan_tensors
from onebox.checkpoint.hub_errors import RefusedError
from onebox.checkpoint.inspect import InspectReport, inspect_opened
from onebox.checkpoint.origin import ORIGIN_NAME, Origin, read_origin
from onebox.checkpoint.partial import tensors_of, words_for
from onebox.checkpoint.remote import RemoteHeaders
from onebox.checkpoint.repository import PATTERNS, HubId, RemoteRepository, describe_remote
from onebox.checkpoint.source import read_index
from onebox.spec.conversion import AS_STORED, LoadConversion
from onebox.spec.errors import OneboxError, UnreadableError
from onebox.spec.model import read_config
from onebox.spec.modules import ModuleClass

__all__ = [
    "HubId",
    "default_directory",
    "describe_remote",
    "find_local",
    "find_source",
    "inspect_remote",
    "model_name",
    "resolve_source",
]

MODELS = Path("models")
"""Where `onebox pull` puts what it fetches, from the working directory."""
_ASK_S = 8.0
Value = TypeVar("Value")


def resolve_source(source: str | Path, uses: frozenset[ModuleClass] | None = None) -> Path:
    """The directory of the checkpoint that `source` names: a path that exists, or `owner/name[@revision]`.

    With `uses`, a copy that holds the modules of these classes is enough.
    """
    found = find_source(source, uses)
    if found is None:
        raise UnreadableError(_what_to_pull(HubId.checked(source), uses))
    return found


def find_source(source: str | Path, uses: frozenset[ModuleClass] | None = None) -> Path | None:
    """As `resolve_source`; None for a repository of which nothing that suffices is on this machine."""
    hub_id = HubId.parse(str(source))
    if Path(source).exists() or hub_id is None:
        return Path(source)
    return find_local(hub_id, uses)


def model_name(source: str | Path) -> str:
    """What a served checkpoint is called if nothing else is said: the repository, or the directory's name."""
    hub_id = HubId.parse(str(source))
    return Path(source).resolve().name if hub_id is None or Path(source).exists() else hub_id.repo


def inspect_remote(
    source: str | Path,
    overrides: Mapping[str, Any] | None = None,
    on_wait: Callable[[str], None] = lambda _: None,
    conversion: LoadConversion = AS_STORED,
) -> InspectReport:
    """The report on a checkpoint that is on the hub alone. Reads its headers and small files.

    `overrides` are those of `--hf-overrides`; with a `conversion`, the report is on what is loaded.
    """
    hub_id = HubId.checked(source)
    try:
        headers = RemoteHeaders(describe_remote(hub_id), on_wait)
    except OneboxError as error:
        raise UnreadableError(f"{_absent(hub_id)}. {error}") from error
    with tempfile.TemporaryDirectory(prefix="onebox-inspect-") as directory:
        headers.copy_side_files(Path(directory))
        report = inspect_opened(headers.open(Path(directory), overrides=overrides), conversion=conversion)
    return replace(report, directory=Path(str(hub_id)))


def find_local(hub_id: HubId, uses: frozenset[ModuleClass] | None = None) -> Path | None:
    """A copy of a repository in the Hugging Face cache, or that `onebox pull` made; None if there is none."""
    cached = _cached(hub_id)
    if cached and _holds(cached, uses):
        return cached
    return _pulled(hub_id, uses)


def default_directory(hub_id: HubId, words: tuple[str, ...] = ()) -> Path:
    """Where `onebox pull` puts a repository, or the parts of it that `words` name."""
    return MODELS / "-".join((hub_id.name, *words))


def _cached(hub_id: HubId) -> Path | None:
    """The snapshot in the Hugging Face cache, complete or not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    found: str | None = None
    try:
        found = snapshot_download(
            hub_id.repo, revision=hub_id.revision, local_files_only=True, allow_patterns=list(PATTERNS)
        )
    except LocalEntryNotFoundError as error:
        found = getattr(error, "snapshot_path", None)
    except (HFValidationError, OSError):
        pass
    return Path(found) if found else None


def _holds(directory: Path, uses: frozenset[ModuleClass] | None) -> bool:
    """Whether all shards, or those with modules of `uses`, are in a directory. Their content is not read."""
    try:
        index = read_index(directory)
        if index is None:
            needed = {path.name for path in directory.glob("*.safetensors")}
        elif uses is None:
            needed = set(index.values())
        else:
            needed = {index[name] for name in tensors_of(read_config(directory), index, uses)}
    except OneboxError:
        return False
    return bool(needed) and all((directory / name).exists() for name in {*needed, "config.json"})


def _pulled(hub_id: HubId, uses: frozenset[ModuleClass] | None) -> Path | None:
    for path in sorted(MODELS.glob(f"{hub_id.name}*/{ORIGIN_NAME}")):
        origin = read_origin(path.parent)
        if origin and origin.is_complete and _is_of(origin, hub_id) and _suffices(origin, uses):
            return path.parent
    return None


def _is_of(origin: Origin, hub_id: HubId) -> bool:
    is_revision = hub_id.revision in (None, origin.hub_id.revision, origin.commit)
    return origin.hub_id.repo == hub_id.repo and is_revision


def _suffices(origin: Origin, uses: frozenset[ModuleClass] | None) -> bool:
    return not origin.only or (uses is not None and {kind.value for kind in uses} <= set(origin.only))


def _what_to_pull(hub_id: HubId, uses: frozenset[ModuleClass] | None) -> str:
    """The sentence for a repository that is not on this machine."""
    absent = _absent(hub_id)
    words = words_for(uses) if uses else []
    part = f" --only {','.join(words)}" if words else ""
    pull = f"`onebox pull {hub_id}{part}`"
    try:
        remote = ask_in_time(lambda: describe_remote(hub_id))
    except RefusedError as error:
        return f"{absent}. {error}"
    except OneboxError as error:
        return f"{absent}; {pull} fetches it. Its size is not known: {error}"
    unfinished = " (what has arrived is kept)" if default_directory(hub_id, tuple(words)).exists() else ""
    if not words or uses is None:
        return f"{absent}: {pull} fetches it, {_size(remote)}{unfinished}."
    try:
        wanted = ask_in_time(lambda: plan_tensors(hub_id, uses, Path("/nonexistent"))).nbytes
    except OneboxError:
        return f"{absent}: {pull} fetches what is needed of its {_size(remote)}{unfinished}."
    return f"{absent}: {pull} fetches what is needed, {wanted / 1e9:.2f} GB of {_size(remote)}{unfinished}."


def _absent(hub_id: HubId) -> str:
    from huggingface_hub import constants

    return f"{hub_id} is no directory here and not in the Hugging Face cache ({constants.HF_HUB_CACHE})"


def _size(remote: RemoteRepository) -> str:
    return f"{remote.nbytes / 1e9:.2f} GB in {len(remote.files)} files"


def ask_in_time(ask: Callable[[], Value], seconds: float = _ASK_S) -> Value:
    """What `ask` returns or raises, if it does so in time; a name server that does not answer is not waited for."""
    answers: queue.SimpleQueue[Value | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise UnreadableError(f"the hub did not answer within {seconds:.0f} s.") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer
