"""The pocket model as `onebox serve` runs it: a quantized build of the shipped master, made once and cached."""

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onebox
from onebox.spec.cache import temporary_cache_directory, user_cache_directory
from onebox.spec.errors import WriteError

__all__ = ["DRAFTER_DIRECTORY", "MODEL_DIRECTORY", "SERVED_BUILD", "pocket_checkpoint"]

SERVED_BUILD = "hybrid-int8-head-int4-mtp"
_log = logging.getLogger(__name__)
_HERE = Path(__file__).parent
MODEL_DIRECTORY = _HERE / "model"
"""The BF16 master, as it ships."""
DRAFTER_DIRECTORY = _HERE / "drafter"
"""Its DFlash drafter, likewise."""
_NO_ROOM = 3
"""`builds.NO_ROOM`, whose module imports torch."""


def pocket_checkpoint(cache_home: Path | None = None, build: str = SERVED_BUILD) -> Path:
    """The directory of a build of the pocket model in the user's cache; makes the build if it is not there.

    Where the cache cannot hold it, the build is in the temporary directory.
    """
    name = f"pocket-{build}-{_content_hash()}"
    targets = [cache / name for cache in _caches(cache_home)]
    found = next((target for target in targets if os.path.exists(target)), None)  # noqa: PTH110 - Path's may raise
    if found:
        return found
    problem: WriteError | None = None
    for target in targets:
        try:
            _make(build, target)
        except WriteError as error:
            problem = problem or error
        else:
            if problem:
                _log.warning("%s The pocket model is in %s instead.", problem, target)
            return target
    raise problem or WriteError("There is neither a home nor a temporary directory to hold the pocket model.")


def _caches(cache_home: Path | None) -> list[Path]:
    if cache_home is not None:
        return [cache_home / "onebox"]
    found: list[Path] = []
    for directory in (user_cache_directory, temporary_cache_directory):
        with contextlib.suppress(OSError, RuntimeError):
            found.append(directory())
    return found


def _make(name: str, target: Path) -> None:
    """Builds in a temporary directory and renames it, so that two processes can do it at the same time."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    except OSError as error:
        raise WriteError(f"{target.parent} cannot hold the pocket model: {error.strerror}.") from None
    try:
        problem = _build_apart(name, scratch / "build", target.parent)
        if not problem:
            (scratch / "build").rename(target)
    except OSError as error:
        problem = f"{target} could not be written: {error.strerror}."
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    # If another process has put the same build there meanwhile, use that one.
    if problem and not target.exists():
        raise WriteError(problem)


def _build_apart(name: str, out: Path, cache: Path) -> str | None:
    """Builds in a process of its own, and returns what went wrong.

    Building needs torch, and a server that had imported it would hold 200 MB more for as long as it runs.
    """
    command = [sys.executable, "-P", "-m", "onebox.pocket.builds", name, str(MODEL_DIRECTORY), str(out)]
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    # In a group of its own: Ctrl-C is for this process, which then ends that one.
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
        check=False,
    )
    if ended.returncode == _NO_ROOM:
        return f"{cache} has no room for the pocket model; free some, or set XDG_CACHE_HOME to another directory."
    if ended.returncode:
        reason = ended.stdout.strip() or f"the process that builds it ended with status {ended.returncode}"
        return f"The pocket model could not be built in {cache}: {reason}."
    return None


def _content_hash() -> str:
    """A hash of everything that determines a build: the master, the recipes, and the code that writes the formats."""
    digest = hashlib.sha256()
    for path in _input_files():
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def _input_files() -> Iterator[Path]:
    yield from sorted(path for path in MODEL_DIRECTORY.iterdir() if path.is_file())
    yield _HERE / "builds.py"
    for room in ("checkpoint", "formats"):
        yield from sorted(Path(onebox.__file__).parent.joinpath(room).glob("*.py"))
