"""Decode steps as CUDA graphs, captured when a shape is first met.

A step is two graphs: the model up to its logits, and sampling with the drafts. Both read one static buffer. A graph is
captured over blank inputs, on which running is harmless: no row belongs to a sequence, nothing is folded into a state.
Shapes are rounded up so that there are few; what lies beyond a step's own rows is blank as well.

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
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.batch import decode_inputs
from onebox.engine.decode import DecodeOutcome, Decoder, DecodeStep, Forwarded, OutcomeLayout, OutcomeTensors
from onebox.engine.inputs import InputPacker, StepSizes, exact_sizes
from onebox.engine.step import DecodeRows
from onebox.kernels.step import next_inputs
from onebox.kernels.step.tensors import StepTensors
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["GraphDecoder"]

T = TypeVar("T")

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _SamplingGraph(NamedTuple):
    """The second graph of a step, what it writes, and where that is copied to on the host."""

    graph: torch.cuda.CUDAGraph
    layout: OutcomeLayout
    words: Tensor
    outcome: OutcomeTensors
    """The fields of `words`."""
    pinned: Tensor
    values: NDArray[np.int64]
    """The same memory as `pinned`."""


@dataclass
class _Shape:
    """The graphs of one shape of step, and the tensors they read and write."""

    sizes: StepSizes
    packer: InputPacker
    words: Tensor
    forward: torch.cuda.CUDAGraph
    forwarded: Forwarded
    sampling: dict[int, _SamplingGraph] = field(default_factory=dict)
    """By the depth of drafting."""


class _GraphStep:
    """A step whose first graph runs; `done` is recorded behind its last copy."""

    def __init__(
        self, shape: _Shape, parts: Sequence[DecodeRows], depth: int, done: torch.cuda.Event, *, continues: bool
    ) -> None:
        self.forwarded = shape.forwarded
        self.parts = parts
        self.continues = continues
        """Whether the next step's forward pass is queued with this step's sampling."""
        self._shape = shape
        self._sampling = shape.sampling[depth]
        self._done = done
        self._outcome: DecodeOutcome | None = None

    @property
    def graphs(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        return self._shape.forward, self._sampling.graph

    def sample(self) -> None:
        sampling = self._sampling
        sampling.graph.replay()
        sampling.pinned.copy_(sampling.words, non_blocking=True)
        self._done.record()
        if self.continues:
            self._make_next_inputs()
            self._shape.forward.replay()

    def _make_next_inputs(self) -> None:
        """Turns this step's inputs and outcome into the next step's inputs, on the device."""
        batch = decode_inputs(self._shape.words, self._shape.sizes).batch
        outcome = self._sampling.outcome
        next_inputs(
            StepTensors(batch.token_ids, batch.positions[0], batch.slot_mapping, batch.num_accepted, batch.seen),
            batch.cu_rows,
            batch.page_table,
            outcome.token_ids,
            outcome.num_accepted,
            outcome.drafts,
            PAGE_TOKENS,
        )

    def read(self) -> DecodeOutcome:
        self._done.synchronize()
        self._outcome = self._sampling.layout.read(self._sampling.values.tolist())
        return self._outcome

    def matches_prediction(self, shape: _Shape | None, parts: Sequence[DecodeRows]) -> bool:
        """Whether the forward pass queued behind this step is that of these parts."""
        if not self.continues or shape is not self._shape or len(parts) != len(self.parts) or self._outcome is None:
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
    """A decoder's steps, replayed. All graphs share a memory pool: one runs at a time, and its result is read."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._shapes: dict[StepSizes, _Shape] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last: _GraphStep | None = None
        self._folded: set[int] = set()
        """Slots whose accepted tokens a discarded forward pass has folded into the state."""

    def start(self, parts: Sequence[DecodeRows], depth: int, *, is_alone: bool, may_capture: bool) -> DecodeStep | None:
        """Queues the model's part of a step; None, and nothing done, where a capture is needed and must wait.

        The step before must have been read. `is_alone` says that no other rows are computed before these sequences'
        next ones.
        """
        exact = exact_sizes(parts, depth)
        sizes = StepSizes(
            _rounded(exact.num_rows), _rounded(exact.num_sequences), 1 << (exact.num_pages - 1).bit_length()
        )
        shape = self._shapes.get(sizes)
        is_captured = shape is not None and depth in shape.sampling
        if not (is_captured or may_capture):
            return None
        is_predicted = is_captured and self._last is not None and self._last.matches_prediction(shape, parts)
        if not is_predicted:
            parts = self._without_folded(parts)
        if shape is None or not is_captured:
            shape = shape or self._capture(sizes)
            self._capture_sampling(shape, depth)
        shape.words.copy_(shape.packer.pack(parts), non_blocking=True)
        if not is_predicted:
            shape.forward.replay()
        self._last = _GraphStep(shape, parts, depth, self._done, continues=is_alone and _continue(parts))
        return self._last

    def num_kernels(self) -> int:
        """Kernels in the graphs of the step that was started last."""
        return sum(map(_count_kernels, self._last.graphs)) if self._last else 0

    def _without_folded(self, parts: Sequence[DecodeRows]) -> Sequence[DecodeRows]:
        """The parts, with num_accepted 0 where a discarded forward pass has folded the accepted tokens in already."""
        if self._last is not None and self._last.continues:
            self._folded.update(part.slot for part in self._last.parts)
        if not self._folded:
            return parts
        folded = [part._replace(num_accepted=0) if part.slot in self._folded else part for part in parts]
        self._folded.difference_update(part.slot for part in parts)
        return folded

    def _capture(self, sizes: StepSizes) -> _Shape:
        packer = InputPacker(sizes, is_pinned=True)
        words = packer.words.to(self._device)
        graph, forwarded = self._record(lambda: self._decoder.forward(decode_inputs(words, sizes).batch))
        shape = self._shapes[sizes] = _Shape(sizes, packer, words, graph, forwarded)
        return shape

    def _capture_sampling(self, shape: _Shape, depth: int) -> None:
        shape.words.copy_(InputPacker(shape.sizes).words)
        shape.forward.replay()
        # The words are split inside the graph: what is computed outside of it would stay as it was at capture.
        graph, words = self._record(
            lambda: self._decoder.sample(shape.forwarded, decode_inputs(shape.words, shape.sizes), depth)
        )
        layout = OutcomeLayout(shape.sizes.num_rows, shape.sizes.num_sequences, depth)
        pinned = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        shape.sampling[depth] = _SamplingGraph(graph, layout, words, layout.split(words), pinned, pinned.numpy())

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
