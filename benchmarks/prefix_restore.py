"""How fast a long prefix comes from disk into a GPU's memory, and what writing one costs answers that run meanwhile.

    python benchmarks/prefix_restore.py [--shape qwen3.5-122b-a10b] [--tokens 100000] [--rounds 3] [--directory DIR]

Random weights at full size, the engine as it serves, all in one process. "write" compares four streams alone with the
same four for as long as a prompt's prefix is written behind them. "restore" drops every prefix from memory and its
files from the page cache and asks for the prompt again: bytes read over the time to its first token. "disk" reads the
same files with direct reads, as many at a time as is fastest, and drops the bytes. The last line is JSON.
"""

import argparse
import itertools
import json
import math
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.engine.api import Engine, EngineConfig, PrefixDiskConfig, Request, RequestHandle, SamplingParams, Tokens
from onebox.engine.disk.layout import PrefixLayout
from onebox.engine.disk.tier import DiskTier
from onebox.engine.disk.transfer import PrefixTransfer
from onebox.engine.runner import ModelRunner
from onebox.model.dummy import HYBRID, dummy_model
from onebox.model.memory import Memory, MemoryShape
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.shapes import named_spec
from onebox.store.directory import PrefixDirectory

GOALS = {"restore_over_disk": 0.7, "write_cost": 0.02}
STREAMS, STREAM_TOKENS = 4, 700
NUM_READERS = 3
BUDGET_BYTES = 32 << 30


def open_engine(shape: str, num_tokens: int, root: Path) -> Engine:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        model = dummy_model(named_spec(shape), HYBRID, device)
        num_pages = 3 * (num_tokens // PAGE_TOKENS + 2) + STREAMS * (STREAM_TOKENS // PAGE_TOKENS + 3)
        disk = PrefixDiskConfig(str(root), BUDGET_BYTES)
        config = EngineConfig(
            num_tokens + STREAM_TOKENS, num_pages, num_checkpoints=16, max_num_seqs=STREAMS + 1, prefix_disk=disk
        )
        kv = MemoryShape(KVFormat.parse("bf16"), 1 + num_pages, config.max_num_seqs, 16, 1, with_mtp=False)
        runner = ModelRunner(model, Memory.allocate(model.spec, kv, model.dtype, device), config)
        if device.type == "cuda":
            runner.capture_graphs()
    layout = PrefixLayout(runner.memory, runner.first_checkpoint)
    directory = PrefixDirectory(root, {"benchmark": shape}, layout.chunks, BUDGET_BYTES)
    return Engine(runner, config, disk=DiskTier(directory, PrefixTransfer(layout, device), NUM_READERS))


def prompt(engine: Engine, num_tokens: int, name: str) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(engine.vocab_size), k=num_tokens))


def first_token_seconds(engine: Engine, tokens: tuple[int, ...]) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    for _ in engine.submit(Request(f"long-{began}", tokens, sampling)):
        pass
    return time.perf_counter() - began


def stream_events(engine: Engine, name: str) -> list[tuple[float, int]]:
    """(time, tokens) of everything that the streams say together, in order."""
    sampling = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    requests = [
        Request(f"{name}-{stream}", prompt(engine, 32, f"{name}-{stream}"), sampling, cache_prompt=False)
        for stream in range(STREAMS)
    ]

    def listen(handle: RequestHandle) -> list[tuple[float, int]]:
        return [(time.perf_counter(), len(event.token_ids)) for event in handle if isinstance(event, Tokens)]

    with ThreadPoolExecutor(STREAMS) as pool:
        return sorted(itertools.chain(*pool.map(listen, engine.submit_all(requests))))


def speed(events: list[tuple[float, int]], until: float = math.inf) -> float:
    """Tokens a second after the first ones."""
    inside = [(at, count) for at, count in events if at <= until]
    return sum(count for _, count in inside[STREAMS:]) / (inside[-1][0] - inside[STREAMS - 1][0])


def wait_written(engine: Engine) -> float:
    """The time at which everything was on disk."""
    scheduler = engine._scheduler
    while scheduler._prefix._unwritten or scheduler._disk.is_busy:
        time.sleep(0.01)
    return time.perf_counter()


def drop_page_cache(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_direct(path: Path) -> None:
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    with mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE) as memory:
        done = 0
        while done < size:
            done += os.preadv(descriptor, [memoryview(memory)[done:]], done)
    os.close(descriptor)


def disk_speed(files: list[Path]) -> float:
    """Bytes a second, the best of several numbers of threads."""
    best, total = 0.0, sum(path.stat().st_size for path in files)
    for threads in (1, NUM_READERS, 2 * NUM_READERS):
        drop_page_cache(files)
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_direct, files))
        best = max(best, total / (time.perf_counter() - began))
    return best


def run(engine: Engine, root: Path, num_tokens: int, rounds: int) -> dict[str, object]:
    stream_events(engine, "warm")
    costs, restores, disks, cold = [], [], [], []
    for number in range(rounds):
        tokens = prompt(engine, num_tokens, f"long-{number}")
        alone = speed(stream_events(engine, f"alone-{number}"))
        written = engine.stats().disk.written_bytes
        cold.append(first_token_seconds(engine, tokens))
        with ThreadPoolExecutor(1) as pool:
            end = pool.submit(wait_written, engine)
            beside = stream_events(engine, f"beside-{number}")
            costs.append(1 - speed(beside, end.result()) / alone)
        during = engine.stats().disk.written_bytes - written
        engine._scheduler._prefix.clear()
        files = [path for path in root.glob("*/chunks/*/*") if path.is_file()]
        drop_page_cache(files)
        before = engine.stats().disk.read_bytes
        seconds = first_token_seconds(engine, (*tokens, 1))
        num_bytes = engine.stats().disk.read_bytes - before
        restores.append(num_bytes / seconds)
        disks.append(disk_speed(files))
        print(
            f"round {number}: cold {cold[-1]:.2f} s; {during / 1e9:.2f} GB written beside the streams, which were "
            f"{costs[-1]:.1%} slower ({alone:.0f} tok/s alone); {num_bytes / 1e9:.2f} GB restored in {seconds:.3f} s, "
            f"{restores[-1] / 1e9:.2f} GB/s; the disk {disks[-1] / 1e9:.2f} GB/s"
        )
    ratio = statistics.median(a / b for a, b in zip(restores, disks, strict=True))
    return {"restore_over_disk": ratio, "write_cost": statistics.median(costs), "cold_s": cold, "goals": GOALS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3.5-122b-a10b")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=arguments.directory, prefix="onebox-bench-"))
    try:
        with open_engine(arguments.shape, arguments.tokens, root) as engine:
            print(json.dumps(run(engine, root, arguments.tokens, arguments.rounds)))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
