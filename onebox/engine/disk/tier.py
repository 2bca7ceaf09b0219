"""The disk tier: threads that read prefixes into memory and write them behind the engine's back.

Readers share the chunks of all loads, each with a staging buffer of its own. One thread writes, one prefix after the
other, within a bandwidth; what else changes files goes through its queue, so that it comes in the order in which it was
asked for. Another tends the directory about once a second. The engine's thread never waits for any of them.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from onebox.engine.disk.jobs import LoadJob, WriteJob, part_of
from onebox.engine.disk.rates import DiskRates
from onebox.engine.disk.transfer import PrefixTransfer, StagingBuffer
from onebox.engine.stats import DiskStats
from onebox.store.chunk import Chunk, ChunkError, Damage
from onebox.store.directory import DirectoryStats, NotStoredError, PrefixDirectory
from onebox.store.entry import PrefixEntry
from onebox.store.keys import prefix_keys
from onebox.store.reader import EntryReader
from onebox.store.writer import EntryWriter

__all__ = ["DiskTier"]

MAX_WRITE_BYTES_PER_S = 1 << 30
"""While requests run: half of what a slow NVMe disk writes."""
_TEND_S = 1.0
_TOUCH_S = 60.0
"""A prefix counts as used on disk at most so often."""

_NO_DAMAGE = (Damage.EVICTED, Damage.BUSY)
"""Reasons of a miss where the files are as they should be."""

_log = logging.getLogger(__name__)


class DiskTier:
    """A `PrefixDisk` over a directory and the engine's memory; `close` it after the engine's last step."""

    def __init__(
        self,
        directory: PrefixDirectory,
        transfer: PrefixTransfer,
        num_readers: int,
        rates: DiskRates | None = None,
    ) -> None:
        self.on_news: Callable[[], None] = lambda: None
        """Called by the disk's threads when the engine's thread has something to take or to give back."""
        self._directory = directory
        self._transfer = transfer
        self._rates = rates or DiskRates(directory.load_rates())
        self._is_closing = threading.Event()
        self._is_hurried = False
        self._loaded: queue.SimpleQueue[LoadJob] = queue.SimpleQueue()
        self._has_news = False
        self._latest: DirectoryStats = directory.stats()
        """As of the last event and the last second: counting takes longer than a step should wait."""
        self._touched: dict[bytes, float] = {}
        self._read_buffers: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        self._buffers = [transfer.new_buffer() for _ in range(num_readers + 1)]
        for buffer in self._buffers[1:]:
            self._read_buffers.put(buffer)
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="onebox-disk-read")
        self._orders: queue.SimpleQueue[WriteJob | Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._write_all, name="onebox-disk-write", daemon=True),
            threading.Thread(target=self._tend_all, name="onebox-disk-tend", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # The engine's thread.

    @property
    def has_news(self) -> bool:
        return self._has_news

    @property
    def is_writing(self) -> bool:
        return self._directory.is_writing and not self._is_closing.is_set()

    def find(self, keys: Sequence[bytes], deeper_than: int) -> PrefixEntry | None:
        return self._directory.find(keys, deeper_than)

    def start_load(self, job: LoadJob) -> None:
        job.fence = self._transfer.fence()
        self._readers.submit(self._begin_load, job, time.monotonic())

    def start_write(self, job: WriteJob) -> None:
        job.fence = self._transfer.fence()
        self._orders.put(job)

    def take_loads(self) -> list[LoadJob]:
        self._has_news = False
        loaded: list[LoadJob] = []
        while not self._loaded.empty():
            loaded.append(self._loaded.get())
        return loaded

    def entry_bytes(self, num_pages: int) -> int:
        layout = self._transfer.layout.chunks
        return num_pages * layout.page_bytes + sum(layout.state_bytes)

    def compute_seconds(self, num_tokens: int) -> float | None:
        return self._rates.compute_seconds(num_tokens)

    def read_pays(self, num_tokens: int, num_bytes: int) -> bool:
        return self._rates.read_pays(num_tokens, num_bytes)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._rates.observe_prefill(num_tokens, seconds)

    def touch(self, key: bytes) -> None:
        now = time.monotonic()
        if now - self._touched.get(key, -_TOUCH_S) >= _TOUCH_S and self._directory.has(key):
            self._touched = {k: at for k, at in self._touched.items() if now - at < _TOUCH_S}
            self._touched[key] = now
            self._orders.put(lambda: self._directory.touch(key))

    def discard(self, keys: Sequence[bytes]) -> None:
        self._orders.put(lambda: self._remove_path(keys))

    def clear(self) -> None:
        self._orders.put(self._remove_all)

    def stats(self) -> DiskStats:
        stats = self._latest
        return DiskStats(
            read_bytes=stats.read_bytes,
            written_bytes=stats.written_bytes,
            num_damaged=sum(count for reason, count in stats.damaged.items() if reason not in _NO_DAMAGE),
            num_evicted=stats.num_evicted,
            num_entries=stats.num_entries,
            used_bytes=stats.num_bytes,
            is_writing=stats.is_writing,
        )

    def hurry(self) -> None:
        """Writes as fast as the disk can from now on: no answer is running."""
        self._is_hurried = True

    def close(self) -> None:
        """Ends the threads: a load or a write under way stops after its chunk, what else was asked for is done."""
        self._is_closing.set()
        self._orders.put(None)
        self._readers.shutdown(wait=True)
        for thread in self._threads:
            thread.join()
        self._directory.save_rates(self._rates.saved)
        self._latest = self._directory.stats()
        self._directory.close()
        for buffer in self._buffers:
            buffer.close()

    # The readers.

    def _begin_load(self, job: LoadJob, began: float) -> None:
        try:
            load = _Load(job, self._directory.read(job.entry), began)
        except BaseException:
            _log.exception("a prefix of %d tokens could not be read", job.entry.num_tokens)
            self._report_load(job)
            return
        for chunk in job.chunks:
            try:
                self._readers.submit(self._read, load, chunk)
            except RuntimeError:  # closed meanwhile
                self._read(load, chunk)

    def _read(self, load: "_Load", chunk: Chunk) -> None:
        """Reads one chunk into memory; whoever reads the last one reports the load."""
        job, buffer = load.job, self._read_buffers.get()
        try:
            if not (job.is_cancelled or load.failed.is_set() or self._is_closing.is_set()):
                load.reader.read_chunk(chunk, buffer.bytes[: chunk.num_bytes])
                self._transfer.restore(chunk, job.pages, job.checkpoint, buffer, job.fence, job.first_page)
            else:
                load.failed.set()
        except ChunkError:
            load.failed.set()  # counted and said by the store
        except BaseException:
            load.failed.set()
            _log.exception("a prefix of %d tokens could not be read", job.entry.num_tokens)
        finally:
            self._read_buffers.put(buffer)
            if load.is_last():
                self._end_load(load)

    def _end_load(self, load: "_Load") -> None:
        job = load.job
        load.reader.close()
        job.seconds = time.monotonic() - load.began
        job.is_complete = not load.failed.is_set()
        if job.is_complete:
            self._rates.observe_read(job.num_bytes, job.seconds)
        self._report_load(job)

    def _report_load(self, job: LoadJob) -> None:
        self._loaded.put(job)
        self._tell()

    def _tell(self) -> None:
        self._latest = self._directory.stats()
        self._has_news = True
        self.on_news()

    # The writer.

    def _write_all(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                if isinstance(order, WriteJob):
                    self._write(order)
                else:
                    order()
            except NotStoredError:
                pass  # counted and said by the store
            except BaseException:
                _log.exception("a prefix could not be written")
            finally:
                if isinstance(order, WriteJob):
                    order.is_over = True
                    self._tell()

    def _write(self, job: WriteJob) -> None:
        keys = prefix_keys([*itertools.chain.from_iterable(job.page_tokens)])
        try:
            writer = self._directory.write(keys)
        except NotStoredError as error:
            job.is_stored = error.reason == "exists"
            raise
        is_first = self._directory.stats().num_entries == 0
        with writer:
            if self._write_chunks(job, writer):
                writer.commit()
                job.is_stored = True
        if job.is_stored and job.is_pinned:
            self._directory.pin(keys[-1])
        if job.is_stored and is_first:
            self._directory.save_rates(self._rates.saved)

    def _write_chunks(self, job: WriteJob, writer: EntryWriter) -> bool:
        """Copies and writes what the disk does not have; False where the engine's thread wants its pages back."""
        # The state first: checkpoints are fewer than pages, and sooner missed.
        missing = sorted(writer.missing, key=part_of)
        job.leave([part for part in job.held if part not in {part_of(chunk) for chunk in missing}])
        for place, chunk in enumerate(missing):
            part, began = part_of(chunk), time.monotonic()
            if self._is_closing.is_set() or not job.begin_copy(part):
                return False
            try:
                payload = self._transfer.save(chunk, job.pages, job.checkpoint, self._buffers[0], job.fence)
            finally:
                is_last = place + 1 == len(missing) or part_of(missing[place + 1]) != part
                job.end_copy(part, is_last=is_last)
            if is_last:
                self._tell()
            writer.write_chunk(chunk, [payload])
            self._hold_back(chunk.num_bytes, time.monotonic() - began)
        return not job.is_cancelled

    def _hold_back(self, num_bytes: int, seconds: float) -> None:
        """Waits until the bytes are within the bandwidth."""
        rest = num_bytes / MAX_WRITE_BYTES_PER_S - seconds
        if rest > 0 and not self._is_hurried:
            self._is_closing.wait(rest)

    def _remove_path(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._directory.remove(key)

    def _remove_all(self) -> None:
        for key in self._directory.entry_keys():
            self._directory.remove(key)

    # The tender.

    def _tend_all(self) -> None:
        while not self._is_closing.wait(_TEND_S):
            try:
                self._directory.tend()
                self._latest = self._directory.stats()
            except BaseException:
                _log.exception("the prefixes on disk could not be tended")


class _Load:
    """A load that readers are at."""

    def __init__(self, job: LoadJob, reader: EntryReader, began: float) -> None:
        self.job = job
        self.reader = reader
        self.began = began
        self.failed = threading.Event()
        self._num_left = itertools.count(len(job.chunks) - 1, -1)

    def is_last(self) -> bool:
        """Called once after each chunk; True after the last."""
        return next(self._num_left) == 0
