"""What the engine's thread hands to the disk's threads, and what it gets back: loads and writes of prefixes.

The engine's thread holds a job's pages and its checkpoint number until the job, or the part of it that uses them, is
over. It may take back what no thread is copying at that moment: a write never makes a request wait for long.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from onebox.engine.stats import DiskStats
from onebox.store.chunk import Chunk, ChunkKind
from onebox.store.entry import RUN_PAGES, PrefixEntry

if TYPE_CHECKING:
    from onebox.engine.sequence import Sequence as EngineSequence

__all__ = ["STATE_PART", "LoadJob", "PrefixDisk", "WriteJob", "part_of"]

STATE_PART = -1
"""The part of a write that needs the checkpoint; the others are numbered by their runs of pages."""


def part_of(chunk: Chunk) -> int:
    """The part of a write that a chunk belongs to."""
    return chunk.first_page // RUN_PAGES if chunk.kind is ChunkKind.KV else STATE_PART


@dataclass(eq=False)
class LoadJob:
    """A prefix on its way from disk into pages and a checkpoint. The first block is the engine thread's alone."""

    tokens: tuple[int, ...]
    """Of the prefix."""
    num_known: int
    """Of these tokens, those of the longest prefix that memory could have continued from."""
    sequences: "list[EngineSequence]" = field(default_factory=list)
    """That wait for it."""
    began_at: float | None = None
    """On the engine's clock, once it was looked at."""
    is_poisoned: bool = False
    """Whether what it loads may not be used: one of the states may not be finite."""

    entry: PrefixEntry = field(kw_only=True)
    pages: tuple[int, ...] = field(kw_only=True)
    """Of the whole prefix, in order."""
    first_page: int = field(kw_only=True)
    """Pages before this one are in memory already."""
    checkpoint: int = field(kw_only=True)
    fence: Any = None
    """What its copies come after."""

    is_cancelled: bool = False
    """Set by the engine's thread; its readers then stop soon."""
    is_complete: bool = False
    """Set before it is reported: everything is in memory."""
    seconds: float = 0.0
    """That it took."""

    @property
    def num_bytes(self) -> int:
        """That are read for it."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def chunks(self) -> list[Chunk]:
        """Those with anything that is not in memory yet."""
        return [
            chunk
            for chunk in self.entry.chunks
            if chunk.kind is ChunkKind.STATE or chunk.first_page + chunk.count > self.first_page
        ]


@dataclass(eq=False)
class WriteJob:
    """A prefix in memory on its way to disk."""

    page_tokens: list[tuple[int, ...]]
    """The tokens of each of its pages."""
    pages: tuple[int, ...]
    checkpoint: int
    is_pinned: bool
    fence: Any = None

    is_stored: bool = False
    """Set before it is reported: it is on disk, written now or before."""
    is_over: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._copying: set[int] = set()
        self._is_cancelled = False
        num_runs = -(-len(self.pages) // RUN_PAGES)
        self.held = {*range(num_runs), STATE_PART}
        """Parts whose pages or checkpoint the engine's thread holds for it; that thread's alone."""
        self._unneeded: set[int] = set()

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def pages_of(self, part: int) -> tuple[int, ...]:
        """None for the state."""
        return () if part == STATE_PART else self.pages[part * RUN_PAGES : (part + 1) * RUN_PAGES]

    # The disk's threads.

    def begin_copy(self, part: int) -> bool:
        """Whether the part may be copied; it then stays as it is until `end_copy`."""
        with self._lock:
            if not self._is_cancelled:
                self._copying.add(part)
            return not self._is_cancelled

    def end_copy(self, part: int, *, is_last: bool = True) -> None:
        """The part's chunk is copied; after its last one the part is not needed any more."""
        with self._lock:
            self._copying.discard(part)
            if is_last:
                self._unneeded.add(part)

    def leave(self, parts: Sequence[int]) -> None:
        """These are on disk already."""
        with self._lock:
            self._unneeded.update(parts)

    # The engine's thread.

    def cancel(self) -> None:
        """Nothing more of it is copied, or named as an entry, from now on."""
        with self._lock:
            self._is_cancelled = True

    def take_free(self) -> set[int]:
        """The held parts that no thread needs any more; they are not held from now on."""
        with self._lock:
            if self.is_over:
                free = set(self.held)
            elif self._is_cancelled:
                free = self.held - self._copying
            else:
                free = self.held & self._unneeded
        self.held -= free
        return free


class PrefixDisk(Protocol):
    """The disk as the engine's thread sees it. No call waits for a file."""

    @property
    def is_writing(self) -> bool:
        """False while the disk is full or cannot be written."""

    def find(self, keys: Sequence[bytes], deeper_than: int) -> PrefixEntry | None:
        """The longest prefix on the path of these keys that has more pages than this."""

    def start_load(self, job: LoadJob) -> None: ...
    def start_write(self, job: WriteJob) -> None: ...

    def take_loads(self) -> list[LoadJob]:
        """The loads that are over since the last call."""

    def entry_bytes(self, num_pages: int) -> int:
        """That are read to load a prefix of so many pages."""

    def compute_seconds(self, num_tokens: int) -> float | None:
        """What computing so many tokens of a prompt takes, as measured; None where nothing was."""

    def read_pays(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether reading so many bytes takes less time than computing so many tokens."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts in this time."""

    def touch(self, key: bytes) -> None:
        """The prefix was used in memory."""

    def discard(self, keys: Sequence[bytes]) -> None:
        """Removes every prefix on this path."""

    def clear(self) -> None:
        """Removes every prefix of this engine."""

    def stats(self) -> DiskStats:
        """Without hits, seconds saved and dropped writes: those are the scheduler's."""
