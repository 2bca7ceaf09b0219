"""Opens damaged and made-up directories: nothing is raised but what is promised, and no byte that is read is wrong."""

import random
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

from benchmarks.prefix_store.damage import damage
from benchmarks.prefix_store.making import keys_of, opened, read_back, require, store
from onebox.spec.errors import OneboxError
from onebox.store.chunk import ChunkError
from onebox.store.directory import NotStoredError, PrefixDirectory
from onebox.store.survey import PrefixSurvey

__all__ = ["Fuzzer"]

_CANARY = b"must not change"
_PREFIXES = [(1, 40), (1, 17), (2, 34), (3, 5)]


class Fuzzer:
    """Makes one directory, then damaged copies of it in `work`."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._whole = work / "whole"
        self._keys = [keys_of(seed, num_pages, min(num_pages, 16)) for seed, num_pages in _PREFIXES]
        for parts in ({"weights": "a"}, {"weights": "b"}):
            directory = opened(self._whole, parts=parts)
            for keys in self._keys:
                store(directory, keys)
            directory.pin(self._keys[0][-1])
            directory.save_rates({"read": 1.0})
            directory.close()
        self.counts: Counter[str] = Counter()

    def run(self, seed: int) -> None:
        """One directory; raises AssertionError, or whatever was not promised."""
        case = self._work / f"case-{seed}"
        shutil.copytree(self._whole, case / "prefixes", copy_function=shutil.copy)
        (case / "canary").write_bytes(_CANARY)
        try:
            self._check(random.Random(seed), case)
        except Exception as error:
            error.add_note(f"The directory of seed {seed} is left in {case}.")
            raise
        require((case / "canary").read_bytes() == _CANARY, f"Seed {seed} changed a file outside the directory.")
        shutil.rmtree(case)

    def _check(self, draw: random.Random, case: Path) -> None:
        root = case / "prefixes"
        if draw.random() < 0.3:  # open while it is damaged
            directory = opened(root, parts={"weights": "a"})
            self.counts.update(damage(draw, root))
        else:
            self.counts.update(damage(draw, root))
            directory = opened(root, parts={"weights": "a"})
        strangers = _strangers(root)
        self._look(root)
        self._use(directory)
        directory.load_rates()
        directory.save_rates({"read": 2.0})
        directory.tend()
        self._repair(root)
        self.counts.update({f"damaged: {reason}": count for reason, count in directory.stats().damaged.items()})
        directory.close()
        after = opened(root, budget_bytes=draw.choice([1, 60_000, 1 << 30]), parts={"weights": "c"})
        with suppress(NotStoredError):
            store(after, self._keys[1])
            self.counts["stored by another family"] += 1
        after.close()
        require(strangers <= _strangers(root), "A file that is not ours was removed.")

    def _use(self, directory: PrefixDirectory) -> None:
        for keys in self._keys:
            while (entry := directory.find(keys)) is not None:
                try:
                    read_back(directory, entry)
                    self.counts["read"] += 1
                    break
                except ChunkError as error:
                    # The next one found is another: an entry that could not be read is found no more.
                    self.counts[f"miss: {error.reason.value}"] += 1
                    require(not directory.has(entry.key), "A damaged entry is still found.")
            directory.pin(keys[-1])
            with suppress(NotStoredError):
                store(directory, keys)
                self.counts["stored again"] += 1
            entry = directory.find(keys)
            if entry is not None:
                with suppress(ChunkError):
                    read_back(directory, entry)
            directory.unpin(keys[-1])

    def _look(self, root: Path) -> None:
        survey = PrefixSurvey(root)
        survey.summaries()
        if not _has_huge_file(root):
            self.counts["problems"] += len(list(survey.problems()))

    def _repair(self, root: Path) -> None:
        if _has_huge_file(root):
            return
        survey = PrefixSurvey(root)
        with suppress(OneboxError):
            survey.remove_problems(list(survey.problems()))
            survey.remove_leftovers()
            left = [problem for problem in PrefixSurvey(root).problems() if problem.path.is_file()]
            require(not left, f"Damage that was removed is still there: {left}")


def _strangers(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*") if path.is_file() and path.stat().st_size < 20 and _is_strange(path)}


def _is_strange(path: Path) -> bool:
    return path.read_bytes() == b"not ours"


def _has_huge_file(root: Path) -> bool:
    """One that takes minutes to read."""
    return any(path.is_file() and path.stat().st_size > 1 << 30 for path in root.rglob("*"))
