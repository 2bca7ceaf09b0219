"""The pocket model as `onebox serve` runs it: a build of the master that ships, made once and kept in the cache."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onebox
from onebox.spec.errors import WriteError

__all__ = ["MODEL_DIRECTORY", "SERVED_BUILD", "pocket_checkpoint"]

SERVED_BUILD = "hybrid-int8-head-int4-mtp"
_HERE = Path(__file__).parent
MODEL_DIRECTORY = _HERE / "model"
"""The BF16 master, as it ships."""


def pocket_checkpoint(cache_home: Path | None = None, build: str = SERVED_BUILD) -> Path:
    """The directory of a build of the pocket model in the user's cache; it is made first where it is not there yet."""
    home = cache_home or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = home / "onebox" / f"pocket-{build}-{_content_hash()}"
    if not target.exists():
        _make(build, target)
    return target


def _make(name: str, target: Path) -> None:
    """Builds beside `target` and renames, so that two processes that need it at once do not write the same files."""
    # Building needs torch, which a server whose model is in the cache does not load.
    import torch

    from onebox.pocket.builds import build

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    except OSError as error:
        raise WriteError(f"{target.parent} cannot hold the pocket model: {error.strerror}.") from None
    num_threads = torch.get_num_threads()
    # The matrices are too small to share out: with a thread for each core a build takes five times as long.
    torch.set_num_threads(1)
    try:
        build(name, MODEL_DIRECTORY, scratch / "build")
        (scratch / "build").rename(target)
    except OSError as error:
        # Another process may have put the same build there meanwhile; then theirs serves as well as ours.
        if not target.exists():
            raise WriteError(f"{target} could not be written: {error.strerror}.") from None
    finally:
        torch.set_num_threads(num_threads)
        shutil.rmtree(scratch, ignore_errors=True)


def _content_hash() -> str:
    """Names everything that decides a build: the master, the recipes, and the code that writes the formats."""
    digest = hashlib.sha256()
    for path in _deciding_files():
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def _deciding_files() -> Iterator[Path]:
    yield from sorted(path for path in MODEL_DIRECTORY.iterdir() if path.is_file())
    yield _HERE / "builds.py"
    for room in ("checkpoint", "formats"):
        yield from sorted(Path(onebox.__file__).parent.joinpath(room).glob("*.py"))
