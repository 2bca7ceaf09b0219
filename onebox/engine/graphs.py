"""Decode steps as CUDA graphs, captured when a shape is first met.

A step is two graphs: the model up to its logits, and the drawing with the drafts. Both read one static buffer. A graph
is captured over blank inputs, on which running is harmless: no row belongs to a sequence, nothing is folded into a
state. Shapes are rounded up so that there are few; what lies beyond a step's own rows is blank as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from onebox.engine.decode import Decoder, Forwarded
from onebox.engine.inputs import Entry, Sizes, blank, exact_sizes, pack, unpack

__all__ = ["GraphDecoder"]

T = TypeVar("T")


@dataclass
class _Shape:
    """The graphs of one shape of step, and the tensors they read and write."""

    words: Tensor
    forward: torch.cuda.CUDAGraph
    forwarded: Forwarded
    finish: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)
    """By the depth of drafting."""


class GraphDecoder:
    """A decoder's steps, replayed. All graphs share a pool of memory: one runs at a time, and its result is read."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._shapes: dict[Sizes, _Shape] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def start(self, entries: Sequence[Entry], depth: int) -> tuple[Sizes, Forwarded, Callable[[], Tensor]]:
        """Runs the model over the entries: the step's sizes, what it said, and what draws and drafts from that."""
        exact = exact_sizes(entries, depth)
        sizes = Sizes(_rounded(exact.rows), _rounded(exact.sequences), 1 << (exact.pages - 1).bit_length())
        shape = self._shapes.get(sizes) or self._capture(sizes)
        if depth not in shape.finish:
            self._capture_finish(shape, sizes, depth)
        shape.words.copy_(torch.from_numpy(pack(entries, sizes)), non_blocking=True)
        shape.forward.replay()
        graph, words = shape.finish[depth]

        def finish() -> Tensor:
            graph.replay()
            return words

        return sizes, shape.forwarded, finish

    def _capture(self, sizes: Sizes) -> _Shape:
        words = torch.from_numpy(blank(sizes)).to(self._device)
        graph, forwarded = self._record(lambda: self._decoder.forward(unpack(words, sizes).batch))
        shape = self._shapes[sizes] = _Shape(words, graph, forwarded)
        return shape

    def _capture_finish(self, shape: _Shape, sizes: Sizes, depth: int) -> None:
        shape.words.copy_(torch.from_numpy(blank(sizes)))
        shape.forward.replay()
        # The words are taken apart inside the graph: what is made outside of it would stay as it was at capture.
        shape.finish[depth] = self._record(
            lambda: self._decoder.finish(shape.forwarded, unpack(shape.words, sizes), depth)
        )

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
