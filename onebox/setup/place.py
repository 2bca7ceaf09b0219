"""Where a recipe's files lie below one directory, and the two marks that say what cannot be seen from the files alone.

    DIR/.onebox_up.lock                 held while `onebox up` runs in DIR; names the process that holds it
    DIR/sources/OWNER--NAME[@REVISION]  what was fetched of a repository; +2 what another recipe needs in addition
    DIR/MODEL-RECIPE                    the built checkpoint; .partial while it is written
    DIR/MODEL-RECIPE.old                an earlier build, until the one that replaces it is complete
    DIR/.MODEL-RECIPE.json              the marks: of what the build is made, and which files were verified

A mark counts only while what it speaks of is unchanged, so a file that is removed or edited undoes its step.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from onebox.checkpoint.manifest import MANIFEST_NAME, write_json
from onebox.checkpoint.repository import HubId
from onebox.setup.recipe_file import RecipeSource, SetupRecipe
from onebox.spec.errors import OneboxError, UnreadableError, WriteError
from onebox.spec.model import read_json

__all__ = ["SetupPlace", "file_stamps"]

_LOCK_NAME = ".onebox_up.lock"


@dataclass(frozen=True)
class SetupPlace:
    """The directory of `--dir`, and what one recipe has in it."""

    directory: Path
    recipe: SetupRecipe

    @property
    def output(self) -> Path:
        """Where the recipe's build goes."""
        return self.directory / self.recipe.output_name

    @property
    def replaced(self) -> Path:
        """Where an earlier build waits until its successor is complete."""
        return self.output.with_name(f"{self.output.name}.old")

    @property
    def _marks(self) -> Path:
        return self.directory / f".{self.recipe.output_name}.json"

    def source_directory(self, hub_id: HubId | None) -> Path:
        """Where the files of a repository go; `hub_id` is not None."""
        return next(self.source_directories(hub_id))

    def source_directories(self, hub_id: HubId | None) -> Iterator[Path]:
        """That directory, and those for tensors that another recipe needs in addition, without end."""
        first = self.directory / "sources" / str(hub_id).replace("/", "--")
        yield first
        yield from (first.with_name(f"{first.name}+{number}") for number in count(2))

    # The build.

    @property
    def is_built(self) -> bool:
        """Whether the output is complete and made of this recipe."""
        if self.recipe.formats is None or not (self.output / MANIFEST_NAME).is_file():
            return False
        return _agree(self._read_marks().get("inputs"), self._inputs())

    def check_output(self) -> None:
        """Refuses a directory in the build's place that onebox did not build."""
        if self.recipe.formats is not None and self.output.exists() and not (self.output / MANIFEST_NAME).is_file():
            raise WriteError(
                f"{self.output} exists and was not built by onebox: move it away, or choose another --dir."
            )

    @property
    def partial_bytes(self) -> int:
        """What an unfinished build of this recipe has written."""
        partial = self.output.with_name(f"{self.output.name}.partial")
        if not partial.is_dir() or not _agree(self._read_marks().get("inputs"), self._inputs()):
            return 0
        return sum(size for size, _ in file_stamps(partial).values())

    def begin_build(self) -> bool:
        """Makes room for this recipe's build; True if an unfinished one of it may be resumed.

        What an earlier recipe built is moved aside.
        """
        inputs = self._inputs()
        is_same = _agree(self._read_marks().get("inputs"), inputs)
        with _writing(self.directory):
            if self.output.exists() and not self.is_built:
                self.check_output()
                shutil.rmtree(self.replaced, ignore_errors=True)
                self.output.rename(self.replaced)
            self._write_marks({"inputs": inputs})
        return is_same

    def end_build(self) -> None:
        """Removes what the finished build replaces."""
        if self.replaced.is_dir():
            shutil.rmtree(self.replaced, ignore_errors=True)

    def _inputs(self) -> dict[str, Any]:
        formats = {key: str(value) for key, value in asdict(self.recipe.formats).items()} if self.recipe.formats else {}
        return {"formats": formats, "sources": {source.role: _identity(source) for source in self.recipe.sources}}

    # Verification.

    def is_verified(self, checkpoint: Path) -> bool:
        """Whether the checkpoint was verified, and no file of it has been written since."""
        known = self._read_marks().get("verified")
        return known is not None and checkpoint.is_dir() and known == file_stamps(checkpoint)

    def mark_verified(self, checkpoint: Path) -> None:
        with _writing(self.directory):
            self._write_marks({**self._read_marks(), "verified": file_stamps(checkpoint)})

    def _read_marks(self) -> dict[str, Any]:
        """The marks; none if there are none or they cannot be read, which redoes their steps."""
        try:
            return read_json(self._marks)
        except UnreadableError:
            return {}

    def _write_marks(self, marks: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json(self._marks, marks)

    # The lock.

    @contextmanager
    def locked(self) -> Iterator[Callable[[str], None]]:
        """Makes this process the only `onebox up` in the directory; call the result with each step that begins.

        The kernel frees the lock however the process ends. A program that this process becomes (exec) keeps it.
        """
        path = self.directory / _LOCK_NAME
        with _writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.set_inheritable(descriptor, True)
        try:
            try:
                # A lock of the process, not of the open file: children that outlive it do not hold it.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise WriteError(
                    f"Another `onebox up` is at work in {self.directory} ({holder or 'starting'}): wait for it, stop "
                    "it, or choose another --dir."
                ) from None

            def name_step(step: str) -> None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()}, step {step}\n".encode(), 0)

            yield name_step
        finally:
            os.close(descriptor)


def _identity(source: RecipeSource) -> dict[str, Any]:
    """What tells one source from another: a repository and revision, or a directory and the stamps of its files."""
    if source.directory is None:
        return {"hub": str(source.hub_id)}
    files = file_stamps(source.directory) if source.directory.is_dir() else None
    return {"directory": str(source.directory), "files": files}


def _agree(known: Any, now: dict[str, Any]) -> bool:
    """Whether the inputs are those that are known; a directory that has been removed since is taken as unchanged."""
    try:
        sources = {
            role: {**identity, "files": known["sources"][role]["files"]}
            if "files" in identity and identity["files"] is None
            else identity
            for role, identity in now["sources"].items()
        }
        return bool(known == {**now, "sources": sources})
    except (KeyError, TypeError):
        return False


def file_stamps(directory: Path) -> dict[str, list[int]]:
    """Size and time of the last change, in nanoseconds, of each file in `directory`."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        stats = {entry.name: entry.stat() for entry in entries if entry.is_file()}
    except OSError as error:
        raise UnreadableError(f"{directory} cannot be listed: {error.strerror}.") from None
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OneboxError:
        raise
    except OSError as error:
        raise WriteError(
            f"{error.filename or directory} cannot be written: {error.strerror}; free some space or choose another "
            "--dir, and run the same command again to resume."
        ) from None
