"""The decoder over graphs, with graphs that call what they recorded: all of it but CUDA's own part."""

import threading
from dataclasses import replace

import pytest
import torch

from onebox.engine.api import Engine, EngineConfig, Finished, Request, SamplingParams, Started, Tokens
from onebox.engine.decode import Decoder
from onebox.engine.graphs import GraphDecoder, _SamplingGraph, _StepGraphs
from onebox.engine.inputs import blocks_of, exact_sizes
from onebox.engine.prefill import PrefillGraphs, _PrefillGraph
from onebox.engine.prompts import PromptPacker, PromptSizes, prompt_inputs
from onebox.engine.shapes import StepShapes
from onebox.model.load import load_model
from tests.engine.gate import Variant
from tests.engine.gate_prompts import all_cases
from tests.engine.tiny import tiny_runner


class CalledGraph:
    """Does its work at every replay, into the same tensors, as a captured graph does."""

    def __init__(self, work):
        self._work, self.num_replays = work, 0

    def replay(self):
        self.num_replays += 1
        self._work()


class Clock:
    """The device's event; keeps the order in which things happen."""

    def __init__(self):
        self.happened = []

    def record(self):
        self.happened.append("given")

    def synchronize(self):
        self.happened.append("read")


class CalledRecorder:
    """Records nothing: what is replayed is made by the classes below."""

    device = torch.device("cpu")

    def __init__(self):
        self.clock = Clock()

    def new_event(self):
        return self.clock


class CalledPrefills(PrefillGraphs):
    """Captures nothing, for the CPU's twins do not take blank rows: each prefill gets its own shape, when it is met."""

    def _find(self, chunks):
        if any(chunk.images for chunk in chunks):
            return None
        sizes = PromptSizes.of(chunks)
        return self._graphs.setdefault(sizes, self._called(sizes))

    def _called(self, sizes):
        packer, model = PromptPacker(sizes), self._prefiller.model
        words = packer.words.clone()
        hidden = torch.empty(sizes.num_rows, model.spec.hidden_size, dtype=model.dtype)

        def work():
            inputs = prompt_inputs(words, sizes, self._page_table[: sizes.num_chunks])
            hidden.copy_(self._prefiller.forward(inputs._replace(batch=replace(inputs.batch, num_rows=None))))

        return _PrefillGraph(packer, words, CalledGraph(work), hidden)


class CalledGraphs(GraphDecoder):
    """Captures nothing, for the CPU's twins do not take blank rows: each step gets its own shape, when it is met."""

    def __init__(self, decoder, config):
        super().__init__(decoder, StepShapes.of(config), CalledRecorder())
        self.was_predicted = []
        """Of each step behind which one was queued: whether it was the next one."""
        self.widths = set()

    def start(self, parts, depths, *, is_alone):
        is_queued = self._last is not None and self._last.continues
        before = self._num_forwards()
        step = super().start(parts, depths, is_alone=is_alone)
        if is_queued:
            self.was_predicted.append(self._num_forwards() == before)
        return step

    def _num_forwards(self):
        return sum(graph.num_replays for shape in self._shapes.values() for graph in shape.forward.values())

    def _find(self, parts, depths):
        num_rows, num_sequences, num_pages = exact_sizes(parts, depths.most)
        self.widths.add(num_pages)
        shape = self._shapes.get((num_rows, num_sequences)) or self._new_shape(num_rows, num_sequences)
        if num_pages not in shape.forward:
            self._capture_forward(shape, num_pages)
        if depths.mtp not in shape.sampling:
            self._capture_sampling(shape, depths.mtp)
        block = (len(blocks_of(parts)), depths.block, num_pages) if depths.block else None
        graph = CalledGraph(lambda: self._draft_blocks(*block)) if block else None
        return _StepGraphs(shape, shape.forward[num_pages], shape.sampling[depths.mtp], graph)

    def _capture_sampling(self, shape, depth):
        layout, outcome = self._layout(*shape.sizes[:2]), self._outcome(shape)
        words = self._words[: layout.size]
        pinned = torch.empty_like(words)
        graph = CalledGraph(lambda: self._sample(shape, exact(shape), depth, pinned))
        shape.sampling[depth] = _SamplingGraph(graph, layout, words, outcome, self._is_last, pinned, pinned.numpy())

    def _capture_forward(self, shape, num_pages):
        def work():
            self._decoder.forward(exact(shape, num_pages).batch).copy_to(shape.forwarded)

        shape.forward[num_pages] = CalledGraph(work)


def exact(shape, num_pages=None):
    """The inputs of a shape without blank rows."""
    inputs = shape.inputs(num_pages)
    return inputs._replace(batch=replace(inputs.batch, num_rows=None), num_sequences=None)


def over_graphs(runner):
    # As on a GPU: a graph writes the contexts of its own rows.
    runner._decoder = Decoder(runner._model, replace(runner._memory, kept_rows=0))
    graphs = runner._graphs = CalledGraphs(runner._decoder, runner._config)
    num_pages = graphs._limits.num_pages
    runner._prefill_graphs = CalledPrefills(runner._prefiller, CalledRecorder(), runner._config, num_pages)
    return runner


@pytest.mark.parametrize(
    "variant",
    [
        Variant("bf16", drafts="none", load="eight", pages="few"),
        Variant("fp8", drafts="mtp3", load="random", aborts="aborts"),
        Variant("turboquant", "warm", "oracle4", "two"),
        Variant("bf16", "warm", "auto", "random", aborts="aborts"),
        Variant("bf16", "warm", "mixed15", "random", aborts="aborts"),
    ],
    ids=str,
)
def test_inputs_that_are_packed_over_those_of_the_step_before_give_the_same_bits(gate, variant):
    cases = [case for case in all_cases() if not case.is_long][::9]
    used = []
    report = gate.run(variant, cases, wrap=lambda runner: used.append(runner) or over_graphs(runner))
    assert not report.differences, "\n".join(report.differences)
    assert len(used[0]._graphs.widths) > 1
    assert sum(graph.graph.num_replays for graph in used[0]._prefill_graphs._graphs.values()) > 2


@pytest.mark.parametrize(
    "variant",
    [
        Variant("bf16", drafts="none", load="random", aborts="aborts", pages="few"),
        Variant("bf16", drafts="mtp2", load="two"),
        Variant("bf16", "warm", "mtp2", "eight", aborts="aborts"),
        Variant("bf16", drafts="dflash3", load="two"),
    ],
    ids=str,
)
def test_forward_passes_queued_before_an_outcome_is_known_change_no_bit_whether_used_or_discarded(gate, variant):
    cases = [case for case in all_cases() if not case.is_long][3::7]
    used = []
    report = gate.run(variant, cases, wrap=lambda runner: used.append(runner) or over_graphs(runner))
    assert not report.differences, "\n".join(report.differences)
    predicted = [was for runner in used for was in runner._graphs.was_predicted]
    assert set(predicted) == {True, False}


def test_what_a_step_gave_is_told_while_the_device_computes_the_next_one(checkpoint):
    config = EngineConfig(max_model_len=200, num_pages=4, max_num_seqs=1)
    runner = over_graphs(tiny_runner(load_model(checkpoint, torch.device("cpu"), torch.float32), config))
    happened = runner._graphs._done.happened
    done = threading.Event()

    def deliver(deliveries, stats, started_at):
        if deliveries:
            happened.append(tuple(type(event) for _, event in deliveries))
        if not stats.num_running:
            done.set()
        return []

    with Engine(runner, config, deliver=deliver) as engine:
        engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=5, ignore_eos=True)))
        assert done.wait(timeout=60), "the last step was never delivered"
    # The last one waits for nobody.
    assert happened == [
        *("given", "read"),
        *("given", (Started, Tokens), "read"),
        *("given", (Tokens,), "read"),
        *("given", (Tokens,), "read"),
        *("given", (Tokens,), "read"),
        (Tokens, Finished),
    ]
