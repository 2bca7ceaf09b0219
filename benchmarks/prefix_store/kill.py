"""Kills writers at random moments: what was written whole is read, everything else is removed at the next start.

`python -m benchmarks.prefix_store.kill ROOT SEED` is such a writer: it writes entries until it is killed.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.prefix_store.making import files_in, keys_of, opened, read_back, require, store
from onebox.store.family import Family

__all__ = ["kill_writer", "leftovers", "main"]

BUDGET_BYTES = 400_000
_NUM_PREFIXES = 12


def kill_writer(root: Path, seed: int) -> int:
    """Kills one writer, checks what it left, and returns how many entries are whole."""
    command = [sys.executable, "-m", "benchmarks.prefix_store.kill", str(root), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        if writer.stdout:
            writer.stdout.readline()  # it has begun
        time.sleep(random.Random(seed).uniform(0, 0.2))
        writer.kill()
    return check(root)


def check(root: Path) -> int:
    """Opens the directory: every entry is whole, the budget holds, and no file is there that nobody would delete."""
    directory = opened(root, BUDGET_BYTES)
    num_whole = 0
    for seed in range(_NUM_PREFIXES):
        entry = directory.find(keys_of(seed, 40, 16))
        if entry is not None:
            read_back(directory, entry)
            num_whole += 1
    stats = directory.stats()
    require(not stats.damaged, f"A killed writer left damage: {stats.damaged}")
    require(stats.total_bytes <= BUDGET_BYTES, f"{stats.total_bytes:,} bytes are over the budget.")
    left = leftovers(root)
    require(not left, f"Files that no entry has are left: {left}")
    directory.close()
    return num_whole


def leftovers(root: Path) -> list[str]:
    """Files of families that no entry needs, and of writers."""
    left = []
    for family in (path for path in root.iterdir() if path.is_dir()):
        known = Family(family)
        known.refresh()
        needed = {chunk.file_name for record in known.entries.values() for chunk in record.entry.chunks}
        needed |= {key.hex() for key in known.entries} | {"about.json", "rates.json", "lock"}
        left += [name for name in files_in(family) if name.rpartition("/")[2] not in needed]
    return left


def main(arguments: list[str] | None = None) -> int:
    root, seed = arguments or sys.argv[1:]
    draw = random.Random(int(seed))
    directory = opened(Path(root), BUDGET_BYTES)
    print("writing", flush=True)
    while True:
        keys = keys_of(draw.randrange(_NUM_PREFIXES), 40, 16)[: draw.choice([18, 33, 40])]
        if directory.has(keys[-1]):
            directory.remove(keys[-1])
        store(directory, keys)


if __name__ == "__main__":
    sys.exit(main())
