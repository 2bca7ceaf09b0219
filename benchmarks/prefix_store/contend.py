"""Several processes write, evict, read, pin and remove in one directory at once, with budgets for a few entries.

`python -m benchmarks.prefix_store.contend ROOT SEED STEPS FAMILY` is one of them: it exits with status 1 at the first
wrong byte or error that was not promised.
"""

import random
import subprocess
import sys
from pathlib import Path

from benchmarks.prefix_store.making import keys_of, opened, read_back, require, store
from onebox.store.chunk import ChunkError
from onebox.store.directory import NotStoredError, PrefixDirectory

__all__ = ["BUDGET_BYTES", "contend", "main"]

BUDGET_BYTES = 300_000
_NUM_PREFIXES = 8


def contend(root: Path, num_processes: int, num_steps: int) -> None:
    """Runs the processes to their end, on two families; raises AssertionError with what one of them printed."""
    arguments = [(str(root), str(seed), str(num_steps), "ab"[seed % 2]) for seed in range(num_processes)]
    command = [sys.executable, "-m", "benchmarks.prefix_store.contend"]
    running = [
        subprocess.Popen([*command, *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for given in arguments
    ]
    printed = [process.communicate()[0] for process in running]
    for process, text in zip(running, printed, strict=True):
        require(process.returncode == 0, text)


def main(arguments: list[str] | None = None) -> int:
    root, seed, num_steps, family = arguments or sys.argv[1:]
    draw = random.Random(int(seed))
    directory = opened(Path(root), BUDGET_BYTES, {"weights": family})
    counts = {"read": 0, "missed": 0, "stored": 0, "not stored": 0}
    for _ in range(int(num_steps)):
        _step(draw, directory, counts)
    directory.close()
    print(counts)
    return 0


def _step(draw: random.Random, directory: PrefixDirectory, counts: dict[str, int]) -> None:
    keys = keys_of(draw.randrange(_NUM_PREFIXES), draw.choice([5, 17, 33]), 4)
    choice = draw.random()
    entry = directory.find(keys)
    if entry is not None:
        try:
            read_back(directory, entry)
            counts["read"] += 1
        except ChunkError:
            counts["missed"] += 1
    if choice < 0.6:
        try:
            store(directory, keys)
            counts["stored"] += 1
        except NotStoredError:
            counts["not stored"] += 1
    elif choice < 0.7:
        directory.pin(keys[-1])
    elif choice < 0.8:
        directory.unpin(keys[-1])
    elif choice < 0.9:
        directory.remove(keys[-1])
    else:
        directory.tend()


if __name__ == "__main__":
    sys.exit(main())
