"""`python -m benchmarks.prefix_store fuzz|kill|contend|speed`: prefixes on disk under attack, and measured."""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.prefix_store.contend import BUDGET_BYTES, contend
from benchmarks.prefix_store.fuzz import Fuzzer
from benchmarks.prefix_store.kill import kill_writer, leftovers
from benchmarks.prefix_store.making import opened, require
from benchmarks.prefix_store.speed import measure_files, measure_index

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["fuzz", "kill", "contend", "speed"])
    parser.add_argument("--work", type=Path, help="a directory to work in; default: the temporary one")
    parser.add_argument(
        "--count", type=int, help="directories (fuzz), kills, steps of each process, or entries (speed)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed (fuzz, kill)")
    parser.add_argument("--processes", type=int, default=4, help="that share the directory (contend)")
    given = parser.parse_args(arguments)
    logging.disable()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.work, prefix="onebox-prefixes-") as work:
        runs = {"fuzz": _fuzz, "kill": _kill, "contend": _contend, "speed": _speed}
        result = runs[given.what](Path(work), given)
    print(json.dumps({"what": given.what, "seconds": round(time.monotonic() - begin, 1), **result}))
    return 0


def _fuzz(work: Path, given: argparse.Namespace) -> dict[str, object]:
    count = given.count or 10_000
    os.fsync = lambda _: None  # type: ignore[assignment]  # nothing here loses power
    fuzzer = Fuzzer(work)
    for number in range(count):
        fuzzer.run(given.first + number)
        if number % 500 == 499:
            print(f"{number + 1:,} directories", flush=True)
    return {"directories": count, "counts": dict(sorted(fuzzer.counts.items()))}


def _kill(work: Path, given: argparse.Namespace) -> dict[str, object]:
    root = work / "prefixes"
    whole = [kill_writer(root, given.first + number) for number in range(given.count or 50)]
    return {"kills": len(whole), "whole_entries": whole}


def _contend(work: Path, given: argparse.Namespace) -> dict[str, object]:
    root = work / "prefixes"
    contend(root, given.processes, given.count or 200)
    for family in "ab":
        directory = opened(root, BUDGET_BYTES, {"weights": family})
        require(directory.stats().total_bytes <= BUDGET_BYTES, "The budget does not hold.")
        directory.close()
    require(not leftovers(root), f"Files that nobody needs are left: {leftovers(root)}")
    return {"processes": given.processes}


def _speed(work: Path, given: argparse.Namespace) -> dict[str, object]:
    files = {f"{num_threads} threads": measure_files(work, num_threads) for num_threads in (1, 2, 4)}
    index = measure_index(work, given.count or 10_000, 100_000)
    for name, figures in files.items():
        print(f"{name}: " + ", ".join(f"{what} {value:.2f} GB/s" for what, value in figures.items()))
    print(", ".join(f"{what} {value:.3f} ms" for what, value in index.items()))
    return {"gigabytes_per_second": files, "milliseconds": index}


if __name__ == "__main__":
    sys.exit(main())
