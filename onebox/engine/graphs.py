"""Decode steps as CUDA graphs, captured when a shape is first met.

A step is two graphs: the model up to its logits, and the drawing with the drafts. Both read one static buffer. A graph
is captured over blank inputs, on which running is harmless: no row belongs to a sequence, nothing is folded into a
state. Shapes are rounded up so that there are few; what lies beyond a step's own rows is blank as well.

The host waits once a step, for the outcome. The inputs go in and the outcome comes back through pinned memory, so that
the copies are queued with the graphs; each is overwritten by a later step only after this one's outcome was read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.batch import Rows
from onebox.engine.decode import Decoder, Forwarded, Outcome, Step, outcome_of
from onebox.engine.inputs import Packing, Sizes, exact_sizes, unpack

__all__ = ["GraphDecoder"]

T = TypeVar("T")


class _Drawing(NamedTuple):
    """The second graph of a step, what it writes, and where that is copied to on the host."""

    graph: torch.cuda.CUDAGraph
    words: Tensor
    pinned: Tensor
    values: NDArray[np.int64]
    """The same memory as `pinned`."""


@dataclass
class _Shape:
    """The graphs of one shape of step, and the tensors they read and write."""

    sizes: Sizes
    packing: Packing
    words: Tensor
    forward: torch.cuda.CUDAGraph
    forwarded: Forwarded
    drawings: dict[int, _Drawing] = field(default_factory=dict)
    """By the depth of drafting."""


class _GraphStep:
    """A step whose first graph runs; `done` is recorded behind its last copy."""

    def __init__(self, shape: _Shape, depth: int, done: torch.cuda.Event) -> None:
        self.forwarded = shape.forwarded
        self._sizes = shape.sizes
        self._drawing = shape.drawings[depth]
        self._depth = depth
        self._done = done

    def draw(self) -> None:
        drawing = self._drawing
        drawing.graph.replay()
        drawing.pinned.copy_(drawing.words, non_blocking=True)
        self._done.record()

    def read(self) -> Outcome:
        self._done.synchronize()
        return outcome_of(self._drawing.values.tolist(), self._sizes, self._depth)


class GraphDecoder:
    """A decoder's steps, replayed. All graphs share a pool of memory: one runs at a time, and its result is read."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._shapes: dict[Sizes, _Shape] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, parts: Sequence[Rows], depth: int, meanwhile: Callable[[], None]) -> Step:
        """Gives the device the model's part of a step. The step before it must have been read."""
        exact = exact_sizes(parts, depth)
        sizes = Sizes(_rounded(exact.rows), _rounded(exact.sequences), 1 << (exact.pages - 1).bit_length())
        shape = self._shapes.get(sizes)
        if shape is None or depth not in shape.drawings:
            meanwhile()  # capturing takes long
            shape = shape or self._capture(sizes)
            self._capture_drawing(shape, depth)
        shape.words.copy_(shape.packing.pack(parts), non_blocking=True)
        shape.forward.replay()
        return _GraphStep(shape, depth, self._done)

    def _capture(self, sizes: Sizes) -> _Shape:
        packing = Packing(sizes, is_pinned=True)
        words = packing.words.to(self._device)
        graph, forwarded = self._record(lambda: self._decoder.forward(unpack(words, sizes).batch))
        shape = self._shapes[sizes] = _Shape(sizes, packing, words, graph, forwarded)
        return shape

    def _capture_drawing(self, shape: _Shape, depth: int) -> None:
        shape.words.copy_(Packing(shape.sizes).words)
        shape.forward.replay()
        # The words are taken apart inside the graph: what is made outside of it would stay as it was at capture.
        graph, words = self._record(
            lambda: self._decoder.finish(shape.forwarded, unpack(shape.words, shape.sizes), depth)
        )
        pinned = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        shape.drawings[depth] = _Drawing(graph, words, pinned, pinned.numpy())

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of the work and the tensors it writes; run once before, so that its kernels are compiled."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return graph, result


def _rounded(count: int) -> int:
    """Up to a size of which there are few: all up to 16, then every eighth."""
    return count if count <= 16 else -(-count // 8) * 8
