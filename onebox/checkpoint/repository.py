"""Repositories on the hub: their names, and what one commit of one holds. Reads no file of it."""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from onebox.checkpoint.hub_errors import hub_error, is_transient, is_unreachable
from onebox.checkpoint.retry import Retries
from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["HubId", "RemoteFile", "RemoteRepository", "describe_remote", "endpoint_url"]

# Files that a checkpoint needs, from the repository's top directory: no other framework's weights, no pictures.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*")
_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)
_TIMEOUT_S = 10.0
Value = TypeVar("Value")


class HubId(NamedTuple):
    """A repository and, if given, a branch, tag or commit of it."""

    repo: str
    revision: str | None = None

    @staticmethod
    def parse(text: str) -> "HubId | None":
        """The id in `owner/name[@revision]`, or None if `text` has another form."""
        found = _ID.fullmatch(text)
        return HubId(found["repo"], found["revision"]) if found else None

    @staticmethod
    def checked(source: "str | Path | HubId") -> "HubId":
        """The id that `source` is or names. Raises `UsageError` if it has another form."""
        hub_id = source if isinstance(source, HubId) else HubId.parse(str(source))
        if hub_id is None:
            raise UsageError(f"{source!r} is not a repository on the hub: write owner/name or owner/name@revision.")
        return hub_id

    @property
    def name(self) -> str:
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


class RemoteFile(NamedTuple):
    """One file of a commit. Large files have a sha256, all others are git blobs."""

    name: str
    nbytes: int
    sha256: str | None
    blob_id: str | None


@dataclass(frozen=True)
class RemoteRepository:
    """One commit of a repository and its files that a checkpoint needs, by name."""

    endpoint: str
    repo: str
    commit: str
    files: dict[str, RemoteFile]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())


def endpoint_url() -> str:
    """The hub's address: HF_ENDPOINT, or the public hub."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def describe_remote(source: str | HubId, timeout_s: float = _TIMEOUT_S) -> RemoteRepository:
    """Asks the hub for the commit that `source` names now, and for its files with their sizes and hashes."""
    hub_id = HubId.checked(source)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    def ask() -> RemoteRepository:
        info = HfApi().model_info(hub_id.repo, revision=hub_id.revision, files_metadata=True, timeout=timeout_s)
        files = [
            RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id)
            for file in info.siblings or []
        ]
        wanted = {file.name: file for file in files if _is_wanted(file)}
        return RemoteRepository(endpoint_url(), hub_id.repo, info.sha or "", wanted)

    try:
        return retried(ask, str(hub_id))
    except HFValidationError as error:
        raise UnreadableError(f"{hub_id.repo!r} is not a repository name on the hub ({error}).") from None


def retried(ask: Callable[[], Value], what: str) -> Value:
    """What `ask` returns, after a few attempts if the hub is busy; a hub that cannot be reached is not asked again."""
    from huggingface_hub.errors import HFValidationError

    retries = Retries()
    while True:
        try:
            return ask()
        except HFValidationError:
            raise
        except Exception as error:
            if is_unreachable(error) or not is_transient(error) or not retries.wait(error):
                raise hub_error(error, what, endpoint_url()) from error


def _is_wanted(file: RemoteFile) -> bool:
    return "/" not in file.name and any(fnmatch.fnmatch(file.name, pattern) for pattern in PATTERNS)
