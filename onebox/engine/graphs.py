"""Decode steps as CUDA graphs, captured when a shape is first met.

A step is two graphs: the model up to its logits, and the drawing with the drafts. Both read one static buffer. A graph
is captured over blank inputs, on which running is harmless: no row belongs to a sequence, nothing is folded into a
state. Shapes are rounded up so that there are few; what lies beyond a step's own rows is blank as well.

The host waits once a step, for the outcome. The inputs go in and the outcome comes back through pinned memory, so that
the copies are queued with the graphs; each is overwritten by a later step only after this one's outcome was read.

While the host reads an outcome and decides, the device would be idle. So where a step's sequences go on, the model's
part of the next step is queued behind the drawing, over inputs that the device makes of the outcome itself (`advance`).
The next step is then compared with what was foreseen: if it is that very step, its logits are there already; if not,
it is computed as ever. A forward pass that nobody wanted has done no harm: its keys and values stand where the sequence
itself will write next, its tokens are pending and are not kept. It has folded in the tokens kept before, though, which
the next step of those slots must not do again.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.step import DecodeRows
from onebox.engine.decode import Decoder, Forwarded, DecodeOutcome, DecodeStep, outcome_of
from onebox.engine.inputs import InputPacker, StepSizes, exact_sizes, unpack
from onebox.kernels.advance import advance
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["GraphDecoder"]

T = TypeVar("T")

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


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

    sizes: StepSizes
    packing: InputPacker
    words: Tensor
    forward: torch.cuda.CUDAGraph
    forwarded: Forwarded
    drawings: dict[int, _Drawing] = field(default_factory=dict)
    """By the depth of drafting."""


class _GraphStep:
    """A step whose first graph runs; `done` is recorded behind its last copy."""

    def __init__(
        self, shape: _Shape, parts: Sequence[DecodeRows], depth: int, done: torch.cuda.Event, *, goes_on: bool
    ) -> None:
        self.forwarded = shape.forwarded
        self.parts = parts
        self.goes_on = goes_on
        """Whether the next step's forward pass is queued with this step's drawing."""
        self._shape = shape
        self._drawing = shape.drawings[depth]
        self._depth = depth
        self._done = done
        self._outcome: DecodeOutcome | None = None

    @property
    def graphs(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        return self._shape.forward, self._drawing.graph

    def draw(self) -> None:
        drawing = self._drawing
        drawing.graph.replay()
        drawing.pinned.copy_(drawing.words, non_blocking=True)
        self._done.record()
        if self.goes_on:
            self._advance()
            self._shape.forward.replay()

    def _advance(self) -> None:
        """Makes the next step's inputs out of this one's and of what was drawn."""
        num_rows, num_sequences, _ = self._shape.sizes
        batch = unpack(self._shape.words, self._shape.sizes).batch
        words, edge = self._drawing.words, num_rows + num_sequences
        advance(
            batch.token_ids,
            batch.positions[0],
            batch.kv_slots,
            batch.keep,
            batch.seen,
            batch.cu_rows,
            batch.page_table,
            words[:num_rows],
            words[num_rows:edge],
            words[edge + num_rows :].view(num_sequences, self._depth),
            PAGE_TOKENS,
        )

    def read(self) -> DecodeOutcome:
        self._done.synchronize()
        self._outcome = outcome_of(self._drawing.values.tolist(), self._shape.sizes, self._depth)
        return self._outcome

    def foresaw(self, shape: _Shape | None, parts: Sequence[DecodeRows]) -> bool:
        """Whether the forward pass queued behind this step is that of these parts."""
        if not self.goes_on or shape is not self._shape or len(parts) != len(self.parts) or self._outcome is None:
            return False
        drawn, num_kept, drafts, _ = self._outcome
        first_row = 0
        for place, (before, part) in enumerate(zip(self.parts, parts, strict=True)):
            kept = num_kept[place]
            token_ids = (drawn[first_row + kept - 1], *drafts[place][: before.draw.depth])
            if part[:5] != (before.request_id, before.slot, token_ids, before.start + kept, kept):
                return False
            # Pages that came since then were not in the table.
            if part.position_offset != before.position_offset or part.end > len(before.pages) * PAGE_TOKENS:
                return False
            first_row += len(before.token_ids)
        return True


class GraphDecoder:
    """A decoder's steps, replayed. All graphs share a pool of memory: one runs at a time, and its result is read."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._shapes: dict[StepSizes, _Shape] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last: _GraphStep | None = None
        self._folded: set[int] = set()
        """Slots whose kept tokens a forward pass that nobody wanted has folded in."""

    def start(self, parts: Sequence[DecodeRows], depth: int, meanwhile: Callable[[], None], *, is_alone: bool) -> DecodeStep:
        """Gives the device the model's part of a step. The step before it must have been read.

        `is_alone` says that no other rows are computed before these sequences' next ones.
        """
        exact = exact_sizes(parts, depth)
        sizes = StepSizes(_rounded(exact.rows), _rounded(exact.sequences), 1 << (exact.pages - 1).bit_length())
        shape = self._shapes.get(sizes)
        is_captured = shape is not None and depth in shape.drawings
        is_done = is_captured and self._last is not None and self._last.foresaw(shape, parts)
        if not is_done:
            parts = self._without_folded(parts)
        if shape is None or not is_captured:
            meanwhile()  # capturing takes long
            shape = shape or self._capture(sizes)
            self._capture_drawing(shape, depth)
        shape.words.copy_(shape.packing.pack(parts), non_blocking=True)
        if not is_done:
            shape.forward.replay()
        self._last = _GraphStep(shape, parts, depth, self._done, goes_on=is_alone and _go_on(parts))
        return self._last

    def num_kernels(self) -> int:
        """Kernels in the graphs of the step that was started last."""
        return sum(map(_count_kernels, self._last.graphs)) if self._last else 0

    def _without_folded(self, parts: Sequence[DecodeRows]) -> Sequence[DecodeRows]:
        """The parts, told to fold in nothing where that was done in vain."""
        if self._last is not None and self._last.goes_on:
            self._folded.update(part.slot for part in self._last.parts)
        if not self._folded:
            return parts
        folded = [part._replace(keep=0) if part.slot in self._folded else part for part in parts]
        self._folded.difference_update(part.slot for part in parts)
        return folded

    def _capture(self, sizes: StepSizes) -> _Shape:
        packing = InputPacker(sizes, is_pinned=True)
        words = packing.words.to(self._device)
        graph, forwarded = self._record(lambda: self._decoder.forward(unpack(words, sizes).batch))
        shape = self._shapes[sizes] = _Shape(sizes, packing, words, graph, forwarded)
        return shape

    def _capture_drawing(self, shape: _Shape, depth: int) -> None:
        shape.words.copy_(InputPacker(shape.sizes).words)
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
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        graph.instantiate()
        return graph, result


def _rounded(count: int) -> int:
    """Up to a size of which there are few: all up to 16, then every eighth."""
    return count if count <= 16 else -(-count // 8) * 8


def _go_on(parts: Sequence[DecodeRows]) -> bool:
    """Whether the sequences' next rows follow from this step alone, as many as now."""
    return all(part.draw.goes_on and len(part.token_ids) == 1 + part.draw.depth for part in parts)


def _count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """The kernels among a graph's nodes, as the driver tells them."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    driver.cuGraphGetNodes(handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    kinds = (ctypes.c_int * count.value)()
    for place, node in enumerate(nodes):
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kinds, place * ctypes.sizeof(ctypes.c_int)))
    return sum(kind == _KERNEL_NODE for kind in kinds)
