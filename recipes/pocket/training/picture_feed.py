"""Batches with pictures: rows of questions about them, which worker processes keep producing, beside rows of text.

A row of pictures has `length` + 2 tokens as any other, and slots for the pictures of its questions. All pictures of a
slot are padded to the same number of patches, so a batch has the same shapes whatever was drawn. A row whose next
question does not fit ends with <|endoftext|>.
"""

import mmap
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.pictures.drawing import Drawing
from recipes.pocket.pictures.fonts import FontShelf
from recipes.pocket.pictures.workloads import PAGES, PICTURES, SMALL, PictureSource, SeenExample
from recipes.pocket.synthetic.filler import use_documents
from recipes.pocket.synthetic.workloads import render
from recipes.pocket.training.feed import (
    ANSWER_WEIGHT,
    EXTRA_TOKENS,
    UNSEEN,
    ExamplePool,
    TextRows,
    TrainingBatch,
    end_token,
    yield_to_trainer,
)
from recipes.pocket.training.vision import PictureBatch

__all__ = ["LINE_ROWS", "PAGE_ROWS", "PictureFeed", "PicturePool", "PictureTask", "RowShape", "fill_picture_row"]

PICTURE_WEIGHT = 4.0
"""Loss weight of answers about pictures: what the model has to learn, where text is what it must keep."""
_MAX_REDRAWS = 6
_MIN_ROWS = 32


@dataclass(frozen=True)
class RowShape:
    """Pictures of a row: how many slots of each number of patches, and the shares of the workloads drawn."""

    slots: tuple[tuple[int, int], ...]
    """(patches, slots of so many), smallest first."""
    shares: Mapping[str, float]
    row_share: float = 0.25
    """Share of such rows in a batch."""


LINE_ROWS = RowShape(((48, 14), (112, 10)), SMALL, row_share=0.2)
PAGE_ROWS = RowShape(((256, 3), (1024, 2)), PAGES, row_share=0.4)
_EXAMPLE_SHARE, _LONG_EXAMPLE_SHARE = 0.25, 0.65
"""Share of rows of examples in a batch with pictures, and in one of longer rows without; the others are text."""


class SlotArrays:
    """The pictures of `count` rows for the slots of one size, in memory that forked processes share."""

    def __init__(self, count: int, slots: int, patches: int) -> None:
        self.patches = _shared((count, slots, patches, 256), np.uint8)
        self.palettes = _shared((count, slots, 256, 3), np.uint8)
        self.grids = _shared((count, slots, 2), np.int32)
        self.labels = _shared((count, slots, patches, 4), np.uint8)
        self.offsets = _shared((count, slots), np.int32)
        """Each picture's first token in its row."""

    def put(self, row: int, slot: int, drawing: Drawing, offset: int) -> None:
        patches = drawing.patches()
        self.patches[row, slot, : len(patches)] = patches
        self.labels[row, slot, : len(patches)] = drawing.labels()
        self.palettes[row, slot] = drawing.palette
        self.grids[row, slot] = drawing.grid
        self.offsets[row, slot] = offset

    def batch(self, rows: NDArray[np.int64], first_row: int, length: int) -> PictureBatch:
        """The pictures of the chosen rows, which are those from `first_row` on of a batch."""
        places = self.offsets[rows] + (np.arange(len(rows)) + first_row)[:, None] * length
        parts = (self.patches[rows], self.palettes[rows], self.grids[rows].astype(np.int64), self.labels[rows], places)
        return PictureBatch(*(torch.from_numpy(part.reshape(-1, *part.shape[2:])) for part in parts))


class PicturePool:
    """`count` rows of questions about pictures, which worker processes keep replacing, as in `ExamplePool`."""

    def __init__(self, shape: RowShape, count: int, length: int, seed: int = 0) -> None:
        width = length + EXTRA_TOKENS
        self.shape, self.count, self.length = shape, count, length
        self.ids, self.kinds = _shared((count, width), np.uint16), _shared((count, width), np.uint8)
        self.positions = _shared((count, 3, width), np.uint16)
        self.slots = [SlotArrays(count, slots, patches) for patches, slots in shape.slots]
        self._random = np.random.default_rng(seed)
        self._taken = multiprocessing.Value("q", 0)
        self._made = multiprocessing.Value("q", 0)

    @property
    def num_made(self) -> int:
        return int(self._made.value)

    def is_ready(self) -> bool:
        return self.num_made >= min(_MIN_ROWS, self.count)

    def choose(self, count: int) -> NDArray[np.int64]:
        return self._random.integers(min(self.num_made, self.count), size=count)

    def make_row(self, draw: "PictureDrawer", random: Random) -> None:
        with self._taken.get_lock():
            place = self._taken.value % self.count
            self._taken.value += 1
        fill_picture_row(self, place, draw, random)
        with self._made.get_lock():
            self._made.value += 1


def fill_picture_row(pool: PicturePool, place: int, draw: "PictureDrawer", random: Random) -> None:
    """Fills row `place` of the pool with questions, each followed by <|endoftext|>."""
    ids, kinds, positions = pool.ids[place], pool.kinds[place], pool.positions[place]
    for slots in pool.slots:
        slots.grids[place] = 0
    used = [0] * len(pool.slots)
    at, position = 0, 0
    while (found := _next(pool, draw, random, len(ids) - at, used)) is not None:
        question, size = found
        stop = at + len(question.ids)
        ids[at:stop], ids[stop] = question.ids, draw.end_token
        kinds[at:stop] = 0
        kinds[at + question.answer_start : stop] = question.kind
        pads = slice(at + question.first_pad, at + question.first_pad + question.drawing.num_tokens)
        kinds[pads], kinds[stop] = draw.unseen, 0
        pool.slots[size].put(place, used[size], question.drawing, pads.start)
        used[size] += 1
        positions[:, at : stop + 1] = question.positions + position
        position = int(positions[:, stop].max()) + 1
        at = stop + 1
    ids[at:], kinds[at:] = draw.end_token, draw.unseen
    positions[:, at:] = position + np.arange(len(ids) - at)


@dataclass(frozen=True)
class DrawnQuestion:
    """A question with its answer as token ids, its picture's pads among them."""

    ids: NDArray[np.uint16]
    answer_start: int
    first_pad: int
    drawing: Drawing
    kind: int

    @property
    def positions(self) -> NDArray[np.int64]:
        """[3, tokens + 1], from 0 on: text counts in all three rows, the picture's tokens by row and column."""
        count, pads = len(self.ids) + 1, self.drawing.num_tokens
        height, width = (side // 2 for side in self.drawing.grid)
        positions = np.tile(np.arange(count), (3, 1))
        inside = np.arange(pads)
        start = self.first_pad
        positions[:, start : start + pads] = start + np.stack([0 * inside, inside // width, inside % width])
        positions[:, start + pads :] += max(height, width) - pads
        return positions


def _next(
    pool: PicturePool, draw: "PictureDrawer", random: Random, room: int, used: Sequence[int]
) -> tuple[DrawnQuestion, int] | None:
    """A question that fits into the rest of the row and into a free slot, and the slot's size; None if none does."""
    for _ in range(_MAX_REDRAWS):
        question = draw(random, pool.shape.shares)
        height, width = question.drawing.grid
        for size, (patches, slots) in enumerate(pool.shape.slots):
            if height * width <= patches and used[size] < slots and len(question.ids) + 1 < room:
                return question, size
    return None


class PictureDrawer:
    """Draws questions about pictures as token ids."""

    def __init__(self, source: PictureSource, model: Path, kind_of: Mapping[str, int]) -> None:
        self._tokenizer, self._template = Tokenizer.load(model), ChatTemplate.load(model)
        self._source, self._kind_of = source, kind_of
        self.end_token, self.unseen = end_token(model), kind_of[UNSEEN]
        [self._pad] = self._tokenizer.encode("<|image_pad|>")

    def __call__(self, random: Random, shares: Mapping[str, float]) -> DrawnQuestion:
        name = random.choices(list(shares), list(shares.values()))[0]
        return self.tokens(PICTURES[name](random, self._source), self._kind_of[name])

    def tokens(self, seen: SeenExample, kind: int) -> DrawnQuestion:
        ids, answer_start = render(seen.example, self._tokenizer, self._template)
        pad, count = ids.index(self._pad), seen.drawing.num_tokens
        whole = np.array([*ids[:pad], *[self._pad] * count, *ids[pad + 1 :]], dtype=np.uint16)
        return DrawnQuestion(whole, answer_start + count - 1, pad, seen.drawing, kind)


@dataclass(frozen=True)
class PictureTask:
    """What the workers produce: questions with the fonts, documents and tokenizer in these directories."""

    fonts: Path
    data: Path
    model: Path
    kind_of: Mapping[str, int]

    def start(self, pools: Sequence[PicturePool], num_workers: int) -> list[Any]:
        """Forks the workers, which fill the pools in turn; call it before the GPU is used."""
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=self._fill, args=(pools, worker, num_workers), daemon=True)
            for worker in range(num_workers)
        ]
        for process in processes:
            process.start()
        return processes

    def _fill(self, pools: Sequence[PicturePool], worker: int, num_workers: int) -> None:
        yield_to_trainer()
        if (self.data / "index.json").exists():
            use_documents(self.data, Tokenizer.load(self.model))
        draw = PictureDrawer(PictureSource(FontShelf(self.fonts)), self.model, self.kind_of)
        rng, shares = Random(worker), [pool.shape.row_share for pool in pools]  # noqa: S311
        seed = worker
        while True:
            rng.choices(pools, shares)[0].make_row(draw, Random(seed))  # noqa: S311
            seed += num_workers


class PictureFeed:
    """Batches of short rows with pictures, and of longer rows without.

    Kind 0 is prompts; then come the sources of text, the workloads' answers, those about pictures, and UNSEEN.
    """

    def __init__(
        self, text: TextRows, examples: ExamplePool, pools: Sequence[PicturePool], workloads: Sequence[str]
    ) -> None:
        self._text, self._examples, self._pools = text, examples, pools
        self.kinds = ("prompts", *text.sources, *workloads, *PICTURES, UNSEEN)
        answers = dict.fromkeys(map(self.kinds.index, workloads), ANSWER_WEIGHT)
        self.weights = answers | dict.fromkeys(map(self.kinds.index, PICTURES), PICTURE_WEIGHT)
        self.weights[self.kinds.index(UNSEEN)] = 0.0

    @property
    def kind_of(self) -> dict[str, int]:
        return {kind: place for place, kind in enumerate(self.kinds)}

    def batch(self, num_rows: int, length: int) -> TrainingBatch:
        """Rows of pictures, examples and text by their shares; longer rows are examples and text alone."""
        pools = [pool for pool in self._pools if pool.length == length]
        num_examples = round(num_rows * (_EXAMPLE_SHARE if pools else _LONG_EXAMPLE_SHARE))
        tokens = np.empty((num_rows, length + EXTRA_TOKENS), np.int64)
        kinds = np.empty_like(tokens)
        positions = np.tile(np.arange(length), (3, num_rows, 1))
        pictures: list[PictureBatch] = []
        at = 0
        for pool in pools:
            num_seen = round(num_rows * pool.shape.row_share)
            rows, seen = pool.choose(num_seen), slice(at, at + num_seen)
            tokens[seen], kinds[seen] = pool.ids[rows], pool.kinds[rows]
            positions[:, seen] = pool.positions[rows, :, :length].transpose(1, 0, 2)
            pictures += [slots.batch(rows, at, length) for slots in pool.slots]
            at += num_seen
        tokens[at : at + num_examples], kinds[at : at + num_examples] = self._examples.rows(num_examples, length)
        for place in range(at + num_examples, num_rows):
            source, tokens[place] = self._text.row(length)
            kinds[place] = 1 + source
        return TrainingBatch(tokens, kinds, positions if pools else None, tuple(pictures))


def _shared(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that forked processes share; anonymous, so that /dev/shm need not be large."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype=dtype, count=int(np.prod(shape))).reshape(shape)
