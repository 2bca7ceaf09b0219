"""Decode steps as CUDA graphs, all of them captured before the engine is ready.

A step is two graphs: the model up to its logits, and sampling with the MTP head's drafts; a third where the block
drafter drafts. Shapes are rounded up so that there are few (`shapes.py`); what lies beyond a step's own rows is blank.
All graphs read the same page table and write the same hidden states, logits and outcome, so that their memory does not
grow with their number, and the sampling graph of a shape follows each of its forward graphs. The sampling graph leaves
at one place where blocks begin, so that the block drafter's graphs depend on the number of sequences alone. A graph is
captured over blank inputs, on which running is harmless: no row belongs to a sequence, nothing is folded into a state.
A step of a shape that was not captured runs without graphs.

The host waits once per step, for the outcome. Inputs and outcome are copied through pinned memory, so that the copies
are queued with the graphs; each is overwritten by a later step only after this one's outcome was read.

While the host reads an outcome and plans, the device would be idle. So where a step's sequences continue, the model's
part of the next step is queued behind the sampling, over inputs that the device makes of the outcome itself
(`next_inputs`). The next step is then compared with that prediction: if it is the same step, its logits are computed
already; if not, it is recomputed. A discarded forward pass does no harm: its keys and values lie where the sequence
itself writes next, its tokens are pending and are not accepted. But it has folded the tokens accepted before into the
state, which the next step of those slots must not do again.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.batch import StepInputs, decode_inputs
from onebox.engine.capture import GraphRecorder
from onebox.engine.decode import DecodeOutcome, Decoder, DecodeStep, Forwarded, OutcomeLayout, OutcomeTensors
from onebox.engine.inputs import InputPacker, PageTable, StepSizes, blocks_of, exact_sizes
from onebox.engine.shapes import StepShapes
from onebox.engine.step import DecodeRows, DraftDepths
from onebox.kernels.step import next_inputs
from onebox.kernels.step.tensors import StepTensors
from onebox.model.batch import Batch
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["GraphDecoder", "predict_inputs"]

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _SamplingGraph(NamedTuple):
    """The second graph of a step, what it writes, and where that is copied to on the host."""

    graph: torch.cuda.CUDAGraph
    layout: OutcomeLayout
    words: Tensor
    outcome: OutcomeTensors
    """The fields of `words`."""
    is_last: bool
    """Whether it copies its outcome and predicts the next inputs itself, as no drafts can come behind it."""
    pinned: Tensor
    values: NDArray[np.int64]
    """The same memory as `pinned`."""


@dataclass
class _Shape:
    """The graphs of steps with so many rows and sequences, and the tensors they read and write."""

    sizes: StepSizes
    """With the widest page table."""
    packer: InputPacker
    words: Tensor
    page_table: Tensor
    max_rows: int
    forwarded: Forwarded
    forward: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    """By the number of the page table's columns."""
    sampling: dict[int, _SamplingGraph] = field(default_factory=dict)
    """By the depth of the MTP head's drafts."""

    def inputs(self, num_pages: int | None = None) -> StepInputs:
        """Views of what the graphs read, with so many columns of the page table, or all."""
        sizes = self.sizes if num_pages is None else self.sizes._replace(num_pages=num_pages)
        return decode_inputs(self.words, sizes, self.page_table, self.max_rows)


class _StepGraphs(NamedTuple):
    """The graphs of a step."""

    shape: _Shape
    forward: torch.cuda.CUDAGraph
    sampling: _SamplingGraph
    block: torch.cuda.CUDAGraph | None
    """Where the block drafter drafts."""


class _GraphStep:
    """A step whose first graph runs; `done` is recorded behind its last copy."""

    def __init__(
        self,
        decoder: Decoder,
        graphs: _StepGraphs,
        parts: Sequence[DecodeRows],
        done: torch.cuda.Event,
        *,
        continues: bool,
    ) -> None:
        self.forwarded = graphs.shape.forwarded
        self.parts = parts
        self.continues = continues
        """Whether the next step's forward pass is queued with this step's sampling."""
        self._decoder = decoder
        self._shape, self._forward, self._sampling, self._block = graphs
        self._done = done
        self._outcome: DecodeOutcome | None = None
        self._is_complete = False

    @property
    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        return [graph for graph in (self._forward, self._sampling.graph, self._block) if graph is not None]

    def complete(self) -> None:
        self._decoder.complete(self.forwarded)
        self._is_complete = True

    def sample(self) -> None:
        sampling = self._sampling
        sampling.graph.replay()
        if self._block is not None:
            self._block.replay()
        if self._is_complete:
            self._decoder.end_complete()
        if not sampling.is_last:
            sampling.pinned.copy_(sampling.words, non_blocking=True)
        self._done.record()
        if self.continues:
            if not sampling.is_last:
                predict_inputs(self._shape.inputs().batch, sampling.outcome)
            self._forward.replay()

    def read(self) -> DecodeOutcome:
        self._done.synchronize()
        self._outcome = self._sampling.layout.read(self._sampling.values.tolist())
        return self._outcome

    def matches_prediction(self, forward: torch.cuda.CUDAGraph, parts: Sequence[DecodeRows]) -> bool:
        """Whether the forward pass queued behind this step is that of these parts."""
        if not self.continues or forward is not self._forward or len(parts) != len(self.parts) or self._outcome is None:
            return False
        sampled, num_accepted, drafts, _ = self._outcome
        first_row = 0
        for place, (before, part) in enumerate(zip(self.parts, parts, strict=True)):
            accepted = num_accepted[place]
            token_ids = (sampled[first_row + accepted - 1], *drafts[place][: before.draw.depth])
            if part[:5] != (before.request_id, before.slot, token_ids, before.start + accepted, accepted):
                return False
            # Pages that the sequence got since then were not in the table.
            if part.position_offset != before.position_offset or part.end > len(before.pages) * PAGE_TOKENS:
                return False
            first_row += len(before.token_ids)
        return True


class GraphDecoder:
    """A decoder's steps, replayed."""

    def __init__(self, decoder: Decoder, shapes: StepShapes, recorder: GraphRecorder) -> None:
        self._decoder = decoder
        self._recorder = recorder
        self._device = device = recorder.device
        self._limits = shapes
        largest = shapes.largest
        self._table = PageTable(largest.num_sequences, largest.num_pages, is_pinned=recorder.is_pinned)
        self._page_table = self._table.rows.to(device)
        self._forwarded = decoder.new_forwarded(largest.num_rows)
        self._words = torch.zeros(self._layout(*largest[:2]).size, dtype=torch.int64, device=device)
        """The outcome of the step that is under way."""
        self._shapes: dict[tuple[int, int], _Shape] = {}
        """By numbers of rows and sequences."""
        self._blocks: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        """By numbers of sequences, of drafts and of the page table's columns."""
        self._last: _GraphStep | None = None
        self._folded: set[int] = set()
        """Slots whose accepted tokens a discarded forward pass has folded into the state."""
        self._done = recorder.new_event()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The numbers of rows and sequences of all shapes, the largest first."""
        return sorted(((rows, count) for count, choices in self._limits.rows.items() for rows in choices), reverse=True)

    def capture(self, report: Callable[[], None]) -> None:
        """Captures the graphs of all shapes; reports after each."""
        for place, (num_rows, num_sequences) in enumerate(self.sizes):
            shape = self._new_shape(num_rows, num_sequences)
            if not place:
                self._run_once(shape)
            for num_pages in reversed(self._limits.widths):
                self._capture_forward(shape, num_pages)
            for depth in reversed(self._limits.depths):
                self._capture_sampling(shape, depth)
            report()
        for num_sequences in reversed(tuple(self._limits.rows)):
            for depth in reversed(self._limits.block_depths):
                for num_pages in reversed(self._limits.widths):
                    self._capture_block(num_sequences, depth, num_pages)

    def start(self, parts: Sequence[DecodeRows], depths: DraftDepths, *, is_alone: bool) -> DecodeStep | None:
        """Queues the model's part of a step; None, and nothing done, where the shape was not captured.

        The step before must have been read. `is_alone` says that no other rows are computed before these sequences'
        next ones.
        """
        graphs = self._find(parts, depths)
        if graphs is None:
            return None
        is_predicted = self._last is not None and self._last.matches_prediction(graphs.forward, parts)
        if not is_predicted:
            parts = self._without_folded(parts)
        self._put(graphs.shape, parts)
        if not is_predicted:
            graphs.forward.replay()
        continues = is_alone and _continue(parts)
        self._last = _GraphStep(self._decoder, graphs, parts, self._done, continues=continues)
        return self._last

    def start_after(self, parts: Sequence[DecodeRows], depths: DraftDepths, hidden: Tensor) -> DecodeStep | None:
        """`start` for parts of one row each whose hidden states [n, H] are computed already: only sampling is left."""
        graphs = self._find(parts, depths)
        if graphs is None:
            return None
        parts = self._without_folded(parts)
        self._decoder.logits_for(hidden).copy_to(graphs.shape.forwarded.first(len(parts)))
        self._put(graphs.shape, parts, is_computed=True)
        self._last = _GraphStep(self._decoder, graphs, parts, self._done, continues=False)
        return self._last

    def leave(self, parts: Sequence[DecodeRows]) -> Sequence[DecodeRows]:
        """The parts as a step without graphs must compute them."""
        parts = self._without_folded(parts)
        self._last = None
        return parts

    def num_kernels(self) -> int:
        """Kernels in the graphs of the step that was started last."""
        return sum(map(_count_kernels, self._last.graphs)) if self._last else 0

    def _put(self, shape: _Shape, parts: Sequence[DecodeRows], *, is_computed: bool = False) -> None:
        """Queues the copies of a step's inputs to the device."""
        shape.words.copy_(shape.packer.pack(parts, is_computed=is_computed), non_blocking=True)
        if num_changed := self._table.put(parts):
            self._page_table[:num_changed].copy_(self._table.rows[:num_changed], non_blocking=True)

    def _find(self, parts: Sequence[DecodeRows], depths: DraftDepths) -> _StepGraphs | None:
        """The captured graphs of a step over these parts."""
        depth = self._limits.fit_depth(depths.mtp)
        if depth is None:
            return None
        sizes = self._limits.fit(exact_sizes(parts, max(depth, depths.block)))
        shape = self._shapes.get(sizes[:2]) if sizes else None
        if sizes is None or shape is None:
            return None
        block = None
        if depths.block:
            fitting = self._limits.fit_block(len(blocks_of(parts)), depths.block)
            if fitting is None:
                return None
            block = self._blocks[(*fitting, sizes.num_pages)]
        return _StepGraphs(shape, shape.forward[sizes.num_pages], shape.sampling[depth], block)

    def _without_folded(self, parts: Sequence[DecodeRows]) -> Sequence[DecodeRows]:
        """The parts, with num_accepted 0 where a discarded forward pass has folded the accepted tokens in already."""
        if self._last is not None and self._last.continues:
            self._folded.update(part.slot for part in self._last.parts)
        if not self._folded:
            return parts
        folded = [part._replace(num_accepted=0) if part.slot in self._folded else part for part in parts]
        self._folded.difference_update(part.slot for part in parts)
        return folded

    def _new_shape(self, num_rows: int, num_sequences: int) -> _Shape:
        sizes = StepSizes(num_rows, num_sequences, self._limits.num_pages)
        packer = InputPacker(sizes, is_pinned=self._recorder.is_pinned)
        forwarded = self._forwarded.first(num_rows)
        shape = _Shape(
            sizes, packer, packer.words.to(self._device), self._page_table, self._limits.rows_per_sequence, forwarded
        )
        self._shapes[num_rows, num_sequences] = shape
        return shape

    def _run_once(self, shape: _Shape) -> None:
        """Runs a shape without graphs: what is made once and kept, such as tables, must not be made in a capture."""
        self._decoder.forward(shape.inputs().batch).copy_to(shape.forwarded)
        self._decoder.sample(shape.forwarded, shape.inputs(), self._limits.depths[-1], self._outcome(shape))
        self._decoder.anchor_blocks(shape.inputs(), self._outcome(shape))
        if self._limits.block_depths:
            self._draft_blocks(max(self._limits.rows), self._limits.block_depths[-1], self._limits.num_pages)
        self._recorder.synchronize()

    def _capture_forward(self, shape: _Shape, num_pages: int) -> None:
        # The words are split inside the graph: what is computed outside of it would stay as it was at capture.
        def work() -> None:
            self._decoder.forward(shape.inputs(num_pages).batch).copy_to(shape.forwarded)

        shape.forward[num_pages], _ = self._recorder.record(work)

    def _capture_sampling(self, shape: _Shape, depth: int) -> None:
        layout, outcome = self._layout(*shape.sizes[:2]), self._outcome(shape)
        words = self._words[: layout.size]
        pinned = torch.empty(words.shape, dtype=words.dtype, pin_memory=self._recorder.is_pinned)
        graph, _ = self._recorder.record(lambda: self._sample(shape, shape.inputs(), depth, pinned))
        shape.sampling[depth] = _SamplingGraph(graph, layout, words, outcome, self._is_last, pinned, pinned.numpy())
        if not self._is_last:
            # It is launched between graphs, so its code is loaded here; on blank inputs it does nothing.
            predict_inputs(shape.inputs().batch, outcome)

    @property
    def _is_last(self) -> bool:
        """Of sampling graphs."""
        return not self._limits.block_depths

    def _sample(self, shape: _Shape, inputs: StepInputs, depth: int, pinned: Tensor) -> None:
        """What a sampling graph does.

        The next inputs are predicted in any case, so that nothing is launched between two graphs: where another step
        follows, its own inputs replace them.
        """
        outcome = self._outcome(shape)
        self._decoder.sample(shape.forwarded, inputs, depth, outcome)
        self._decoder.anchor_blocks(inputs, outcome)
        if self._is_last:
            pinned.copy_(self._words[: len(pinned)], non_blocking=True)
            predict_inputs(inputs.batch, outcome)

    def _capture_block(self, num_sequences: int, depth: int, num_pages: int) -> None:
        graph, _ = self._recorder.record(lambda: self._draft_blocks(num_sequences, depth, num_pages))
        self._blocks[num_sequences, depth, num_pages] = graph

    def _draft_blocks(self, num_sequences: int, depth: int, num_pages: int) -> None:
        self._decoder.draft_blocks(num_sequences, depth, self._page_table[:, :num_pages], self._drafts())

    def _layout(self, num_rows: int, num_sequences: int) -> OutcomeLayout:
        return OutcomeLayout(num_rows, num_sequences, self._limits.width)

    def _outcome(self, shape: _Shape) -> OutcomeTensors:
        """The fields of the shared buffer as steps of this shape write them."""
        layout = self._layout(*shape.sizes[:2])
        return layout.split(self._words[: layout.size])

    def _drafts(self) -> Tensor:
        """int64 [S, width]: where the drafts of any shape's sequences are."""
        count, width = self._limits.largest.num_sequences, self._limits.width
        return self._words[: count * width].view(count, width)


def predict_inputs(batch: Batch, outcome: OutcomeTensors) -> None:
    """Turns a step's inputs, in place, into those of the step that follows from its outcome, on the device."""
    next_inputs(
        StepTensors(batch.token_ids, batch.positions[0], batch.slot_mapping, batch.num_accepted, batch.seen),
        batch.cu_rows,
        batch.page_table,
        outcome.token_ids,
        outcome.num_accepted,
        outcome.drafts,
        PAGE_TOKENS,
    )


def _continue(parts: Sequence[DecodeRows]) -> bool:
    """Whether the sequences' next rows follow from this step alone, as many as now."""
    return all(part.draw.continues and len(part.token_ids) == 1 + part.draw.depth for part in parts)


def _count_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """The kernels among a graph's nodes, by the driver's count."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    driver.cuGraphGetNodes(handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    kinds = (ctypes.c_int * count.value)()
    for place, node in enumerate(nodes):
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kinds, place * ctypes.sizeof(ctypes.c_int)))
    return sum(kind == _KERNEL_NODE for kind in kinds)
