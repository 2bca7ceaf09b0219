"""The batches of training: rows of real text, and rows of generated examples that worker processes keep producing.

A row has `length` + 2 tokens: the last position needs a label for its next token and one for its draft. A row holds
several documents, and states are not reset between them: the model learns to forget at <|endoftext|>, which costs less
than splitting the work of every kernel by documents. Every row of examples starts with a whole example, so examples
that start from an empty state are common.
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
import torch
from numpy.typing import NDArray

from onebox.spec.errors import MismatchError, UnreadableError
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.synthetic.filler import use_documents
from recipes.pocket.synthetic.recall import recall, recalls
from recipes.pocket.synthetic.workloads import SHARES, WORKLOADS, render
from recipes.pocket.training.vision import PictureBatch

__all__ = [
    "ANSWER_WEIGHT",
    "UNSEEN",
    "Draw",
    "ExamplePool",
    "Feed",
    "MixedFeed",
    "Rendered",
    "TextRows",
    "ToyFeed",
    "TrainingBatch",
    "WorkerTask",
    "end_token",
    "example_task",
    "fill_row",
    "num_workers",
    "yield_to_trainer",
]

EXTRA_TOKENS = 2
ANSWER_WEIGHT = 2.0
"""Loss weight of labels inside an answer: answers are a small part of an example, and the part that matters."""

EXAMPLE_SHARE = 0.6
"""Share of a batch's rows that are generated examples; the others are real text."""
_SIZE_EXPONENT = 0.85
"""Sources are drawn with probability proportional to size to this power: small languages more often, but not much."""
_MIN_ROWS, _READY_TOKENS = 4, 65_536
"""Rows of each length, and tokens in them, that there must be before the training starts."""
_MAX_FIRST_REDRAWS = 8
_MAX_LATER_REDRAWS = 2
_LONG_ROW = 6000
"""Where so many tokens are left in a row, most examples hide a key in that many: nothing else teaches long contexts."""
_LONG_SHARE = 0.7
_ONE_QUESTION_SHARE = 0.3
"""Of these: with one key, at a depth of its own; the others ask for several."""
UNSEEN = "picture tokens"

Ids = NDArray[np.uint16]
Kinds = NDArray[np.uint8]


@dataclass(frozen=True)
class TrainingBatch:
    """tokens and kinds [B, T + 2]; a token's kind is an index into `Feed.kinds`."""

    tokens: NDArray[np.int64]
    kinds: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None
    """[3, B, T]: of a batch with pictures; otherwise each row counts its tokens."""
    pictures: tuple[PictureBatch, ...] = ()
    """By size."""


class Feed(Protocol):
    """A source of batches. Losses are counted by `kinds`.

    A label of the kind UNSEEN, which a feed with pictures has, is a picture's token, which nobody predicts.
    """

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def weights(self) -> Mapping[int, float]:
        """Of losses, by the label's kind, where it is not 1."""

    def batch(self, num_rows: int, length: int) -> TrainingBatch: ...


@dataclass(frozen=True)
class Rendered:
    """One example as token ids, of which those from `answer_start` on are the answer, and its workload's name."""

    ids: Sequence[int]
    answer_start: int
    workload: str


class TextRows:
    """The token files of the real text; a row starts at a random token."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        index = directory / "index.json"
        if not index.exists():
            raise UnreadableError(f"{index} does not exist: run `python -m recipes.pocket.prepare` first.")
        self.sources: list[str] = list(json.loads(index.read_text(encoding="utf-8")))
        self._tokens = [np.fromfile(directory / "tokens" / f"{name}.bin", dtype=np.uint16) for name in self.sources]
        sizes = np.array([len(tokens) for tokens in self._tokens], dtype=np.float64)
        self._shares = sizes**_SIZE_EXPONENT / (sizes**_SIZE_EXPONENT).sum()
        self._random = np.random.default_rng(seed)

    def row(self, length: int) -> tuple[int, Ids]:
        """An index into `sources` and `length` + 2 tokens of that source; a shorter source is repeated."""
        source = int(self._random.choice(len(self.sources), p=self._shares))
        tokens = self._tokens[source]
        start = int(self._random.integers(max(1, len(tokens) - length - EXTRA_TOKENS)))
        return source, np.resize(tokens[start : start + length + EXTRA_TOKENS], length + EXTRA_TOKENS)


Draw = Callable[[Random, int], Rendered]
"""Draws an example, given the tokens that are left in its row."""


def fill_row(
    draw: Draw,
    random: Random,
    end_token: int,
    kind_of: Mapping[str, int],
    ids: Ids,
    kinds: Kinds,
) -> None:
    """Fills `ids` with examples, each followed by `end_token`, and `kinds` with the kind of each token (0: prompt).

    An example that does not fit is redrawn a few times; if none fits, the last one is truncated.
    """
    at, size = 0, len(ids)
    while at < size:
        for _ in range(_MAX_FIRST_REDRAWS if at == 0 else _MAX_LATER_REDRAWS):
            example = draw(random, size - at)
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
    """Rows of examples in shared memory, which worker processes keep replacing.

    The trainer reads random rows and never waits: if it is faster than the workers, it reads some rows again. A row
    that is overwritten while it is read consists of parts of two rows, which is harmless.
    """

    def __init__(self, lengths: Mapping[int, int], seed: int = 0, token_shares: Sequence[int] = (3, 1)) -> None:
        """`lengths` maps each row length to the number of rows kept.

        `token_shares` are the tokens produced for rows of each length, shortest first, as shares.
        """
        self._token_shares = tuple(token_shares)
        self._rows = {length: _SharedRows(count, length + EXTRA_TOKENS) for length, count in lengths.items()}
        self._random = np.random.default_rng(seed)
        self._longest_only = multiprocessing.RawValue(ctypes.c_bool, False)
        self._processes: list[Any] = []

    def start(self, num_workers: int, task: "WorkerTask") -> None:
        """Forks the workers. Call it before the GPU is used: CUDA does not survive a fork."""
        context = multiprocessing.get_context("fork")
        for worker in range(num_workers):
            process = context.Process(target=self._fill, args=(worker, num_workers, task), daemon=True)
            process.start()
            self._processes.append(process)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()

    def only_longest(self) -> None:
        """Stops the production of shorter rows."""
        self._longest_only.value = True

    def num_made(self) -> dict[int, int]:
        """Rows produced so far, by length."""
        return {length: rows.num_made for length, rows in self._rows.items()}

    def is_ready(self) -> bool:
        return all(
            rows.num_made >= min(rows.count, max(_MIN_ROWS, _READY_TOKENS // length))
            for length, rows in self._rows.items()
        )

    def rows(self, count: int, length: int) -> tuple[Ids, Kinds]:
        """`count` random rows [count, length + 2] of the pool, and their kinds."""
        rows = self._rows[length]
        chosen = self._random.integers(min(rows.num_made, rows.count), size=count)
        return rows.ids[chosen], rows.kinds[chosen]

    def make_row(self, length: int, draw: Draw, random: Random, task: "WorkerTask") -> None:
        """Adds a row of this length to the pool, in place of the oldest."""
        rows = self._rows[length]
        place = rows.next_place()
        fill_row(draw, random, task.end_token, task.kind_of, rows.ids[place], rows.kinds[place])
        rows.finish()

    def _fill(self, worker: int, num_workers: int, task: "WorkerTask") -> None:
        yield_to_trainer()
        # Every row has its own seed. Seeds from 10**9 on are held out; no run gets that far.
        seed = worker
        draw = task.make_draw()
        long = max(self._rows)
        shares = zip(sorted(self._rows), self._token_shares, strict=True)
        lengths = [length for length, share in shares for _ in range(share * long // length)][::-1]
        while True:
            for length in [long] if self._longest_only.value else lengths:
                self.make_row(length, draw, Random(seed), task)  # noqa: S311
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
class WorkerTask:
    """What a worker produces. `make_draw` is called once in each process; it returns what draws examples."""

    make_draw: Callable[[], Draw]
    end_token: int
    kind_of: Mapping[str, int]


class MixedFeed:
    """Batches of text rows and example rows. Kind 0 is prompts, then the sources, then the workloads' answers."""

    def __init__(self, text: TextRows, pool: ExamplePool, workloads: Sequence[str]) -> None:
        self._text, self._pool = text, pool
        self.kinds = ("prompts", *text.sources, *workloads)
        self.weights = dict.fromkeys(range(1 + len(text.sources), len(self.kinds)), ANSWER_WEIGHT)

    def batch(self, num_rows: int, length: int) -> TrainingBatch:
        num_examples = round(num_rows * EXAMPLE_SHARE)
        tokens = np.empty((num_rows, length + EXTRA_TOKENS), np.int64)
        kinds = np.empty_like(tokens)
        tokens[:num_examples], kinds[:num_examples] = self._pool.rows(num_examples, length)
        for place in range(num_examples, num_rows):
            source, tokens[place] = self._text.row(length)
            kinds[place] = 1 + source
        return TrainingBatch(tokens, kinds)


def end_token(model: Path) -> int:
    """The id of <|endoftext|>, the first of the special tokens."""
    token_id, *rest = Tokenizer.load(model).encode("<|endoftext|>")
    if rest:
        raise MismatchError(f"The tokenizer in {model} has no <|endoftext|>: run `python -m recipes.pocket.prepare`.")
    return token_id


def example_task(data: Path, kind_of: Mapping[str, int], model: Path) -> WorkerTask:
    """Examples of all workloads, with the tokenizer in `model` and filler text from `data`."""
    return WorkerTask(lambda: _example_drawer(data, model), end_token(model), kind_of)


def _example_drawer(data: Path, model: Path) -> Draw:
    tokenizer, template = Tokenizer.load(model), ChatTemplate.load(model)
    use_documents(data, tokenizer)
    names, shares = list(SHARES), list(SHARES.values())

    def draw(random: Random, room: int) -> Rendered:
        name = random.choices(names, shares)[0]
        if room >= _LONG_ROW and random.random() < _LONG_SHARE:
            name = "retrieval"
            characters = int(room * random.uniform(0.8, 3.1))
            is_asked_once = random.random() < _ONE_QUESTION_SHARE
            example = recall(random, characters, random.random()) if is_asked_once else recalls(random, characters)
        else:
            example = WORKLOADS[name](random)
        ids, answer_start = render(example, tokenizer, template)
        return Rendered(ids, answer_start, name)

    return draw


def yield_to_trainer() -> None:
    """For a worker process: the one that feeds the GPU goes first, because a late launch leaves the GPU idle."""
    os.nice(10)
    torch.set_num_threads(1)


def num_workers() -> int:
    """One per core, except for the core that feeds the GPU."""
    return max(1, (os.cpu_count() or 1) - 1)


class ToyFeed:
    """Rows that count upwards from a random token, which a tiny model learns within a few steps. Needs no data."""

    kinds = ("prompts", "counting")
    weights: Mapping[int, float] = {1: ANSWER_WEIGHT}

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def batch(self, num_rows: int, length: int) -> TrainingBatch:
        starts = self._random.integers(self._vocab_size, size=(num_rows, 1))
        tokens = (starts + np.arange(length + EXTRA_TOKENS)) % self._vocab_size
        kinds = np.ones_like(tokens)
        kinds[:, : length // 2] = 0
        return TrainingBatch(tokens, kinds)
