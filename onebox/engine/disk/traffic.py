"""Loads and writes under way, and what they hold of pages and checkpoints: the engine thread's books of the disk.

A load takes free pages and a checkpoint number, and holds the cached pages that it continues; when it is complete, its
prefix enters the prefix cache as if it had been computed. A write holds the pages and the state of a cached prefix
until they are copied. Pure bookkeeping, like the scheduler: no tensors, no threads, no clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onebox.engine.disk.jobs import STATE_PART, LoadJob, PrefixDisk, WriteJob
from onebox.engine.pages import PagePool
from onebox.engine.prefix import Hit, PrefixCache, UnwrittenPrefix
from onebox.engine.request import CacheTier
from onebox.engine.sequence import Sequence as EngineSequence
from onebox.engine.stats import DiskStats
from onebox.spec.kv import PAGE_TOKENS
from onebox.store.entry import PrefixEntry
from onebox.store.keys import prefix_keys

__all__ = ["DiskTraffic"]

MAX_LOADS = 2
"""Of one sequence: what was loaded may be evicted before the sequence is admitted."""
_PASSES = 16
"""Steps for which nothing is written after a write was stopped for its pages."""
_LEAST_LIMIT_S, _MOST_LIMIT_S = 2.0, 60.0
"""A load that takes longer than computing would is given up after twice that time, within these bounds."""


class DiskTraffic:
    """The loads and the write under way over one disk; without a disk there are none."""

    def __init__(self, disk: PrefixDisk | None, pool: PagePool, prefix: PrefixCache) -> None:
        self._disk = disk
        self._pool = pool
        self._prefix = prefix
        self._loads: list[LoadJob] = []
        self._unstarted: list[LoadJob] = []
        """Of the loads, those that the step being planned must not meet."""
        self._write: tuple[WriteJob, int] | None = None
        """With the number of its prefix."""
        self._num_passes = 0
        """Steps without a write to come, after pages were missed."""
        self._num_hits = self._hit_tokens = self._num_dropped = 0
        self._saved_s = 0.0

    # Loads.

    def find(self, sequence: EngineSequence, hit: Hit | None) -> PrefixEntry | None:
        """A prefix on disk that is longer than the hit in memory and faster read than computed."""
        if self._disk is None or sequence.num_loads >= MAX_LOADS:
            return None
        keys = keys_of(sequence)[: (sequence.num_prompt - 1) // PAGE_TOKENS]
        num_known = hit.num_tokens if hit else 0
        entry = self._disk.find(keys, num_known // PAGE_TOKENS)
        return entry if entry and _pays(self._disk, entry, num_known) else None

    def peek(self, tokens: tuple[int, ...], num_known: int) -> int:
        """Tokens of a prompt that would be loaded from disk, where that is more than memory knows; for any thread."""
        if self._disk is None:
            return 0
        keys = prefix_keys(tokens)[: (len(tokens) - 1) // PAGE_TOKENS]
        entry = self._disk.find(keys, num_known // PAGE_TOKENS)
        return entry.num_tokens if entry and _pays(self._disk, entry, num_known) else 0

    def load(self, sequence: EngineSequence, entry: PrefixEntry, hit: Hit | None) -> bool:
        """Begins to load the prefix for a sequence, or joins another that does; False where there is no checkpoint.

        The caller has made sure that the pages of its whole prompt beyond the hit can be had.
        """
        sequence.num_loads += 1
        job = next((load for load in self._loads if load.entry.key == entry.key and not load.is_cancelled), None)
        if job is None:
            job = self._new_load(sequence.cache_tokens[: entry.num_tokens], entry, hit.num_tokens if hit else 0)
        if job is None:
            return False
        job.sequences.append(sequence)
        sequence.load = job
        return True

    def _new_load(self, tokens: tuple[int, ...], entry: PrefixEntry, num_known: int) -> LoadJob | None:
        known = self._prefix.pages_on_path(tokens)
        for page in known:
            self._pool.share(page)
        # It may evict what leads to the known pages: they are held before.
        checkpoint = self._prefix.reserve()
        missing = entry.num_pages - len(known)
        if checkpoint is None or not self._prefix.free_pages(missing):
            for page in known:
                self._pool.give_back(page)
            if checkpoint is not None:
                self._prefix.cancel(checkpoint)
            return None
        pages = (*known, *self._pool.take(missing))
        job = LoadJob(tokens, num_known, entry=entry, pages=pages, first_page=len(known), checkpoint=checkpoint)
        self._loads.append(job)
        self._unstarted.append(job)
        return job

    def start_loads(self) -> None:
        """Starts what the last plan began. The step that was planned with it does not read its checkpoint any more."""
        unstarted, self._unstarted = self._unstarted, []
        for job in unstarted:
            if self._disk:
                self._disk.start_load(job)

    def leave(self, sequence: EngineSequence) -> None:
        """The sequence waits for its load no longer; a load that nobody waits for stops soon."""
        job, sequence.load = sequence.load, None
        if job:
            job.sequences.remove(sequence)
            if not job.sequences:
                self._cancel(job)

    def _cancel(self, job: LoadJob) -> None:
        job.is_cancelled = True
        if job in self._unstarted:
            self._unstarted.remove(job)
            self._end_load(job)

    def take_loaded(self) -> list[EngineSequence]:
        """Ends the loads that are over; returns the sequences that waited for them."""
        released: list[EngineSequence] = []
        for job in self._disk.take_loads() if self._disk else ():
            released += job.sequences
            for sequence in job.sequences:
                sequence.load = None
                if job.is_complete and not job.is_poisoned:
                    sequence.loaded = job
                else:
                    sequence.num_loads = MAX_LOADS
            self._end_load(job)
        return released

    def _end_load(self, job: LoadJob) -> None:
        """Gives its prefix to the cache, where it is complete, and all that it held back."""
        self._loads.remove(job)
        if job.is_complete and not job.is_poisoned:
            is_pinned = any(sequence.request.pin_prompt for sequence in job.sequences)
            self._prefix.insert(job.tokens, job.pages, job.checkpoint, is_pinned=is_pinned, is_written=True)
        else:
            self._prefix.cancel(job.checkpoint)
        job.sequences = []
        for page in job.pages:
            self._pool.give_back(page)

    def take_late(self, now: float) -> list[EngineSequence]:
        """The sequences whose loads take much longer than computing would: they are to compute instead."""
        late: list[EngineSequence] = []
        for job in self._loads:
            if job.began_at is None:
                job.began_at = now
            seconds = self._compute_seconds(len(job.tokens) - job.num_known)
            if now - job.began_at > min(_MOST_LIMIT_S, max(_LEAST_LIMIT_S, 2 * seconds)):
                late += job.sequences
        for sequence in late:
            sequence.num_loads = MAX_LOADS
        return late

    def count_hit(self, sequence: EngineSequence, hit: Hit | None) -> CacheTier | None:
        """Counts an admission with this hit; returns where it was found: on disk, where it was loaded for it."""
        job, sequence.loaded = sequence.loaded, None
        if hit is None:
            return None
        if job and hit.num_tokens == len(job.tokens):
            self._num_hits += 1
            self._hit_tokens += hit.num_tokens
            self._saved_s += max(0.0, self._compute_seconds(hit.num_tokens - job.num_known) - job.seconds)
            return CacheTier.DISK
        if self._disk:
            self._disk.touch(keys_of(sequence)[hit.num_tokens // PAGE_TOKENS - 1])
        return CacheTier.MEMORY

    def _compute_seconds(self, num_tokens: int) -> float:
        return (self._disk.compute_seconds(num_tokens) if self._disk else None) or 0.0

    # Writes.

    def write_next(self, *, is_idle: bool, is_last: bool = False) -> bool:
        """Begins to write a cached prefix, one at a time, the first or the last; whether one is under way."""
        self.release_written()
        if self._num_passes and not is_idle:
            self._num_passes -= 1
            return self._write is not None
        while self._write is None and self._disk and self._disk.is_writing:
            prefix = self._prefix.next_unwritten(is_last=is_last)
            if prefix is None:
                break
            num_pages = len(prefix.pages)
            if self._disk.read_pays(num_pages * PAGE_TOKENS, self._disk.entry_bytes(num_pages)):
                self._begin_write(self._disk, prefix)
            else:
                self._prefix.mark_written(prefix.number)
        return self._write is not None

    def _begin_write(self, disk: PrefixDisk, prefix: UnwrittenPrefix) -> None:
        for page in prefix.pages:
            self._pool.share(page)
        self._prefix.hold(prefix.checkpoint)
        self._prefix.writing = prefix.number
        job = WriteJob(prefix.page_tokens, prefix.pages, prefix.checkpoint, prefix.is_pinned)
        self._write = job, prefix.number
        disk.start_write(job)

    def release_written(self) -> None:
        """Gives back what the write has copied; one that is over makes room for the next."""
        if self._write is None:
            return
        job, number = self._write
        is_over = job.is_over
        for part in job.take_free():
            if part == STATE_PART:
                self._prefix.release(job.checkpoint)
            for page in job.pages_of(part):
                self._pool.give_back(page)
        if is_over:
            self._end_write(job, number)

    def _end_write(self, job: WriteJob, number: int) -> None:
        self._write = self._prefix.writing = None
        if job.is_stored:
            self._prefix.mark_written(number)
        elif job.is_cancelled:
            self._num_dropped += not self._prefix.is_unwritten(number)
            self._prefix.put_off(number)
        else:
            self._num_dropped += 1
            self._prefix.mark_written(number)  # the disk does not take it: it is evicted like any other

    def stop_writing(self) -> None:
        """Gives up the write under way, so that its pages can be had: all but those being copied, at once."""
        if self._write is None:
            return
        self._num_passes = _PASSES
        self._write[0].cancel()
        self.release_written()

    # Both.

    def discard(self, sequence: EngineSequence) -> None:
        """Removes every prefix on the sequence's path: one of their states may not be finite."""
        if self._disk is None:
            return
        keys = keys_of(sequence)
        for job in self._loads:
            job.is_poisoned |= job.entry.key in keys
        if self._write is not None and _is_beginning(self._write[0], sequence.cache_tokens):
            self.stop_writing()
        self._disk.discard(keys)

    def clear(self) -> None:
        """Removes every prefix: what is being loaded or written is dropped."""
        for job in self._loads:
            job.is_poisoned = True
        self.stop_writing()
        if self._disk:
            self._disk.clear()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        if self._disk:
            self._disk.observe_prefill(num_tokens, seconds)

    def stats(self) -> DiskStats | None:
        if self._disk is None:
            return None
        return replace(
            self._disk.stats(),
            num_hits=self._num_hits,
            hit_tokens=self._hit_tokens,
            saved_s=self._saved_s,
            num_dropped=self._num_dropped + self._prefix.num_dropped,
        )

    @property
    def is_busy(self) -> bool:
        """Whether pages or checkpoints are held."""
        return bool(self._loads or self._write)

    def holders(self) -> Iterator[int]:
        """The pages that are held, each as often as it is."""
        for load in self._loads:
            yield from load.pages
        if self._write:
            job = self._write[0]
            for part in job.held:
                yield from job.pages_of(part)

    def reserved(self) -> list[int]:
        """Checkpoint numbers that loads have reserved."""
        return [load.checkpoint for load in self._loads]


def _pays(disk: PrefixDisk, entry: PrefixEntry, num_known: int) -> bool:
    """Whether reading what memory does not know of an entry is faster than computing it."""
    state_bytes = sum(chunk.num_bytes for chunk in entry.state_chunks)
    kv_bytes = (entry.num_bytes - state_bytes) * (1 - num_known / entry.num_tokens)
    return disk.read_pays(entry.num_tokens - num_known, int(state_bytes + kv_bytes))


def keys_of(sequence: EngineSequence) -> Sequence[bytes]:
    """The keys of its prompt. With images they are known once those are encoded."""
    if sequence.prefix_keys is None:
        sequence.prefix_keys = prefix_keys(sequence.cache_tokens)
    return sequence.prefix_keys


def _is_beginning(job: WriteJob, tokens: tuple[int, ...]) -> bool:
    pages = (tokens[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS] for place in range(len(job.page_tokens)))
    return all(page == ours for page, ours in zip(pages, job.page_tokens, strict=True))
