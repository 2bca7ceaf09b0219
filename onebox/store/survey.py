"""What a directory holds, and its repair by hand, with servers running or not."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onebox.spec.errors import UsageError, WriteError
from onebox.store.about import read_about
from onebox.store.chunk import Chunk, ChunkError
from onebox.store.chunk_file import check_chunk
from onebox.store.family import Family, list_families
from onebox.store.files import directory_lock, remove_file
from onebox.store.room import ORPHAN_GRACE_S
from onebox.store.use import is_in_use

__all__ = ["EntrySummary", "FamilySummary", "PrefixProblem", "PrefixSurvey"]

MIN_KEY_DIGITS = 4


@dataclass(frozen=True)
class EntrySummary:
    """One entry. Times are unix seconds."""

    key: str
    num_tokens: int
    num_bytes: int
    """Of its files, those that it shares included."""
    own_bytes: int
    """Of the files that only it has: what removing it frees."""
    created: float
    last_used: float
    is_pinned: bool


@dataclass(frozen=True)
class FamilySummary:
    """One family."""

    fingerprint: str
    parts: dict[str, str]
    """What the fingerprint is made of; empty where its about.json is absent or damaged."""
    label: dict[str, str]
    is_in_use: bool
    """By a server that runs now."""
    num_bytes: int
    entries: tuple[EntrySummary, ...]
    """The last used first."""
    num_unreadable: int
    """Entry files that cannot be read."""


@dataclass(frozen=True)
class PrefixProblem:
    """A file that cannot be used, and the keys of the entries that need it."""

    fingerprint: str
    path: Path
    reason: str
    message: str
    keys: tuple[str, ...]


class PrefixSurvey:
    """All families of a directory, as they were when it was made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.families = [Family(path) for path in list_families(root)]
        self._errors = {family.path.name: family.refresh() for family in self.families}

    def summaries(self) -> list[FamilySummary]:
        return [_summarise(family) for family in self.families]

    @property
    def num_check_bytes(self) -> int:
        """What `problems` reads at most."""
        return sum(family.num_bytes for family in self.families)

    def problems(self, on_bytes: Callable[[int], None] = lambda _: None) -> Iterator[PrefixProblem]:
        """Reads every file and yields those that cannot be used."""
        for family in self.families:
            for error in self._errors[family.path.name]:
                yield _problem(family, error, ())
            for chunk, keys in _chunks(family).items():
                try:
                    check_chunk(family.chunk_path(chunk.file_name), family.fingerprint, chunk)
                except ChunkError as error:
                    if any(
                        os.path.lexists(family.entry_path(key)) for key in keys
                    ):  # else evicted by a server meanwhile
                        yield _problem(family, error, keys)
                on_bytes(chunk.file_bytes)

    def find(self, digits: str) -> tuple[Family, bytes]:
        """The one entry whose key begins with these hexadecimal digits. Raises `UsageError`."""
        wanted = digits.lower()
        if len(wanted) < MIN_KEY_DIGITS:
            raise UsageError(f"The key {digits!r} is too short: give {MIN_KEY_DIGITS} digits of it or more.")
        found = [
            (family, key)
            for family in self.families
            for key in family.entries
            if key.hex().startswith(wanted) or f"{family.path.name}/{key.hex()}".startswith(wanted)
        ]
        if not found:
            raise UsageError(f"No entry in {self._root} has a key that begins with {digits}: see `onebox cache ls`.")
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} entries in {self._root} begin with {digits}: give FAMILY/KEY, or more digits."
            )
        return found[0]

    def family(self, digits: str) -> Family:
        """The one family whose fingerprint begins with these digits. Raises `UsageError`."""
        found = [family for family in self.families if digits and family.path.name.startswith(digits.lower())]
        if len(found) != 1:
            raise UsageError(
                f"{len(found) or 'No'} families in {self._root} begin with {digits!r}: see `onebox cache ls`."
            )
        return found[0]

    def remove_entries(self, chosen: Iterable[tuple[Family, bytes]]) -> tuple[int, int]:
        """Removes entries and the chunks that only they have; returns (entries removed, bytes freed)."""
        count = freed = 0
        with _locked(self._root):
            for family, key in chosen:
                count += key in family.entries
                freed += family.remove(key)
        return count, freed

    def remove_families(self, families: Sequence[Family]) -> tuple[int, int]:
        """Removes all of these families, a running server's directories excepted; returns (entries, bytes freed)."""
        count = freed = 0
        with _locked(self._root):
            for family in families:
                family.refresh()
                count, freed = count + len(family.entries), freed + family.num_bytes
                family.remove_all(keep_folders=is_in_use(family.path))
        return count, freed

    def remove_problems(self, problems: Iterable[PrefixProblem]) -> int:
        """Removes the files that cannot be used and the entries that need them; returns the number of entries."""
        by_name = {family.path.name: family for family in self.families}
        count = 0
        with _locked(self._root):
            for problem in problems:
                family = by_name[problem.fingerprint]
                for key in map(bytes.fromhex, problem.keys):
                    count += key in family.entries
                    family.remove(key)
                count += remove_file(problem.path) and not problem.keys
        return count

    def remove_leftovers(self) -> None:
        """Removes what interrupted writers left; what a running server may still need stays."""
        with _locked(self._root):
            for family in self.families:
                family.refresh()
                family.remove_leftovers((), ORPHAN_GRACE_S if is_in_use(family.path) else 0.0)


def _summarise(family: Family) -> FamilySummary:
    uses = Counter(chunk.file_name for record in family.entries.values() for chunk in record.entry.chunks)
    entries = []
    for key, record in family.entries.items():
        own = [chunk.file_bytes for chunk in record.entry.chunks if uses[chunk.file_name] == 1]
        entries.append(
            EntrySummary(
                key=key.hex(),
                num_tokens=record.entry.num_tokens,
                num_bytes=record.entry.file_bytes + sum(chunk.file_bytes for chunk in record.entry.chunks),
                own_bytes=record.entry.file_bytes + sum(own),
                created=min(record.entry.created, time.time()),
                last_used=min(record.last_used, time.time()),
                is_pinned=family.is_pinned(key),
            )
        )
    parts, label = read_about(family.path)
    return FamilySummary(
        fingerprint=family.path.name,
        parts=parts,
        label=label,
        is_in_use=is_in_use(family.path),
        num_bytes=family.num_bytes,
        entries=tuple(sorted(entries, key=lambda entry: -entry.last_used)),
        num_unreadable=len(family.refused),
    )


def _chunks(family: Family) -> dict[Chunk, list[bytes]]:
    """Every chunk that an entry names, with the keys of those entries."""
    found: dict[Chunk, list[bytes]] = {}
    for key, record in family.entries.items():
        for chunk in record.entry.chunks:
            found.setdefault(chunk, []).append(key)
    return found


def _problem(family: Family, error: ChunkError, keys: Sequence[bytes]) -> PrefixProblem:
    users = tuple(key.hex() for key in keys)
    return PrefixProblem(family.path.name, error.path, error.reason.value, str(error), users)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    try:
        with directory_lock(root / "lock"):
            yield
    except OSError as error:
        raise WriteError(f"{root} cannot be changed ({error.strerror}).") from None
