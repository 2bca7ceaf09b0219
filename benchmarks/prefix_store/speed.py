"""What a directory costs: bytes a second of writing and reading beside the disk's own, and looking entries up."""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from benchmarks.prefix_store.making import PARTS, tokens_of
from onebox.spec.kv import PAGE_TOKENS
from onebox.store.chunk import BLOCK_BYTES
from onebox.store.chunk_file import aligned_buffer
from onebox.store.directory import PrefixDirectory
from onebox.store.entry import ChunkLayout, PrefixEntry, new_entry
from onebox.store.entry_file import write_entry
from onebox.store.keys import prefix_keys

__all__ = ["measure_files", "measure_index"]

CHUNK_BYTES = 24 << 20
"""About a run of 16 pages of a 122B-class model with an FP8 KV cache."""
_NUM_CHUNKS = 16
_TRIES = 3


def measure_files(work: Path, num_threads: int) -> dict[str, float]:
    """GB/s of the store and of plain direct reads and writes of the same sizes in `work`, and of sha256 alone."""
    payload = random.Random(0).randbytes(CHUNK_BYTES)
    buffers = [aligned_buffer(CHUNK_BYTES) for _ in range(num_threads)]
    for buffer in buffers:
        buffer[:] = payload
    with tempfile.TemporaryDirectory(dir=work) as folder, ThreadPoolExecutor(num_threads) as pool:
        root = Path(folder)

        def on_threads(task: Callable[[int, memoryview], None]) -> float:
            """GB/s of `task` for every chunk, the best of some tries."""

            def share(thread: int) -> None:
                for number in range(thread, _NUM_CHUNKS, num_threads):
                    task(number, buffers[thread])

            times = []
            for _ in range(_TRIES):
                begin = time.perf_counter()
                list(pool.map(share, range(num_threads)))
                times.append(time.perf_counter() - begin)
            return _NUM_CHUNKS * CHUNK_BYTES / min(times) / 1e9

        figures = {
            "raw write": on_threads(lambda number, buffer: _raw_write(root / f"raw-{number}", buffer)),
            "raw read": on_threads(lambda number, buffer: _raw_read(root / f"raw-{number}", buffer)),
            "sha256": on_threads(lambda _, buffer: _hash(buffer)),
        }
        layout = ChunkLayout(page_bytes=CHUNK_BYTES // 16, state_bytes=(BLOCK_BYTES,))
        directory = PrefixDirectory(root / "prefixes", PARTS, layout, 1 << 40)
        writer = directory.write(prefix_keys(tokens_of(1, 16 * _NUM_CHUNKS)))
        chunks = writer.missing
        figures["store write"] = on_threads(lambda number, buffer: writer.write_chunk(chunks[number], [buffer]))
        writer.write_chunk(chunks[-1], [memoryview(bytes(BLOCK_BYTES))])
        with directory.read(writer.commit()) as reader:
            figures["store read"] = on_threads(lambda number, buffer: reader.read_chunk(chunks[number], buffer))
    return figures


def _raw_write(path: Path, buffer: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    os.pwrite(descriptor, buffer, 0)
    os.fsync(descriptor)
    os.close(descriptor)


def _raw_read(path: Path, buffer: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    os.preadv(descriptor, [buffer], 0)
    os.close(descriptor)


def _hash(buffer: memoryview) -> None:
    sha256(buffer).digest()


def measure_index(work: Path, num_entries: int, num_tokens: int) -> dict[str, float]:
    """Milliseconds: keys of a prompt, `find` that misses and that hits, opening, following, and `tend` at rest."""
    layout = ChunkLayout(page_bytes=64, state_bytes=(64,))
    with tempfile.TemporaryDirectory(dir=work) as folder:
        root = Path(folder)
        path = root / PrefixDirectory(root, PARTS, layout, 1 << 40).fingerprint
        (path / "entries").mkdir(parents=True)
        draw = random.Random(1)
        for _ in range(num_entries):
            keys = [draw.randbytes(20) for _ in range(draw.randint(16, num_tokens // PAGE_TOKENS))]
            _put_entry(path, new_entry(keys, layout))
        # Of each entry only its own file is there: opening would take them for damaged.
        _keep_incomplete()
        begin = time.perf_counter()
        directory = PrefixDirectory(root, PARTS, layout, 1 << 40)
        opening = time.perf_counter() - begin
        if directory.stats().num_entries != num_entries:
            raise RuntimeError("Not all entries were read.")
        tokens = tokens_of(1, num_tokens // PAGE_TOKENS)
        keys = prefix_keys(tokens)
        figures = {"open": 1e3 * opening, "keys": _ms(lambda: prefix_keys(tokens))}
        figures["find, miss"] = _ms(lambda: directory.find(keys))
        _put_entry(path, new_entry(keys[: len(keys) // 2], layout))
        directory._next_follow = 0.0
        begin = time.perf_counter()
        directory.tend()
        figures["follow one new"] = 1e3 * (time.perf_counter() - begin)
        begin = time.perf_counter()
        if directory.find(keys) is None:
            raise RuntimeError("The entry was not found.")
        figures["find, first hit"] = 1e3 * (time.perf_counter() - begin)
        figures["find, hit"] = _ms(lambda: directory.find(keys))
        figures["tend at rest"] = _ms(directory.tend)
        figures["stats"] = _ms(directory.stats)
    return figures


def _keep_incomplete() -> None:
    from onebox.store.family import Family

    Family.incomplete = lambda _: []  # type: ignore[method-assign]


def _put_entry(family: Path, entry: PrefixEntry) -> None:
    descriptor = os.open(family / "entries" / entry.key.hex(), os.O_RDWR | os.O_CREAT, 0o600)
    write_entry(descriptor, bytes.fromhex(family.name), entry)
    os.close(descriptor)


def _ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(21):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)
