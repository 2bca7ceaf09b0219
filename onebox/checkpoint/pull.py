"""Downloads a checkpoint with huggingface_hub, which resumes interrupted downloads; checks disk space first."""

import fnmatch
from pathlib import Path

from onebox.checkpoint.disk import require_disk
from onebox.spec.errors import UnreadableError

__all__ = ["pull_checkpoint"]

# All files that a checkpoint needs; other frameworks' weights and pictures are not downloaded.
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*"]
_MARGIN_BYTES = 256 << 20


def pull_checkpoint(repo: str, directory: Path, revision: str | None = None) -> int:
    """Downloads `repo` to `directory` and returns its size in bytes. Files that are already complete are skipped."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or [] if _is_wanted(file.rfilename)}
        _check_disk(repo, directory, files)
        snapshot_download(repo, revision=revision, local_dir=directory, allow_patterns=PATTERNS)
    except HFValidationError as error:
        raise UnreadableError(f"{repo!r} is not a repository name on the hub ({error}).") from None
    except HfHubHTTPError as error:
        raise UnreadableError(
            f"The hub refused {repo!r}: {error}. Check the name, and `hf auth login` if it is gated or rate-limited."
        ) from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise UnreadableError(
            f"{repo!r} could not be downloaded: {error}. Run the same command again to resume."
        ) from None
    return sum(files.values())


def _is_wanted(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)


def _check_disk(repo: str, directory: Path, files: dict[str, int]) -> None:
    here = sum((directory / name).stat().st_size for name in files if (directory / name).is_file())
    require_disk(f"The rest of {repo}", directory, sum(files.values()) - here + _MARGIN_BYTES)
