"""Where the bytes of a prefix are in memory, and in which order they are in its chunks.

    KV chunk of n pages   for each KV tensor of each attention layer, of the MTP head, of a block drafter: n pages of it
    state, in parts       for each DeltaNet layer its matrices, for each its convolution rows, the hidden vector, the
                          ring of a block drafter

Every tensor is seen as bytes, [pages or rows, bytes of one], so that all KV formats and dtypes are copied alike. Copies
are of contiguous stretches only: nothing is allocated, on a device neither.
"""

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.model.memory import Memory
from onebox.planner.memory import MemoryRequest, page_bytes, state_bytes
from onebox.spec.model import ModelSpec
from onebox.store.chunk import Chunk, ChunkKind
from onebox.store.entry import RUN_PAGES, ChunkLayout

__all__ = ["NUM_READERS", "PrefixLayout", "staging_bytes", "state_parts"]

NUM_READERS = {"cpu": 4, "cuda": 8}
"""Threads that read, by device: a checksum takes about as long as a fast disk's read, so several are needed."""

LEAST_PART_BYTES = 1 << 20
"""A state is not split into parts smaller than this."""


def state_parts(state_bytes: int, page_bytes: int) -> tuple[int, ...]:
    """The bytes of a state's parts: none is larger than a KV chunk, unless that is tiny."""
    most = max(RUN_PAGES * page_bytes, LEAST_PART_BYTES)
    num_parts = -(-state_bytes // most)
    whole = -(-state_bytes // num_parts)
    return tuple(min(whole, state_bytes - whole * place) for place in range(num_parts))


def staging_bytes(spec: ModelSpec, request: MemoryRequest, device_type: str) -> int:
    """The bytes of all staging buffers: one for each reader, one for the writer."""
    page = page_bytes(spec, request)
    largest = max(RUN_PAGES * page, *state_parts(state_bytes(spec, request), page))
    return (NUM_READERS[device_type] + 1) * (-(-largest // mmap.PAGESIZE) * mmap.PAGESIZE)


class _Stretch(NamedTuple):
    """Bytes in memory and their place in a chunk."""

    memory: Tensor
    """uint8, contiguous."""
    offset: int


class _Run(NamedTuple):
    """Pages of consecutive numbers: the place of the first in the chunk, its number, how many."""

    place: int
    page: int
    num_pages: int


class PrefixLayout:
    """The chunks of prefixes in one memory. Pages are the pool's numbers; checkpoints are those of the prefix cache."""

    def __init__(self, memory: Memory, first_checkpoint: int) -> None:
        """Checkpoint c is the memory's row first_checkpoint + c."""
        self._first_checkpoint = first_checkpoint
        self._page_planes = [_bytes_of(tensor) for tensor in memory.page_tensors]
        self._state_planes = [_bytes_of(tensor) for tensor in memory.state_tensors]
        page_bytes = sum(plane.shape[1] for plane in self._page_planes)
        state_bytes = sum(plane.shape[1] for plane in self._state_planes)
        self.chunks = ChunkLayout(page_bytes, state_parts(state_bytes, page_bytes))

    @property
    def buffer_bytes(self) -> int:
        """Of the largest chunk."""
        return max(RUN_PAGES * self.chunks.page_bytes, *self.chunks.state_bytes)

    def gather(self, chunk: Chunk, pages: Sequence[int], checkpoint: int, into: Tensor) -> None:
        """Copies a chunk of the prefix with these pages and this checkpoint into `into`, uint8 [chunk.num_bytes]."""
        for stretch in self._stretches(chunk, pages, checkpoint):
            size = stretch.memory.numel()
            into[stretch.offset : stretch.offset + size].copy_(stretch.memory, non_blocking=True)

    def scatter(self, chunk: Chunk, pages: Sequence[int], checkpoint: int, source: Tensor, first_page: int = 0) -> None:
        """The way back; pages of the prefix before `first_page` are in memory already and are not written."""
        for stretch in self._stretches(chunk, pages, checkpoint, first_page):
            size = stretch.memory.numel()
            stretch.memory.copy_(source[stretch.offset : stretch.offset + size], non_blocking=True)

    def _stretches(
        self, chunk: Chunk, pages: Sequence[int], checkpoint: int, first_page: int = 0
    ) -> Iterator[_Stretch]:
        if chunk.kind is ChunkKind.KV:
            own = pages[chunk.first_page : chunk.first_page + chunk.count]
            return self._page_stretches(own, max(0, first_page - chunk.first_page))
        return self._state_stretches(chunk.count, self._first_checkpoint + checkpoint)

    def _page_stretches(self, pages: Sequence[int], num_skipped: int) -> Iterator[_Stretch]:
        """Of a chunk of these pages, but for the first ones. Pages in a row are one stretch."""
        runs = _runs(pages, num_skipped)
        offset = 0
        for plane in self._page_planes:
            width = plane.shape[1]
            for place, page, count in runs:
                yield _Stretch(plane[page : page + count].view(-1), offset + place * width)
            offset += len(pages) * width

    def _state_stretches(self, part: int, row: int) -> Iterator[_Stretch]:
        """Of one part of the state in this row of the memory."""
        begin = sum(self.chunks.state_bytes[:part])
        end = begin + self.chunks.state_bytes[part]
        start = 0
        for plane in self._state_planes:
            first, last = max(begin, start), min(end, start + plane.shape[1])
            if first < last:
                yield _Stretch(plane[row, first - start : last - start], first - begin)
            start += plane.shape[1]


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor as uint8 [its first dimension, bytes of one element of that]."""
    if not tensor.is_contiguous():
        raise RuntimeError("The memory of a prefix must be contiguous, so that a stretch of bytes is one copy.")
    return tensor.view(torch.uint8).view(len(tensor), -1)


def _runs(pages: Sequence[int], first: int) -> list[_Run]:
    """The stretches of ascending page numbers from place `first` on."""
    runs: list[_Run] = []
    for place in range(first, len(pages)):
        if runs and pages[place] == runs[-1].page + runs[-1].num_pages:
            runs[-1] = runs[-1]._replace(num_pages=runs[-1].num_pages + 1)
        else:
            runs.append(_Run(place, pages[place], 1))
    return runs
