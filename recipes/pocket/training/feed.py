"""What a training step reads: rows of real text, and rows of generated examples that other processes keep making.

A row is `length` + 2 tokens, for the last token's label and its draft's. Documents follow each other in a row and
states flow over their ends: the model learns to forget at <|endoftext|>, which costs less than cutting every kernel's
work into documents. Every row of examples begins with one, so that examples after an empty state are common.
"""

import ctypes
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onebox.spec.errors import UnreadableError

__all__ = [
    "ANSWER_WEIGHT",
    "Batch",
    "ExamplePool",
    "Feed",
    "MixedFeed",
    "Rendered",
    "TextRows",
    "ToyFeed",
    "Work",
    "fill_row",
    "num_workers",
]

EXTRA_TOKENS = 2
ANSWER_WEIGHT = 2
"""A label inside an answer counts twice: answers are a small part of an example, and all that is asked of the model."""

EXAMPLE_SHARE = 0.6
"""Of the rows of a batch, those made of generated examples; the others are real text."""
_EVEN_OUT = 0.85
"""Text sources are drawn by their size to this power: small languages more often, without repeating them too often."""
_MIN_ROWS = 64
_MAX_REDRAWS = 8
_FEW_REDRAWS = 2
_SHORT_ROWS_PER_LONG = 3
"""Tokens made for short rows per token made for long ones, while both are needed."""

Ids = NDArray[np.uint16]
Kinds = NDArray[np.uint8]


@dataclass(frozen=True)
class Batch:
    """tokens and kinds [B, T + 2]; a kind is the place in `Feed.kinds` of what a token belongs to."""

    tokens: NDArray[np.int64]
    kinds: NDArray[np.int64]


class Feed(Protocol):
    """Where batches come from. `kinds` names what losses are counted by; those in `answers` have ANSWER_WEIGHT."""

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def answers(self) -> frozenset[int]: ...

    def batch(self, num_rows: int, length: int) -> Batch: ...


@dataclass(frozen=True)
class Rendered:
    """One example as token ids, the first of which from `answer_start` on are the answer, and its workload's name."""

    ids: Sequence[int]
    answer_start: int
    workload: str


class TextRows:
    """The token files of the real text: rows from anywhere in them."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        index = directory / "index.json"
        if not index.exists():
            raise UnreadableError(f"{index} does not exist: run `python -m recipes.pocket.prepare` first.")
        self.sources: list[str] = list(json.loads(index.read_text(encoding="utf-8")))
        self._tokens = [np.fromfile(directory / "tokens" / f"{name}.bin", dtype=np.uint16) for name in self.sources]
        sizes = np.array([len(tokens) for tokens in self._tokens], dtype=np.float64)
        self._shares = sizes**_EVEN_OUT / (sizes**_EVEN_OUT).sum()
        self._random = np.random.default_rng(seed)

    def row(self, length: int) -> tuple[int, Ids]:
        """A source's place in `sources` and `length` + 2 of its tokens; a shorter source is repeated."""
        source = int(self._random.choice(len(self.sources), p=self._shares))
        tokens = self._tokens[source]
        start = int(self._random.integers(max(1, len(tokens) - length - EXTRA_TOKENS)))
        return source, np.resize(tokens[start : start + length + EXTRA_TOKENS], length + EXTRA_TOKENS)


def fill_row(
    draw: Callable[[Random], Rendered],
    random: Random,
    end_token: int,
    kind_of: Mapping[str, int],
    ids: Ids,
    kinds: Kinds,
) -> None:
    """Fills `ids` with examples, each ended by `end_token`, and `kinds` with what each token belongs to (0: a prompt).

    An example that does not fit is drawn anew a few times; what no example fits is ended with the beginning of one.
    """
    at, size = 0, len(ids)
    while at < size:
        for _ in range(_MAX_REDRAWS if at == 0 else _FEW_REDRAWS):
            example = draw(random)
            if at + len(example.ids) < size:
                break
        stop = min(size, at + len(example.ids))
        ids[at:stop] = example.ids[: stop - at]
        kinds[at:stop] = 0
        kinds[min(stop, at + example.answer_start) : stop] = kind_of[example.workload]
        if stop < size:
            ids[stop], kinds[stop] = end_token, 0
        at = stop + 1


class ExamplePool:
    """Rows of examples in shared memory, which worker processes fill one after the other, for ever.

    The trainer takes any rows that are there. If it is faster than the workers it sees rows again, and it never waits.
    A row that is overwritten while it is read is a row of two halves, which is as good as any.
    """

    def __init__(self, lengths: Mapping[int, int], seed: int = 0) -> None:
        """`lengths` gives the number of rows kept of each length."""
        self._rows = {length: _SharedRows(count, length + EXTRA_TOKENS) for length, count in lengths.items()}
        self._random = np.random.default_rng(seed)
        self._longest_only = multiprocessing.RawValue(ctypes.c_bool, False)
        self._processes: list[Any] = []

    def start(self, num_workers: int, work: "Work") -> None:
        """Forks the workers. Call it before anything touches a GPU, which a forked process could not use."""
        context = multiprocessing.get_context("fork")
        for worker in range(num_workers):
            process = context.Process(target=self._fill, args=(worker, num_workers, work), daemon=True)
            process.start()
            self._processes.append(process)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()

    def only_longest(self) -> None:
        """From now on nobody needs shorter rows."""
        self._longest_only.value = True

    def num_made(self) -> dict[int, int]:
        """Rows made so far of each length."""
        return {length: rows.num_made for length, rows in self._rows.items()}

    def is_ready(self) -> bool:
        return all(rows.num_made >= min(_MIN_ROWS, rows.count) for rows in self._rows.values())

    def rows(self, count: int, length: int) -> tuple[Ids, Kinds]:
        """`count` rows [count, length + 2] that were made already, and their kinds."""
        rows = self._rows[length]
        chosen = self._random.integers(min(rows.num_made, rows.count), size=count)
        return rows.ids[chosen], rows.kinds[chosen]

    def make_row(self, length: int, draw: Callable[[Random], Rendered], random: Random, work: "Work") -> None:
        """Puts one more row of this length into the pool, in place of the oldest."""
        rows = self._rows[length]
        place = rows.next_place()
        fill_row(draw, random, work.end_token, work.kind_of, rows.ids[place], rows.kinds[place])
        rows.finish()

    def _fill(self, worker: int, num_workers: int, work: "Work") -> None:
        # Every row has a seed of its own; those from 10**9 on are held out, and no run gets that far.
        seed = worker
        draw = work.make_draw()
        short, long = min(self._rows), max(self._rows)
        lengths = [long] + [short] * (_SHORT_ROWS_PER_LONG * long // short)
        while True:
            for length in [long] if self._longest_only.value else lengths:
                self.make_row(length, draw, Random(seed), work)  # noqa: S311
                seed += num_workers


class _SharedRows:
    """`count` rows of `width` tokens and their kinds, in memory that forked processes share."""

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.ids: Ids = np.ctypeslib.as_array(multiprocessing.RawArray(ctypes.c_uint16, count * width))
        self.ids = self.ids.reshape(count, width)
        self.kinds: Kinds = np.ctypeslib.as_array(multiprocessing.RawArray(ctypes.c_uint8, count * width))
        self.kinds = self.kinds.reshape(count, width)
        self._taken = multiprocessing.Value(ctypes.c_int64, 0)
        self._made = multiprocessing.Value(ctypes.c_int64, 0)

    @property
    def num_made(self) -> int:
        return self._made.value

    def next_place(self) -> int:
        with self._taken.get_lock():
            self._taken.value += 1
            return (self._taken.value - 1) % self.count

    def finish(self) -> None:
        with self._made.get_lock():
            self._made.value += 1


@dataclass(frozen=True)
class Work:
    """What a worker does: `make_draw` is called once in its process."""

    make_draw: Callable[[], Callable[[Random], Rendered]]
    end_token: int
    kind_of: Mapping[str, int]


class MixedFeed:
    """Rows of text and of examples in one batch. Kind 0 is a prompt; then come sources, then workloads' answers."""

    def __init__(self, text: TextRows, pool: ExamplePool, workloads: Sequence[str]) -> None:
        self._text, self._pool = text, pool
        self.kinds = ("prompts", *text.sources, *workloads)
        self.answers = frozenset(range(1 + len(text.sources), len(self.kinds)))

    def batch(self, num_rows: int, length: int) -> Batch:
        num_examples = round(num_rows * EXAMPLE_SHARE)
        tokens = np.empty((num_rows, length + EXTRA_TOKENS), np.int64)
        kinds = np.empty_like(tokens)
        tokens[:num_examples], kinds[:num_examples] = self._pool.rows(num_examples, length)
        for place in range(num_examples, num_rows):
            source, tokens[place] = self._text.row(length)
            kinds[place] = 1 + source
        return Batch(tokens, kinds)


def num_workers() -> int:
    """All cores but one, which feeds the GPU."""
    return max(1, (os.cpu_count() or 1) - 1)


class ToyFeed:
    """Rows that count upwards from anywhere: what a toy model learns within a few steps, from no data at all."""

    kinds = ("prompts", "counting")
    answers = frozenset({1})

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def batch(self, num_rows: int, length: int) -> Batch:
        starts = self._random.integers(self._vocab_size, size=(num_rows, 1))
        tokens = (starts + np.arange(length + EXTRA_TOKENS)) % self._vocab_size
        kinds = np.ones_like(tokens)
        kinds[:, : length // 2] = 0
        return Batch(tokens, kinds)
