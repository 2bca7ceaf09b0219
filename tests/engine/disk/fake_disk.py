"""A disk without files under the fake runner: loads and writes end when the test lets them, well or badly.

What it reads it puts into the fake runner's memory bit by bit, what it writes it compares with the text: a page that
was given away while it was copied, or a state of another text, ends the test where it happens.
"""

import random

import numpy as np

from onebox.engine.disk.jobs import STATE_PART, LoadJob, WriteJob
from onebox.engine.stats import DiskStats
from onebox.spec.kv import PAGE_TOKENS
from onebox.store.entry import ChunkLayout, PrefixEntry, new_entry
from onebox.store.keys import prefix_keys
from tests.engine.fake import FakeRunner, states_after

LAYOUT = ChunkLayout(page_bytes=1000, state_bytes=(500,))


class FakeDisk:
    """A `PrefixDisk`; `turn` has every load and write go a step further."""

    is_writing = True

    def __init__(self, runner: FakeRunner, seed: int = 0, failure_rate: float = 0.1) -> None:
        self._runner = runner
        self._random = random.Random(seed)
        self._failure_rate = failure_rate
        self._entries: dict[bytes, tuple[PrefixEntry, tuple[int, ...]]] = {}
        """With their tokens."""
        self._loads: list[LoadJob] = []
        self._over: list[LoadJob] = []
        self._write: WriteJob | None = None
        self._copying: tuple[int, np.ndarray] | None = None
        """A part of the write, and what it was when its copy began."""
        self._left: list[int] = []
        self.num_loads = self.num_failed = self.num_written = self.num_refused = self.num_discarded = 0

    # As the engine's thread sees it.

    def find(self, keys, deeper_than):
        found = [self._entries[key][0] for key in keys if key in self._entries]
        return next((entry for entry in reversed(found) if entry.num_pages > deeper_than), None)

    def start_load(self, job):
        self._loads.append(job)

    def start_write(self, job):
        assert self._write is None, "two prefixes are written at once"
        self._write, self._left = job, sorted(job.held)

    def take_loads(self):
        over, self._over = self._over, []
        return over

    def entry_bytes(self, num_pages):
        return num_pages * LAYOUT.page_bytes + sum(LAYOUT.state_bytes)

    def compute_seconds(self, num_tokens):
        return num_tokens / 100

    def read_pays(self, num_tokens, num_bytes):
        return num_tokens >= PAGE_TOKENS and num_bytes > 0

    def observe_prefill(self, num_tokens, seconds):
        assert num_tokens > 0
        assert seconds > 0

    def touch(self, key):
        assert len(key) == 20

    def discard(self, keys):
        self.num_discarded += 1
        self._entries = {key: kept for key, kept in self._entries.items() if key not in keys}

    def clear(self):
        self._entries = {}

    def stats(self):
        return DiskStats(num_entries=len(self._entries))

    # Between the steps.

    def turn(self) -> None:
        """What the disk's threads do meanwhile."""
        for job in [*self._loads]:
            if job.is_cancelled or self._random.random() < 0.4:
                self._read(job)
            else:
                self._spoil(job)
        for _ in range(self._random.randrange(4)):
            if self._write is not None:
                self._go_on(self._write)

    def settle(self) -> None:
        """Everything that is under way ends."""
        for job in [*self._loads]:
            self._read(job)
        while self._write is not None:
            self._go_on(self._write)

    def _spoil(self, job: LoadJob) -> None:
        """Half-read: anything may stand in what it was given."""
        for page in job.pages[job.first_page :]:
            self._runner._pages[page] = self._random.randrange(1 << 40)
        self._runner._checkpoints[job.checkpoint] = np.array([self._random.randrange(1 << 40)])

    def _read(self, job: LoadJob) -> None:
        self._loads.remove(job)
        self._over.append(job)
        stored = self._entries.get(job.entry.key)
        if stored is None or job.is_cancelled or self._random.random() < self._failure_rate:
            self.num_failed += 1
            self._spoil(job)
            self._entries.pop(job.entry.key, None)
            return
        self.num_loads += 1
        states = states_after(0, stored[1])
        for place, page in enumerate(job.pages):
            if place >= job.first_page:
                self._runner._pages[page] = states[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS]
        self._runner._checkpoints[job.checkpoint] = states
        job.is_complete = True

    def _go_on(self, job: WriteJob) -> None:
        """Begins or ends the copy of a part."""
        if self._copying is not None:
            part, before = self._copying
            assert np.array_equal(before, self._content(job, part)), "it changed while it was copied"
            self._copying = None
            job.end_copy(part)
        elif not self._left:
            self._end_write(job, is_stored=True)
        elif job.begin_copy(self._left[0]):
            part = self._left.pop(0)
            self._copying = part, self._content(job, part).copy()
            assert np.array_equal(self._copying[1], self._expected(job, part)), "a state of another text is written"
        else:
            self.num_refused += 1
            self._end_write(job, is_stored=False)

    def _end_write(self, job: WriteJob, *, is_stored: bool) -> None:
        self._write = None
        tokens = tuple(token for page in job.page_tokens for token in page)
        if is_stored and not job.is_cancelled and self._random.random() >= self._failure_rate:
            keys = prefix_keys(tokens)
            self._entries[keys[-1]] = new_entry(keys, LAYOUT), tokens
            self.num_written += 1
            job.is_stored = True
        job.is_over = True

    def _content(self, job: WriteJob, part: int) -> np.ndarray:
        if part == STATE_PART:
            return self._runner._checkpoints[job.checkpoint]
        return self._runner._pages[list(job.pages_of(part))].reshape(-1)

    def _expected(self, job: WriteJob, part: int) -> np.ndarray:
        states = states_after(0, [token for page in job.page_tokens for token in page])
        if part == STATE_PART:
            return states
        first = part * 16 * PAGE_TOKENS
        return states[first : first + len(job.pages_of(part)) * PAGE_TOKENS]
