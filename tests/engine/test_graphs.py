"""The decoder over graphs, with graphs that call what they recorded: all of it but CUDA's own part."""

import threading

import pytest
import torch

from onebox.engine.api import Engine, EngineConfig, Finished, Request, SamplingParams, Started, Tokens
from onebox.engine.batch import decode_inputs
from onebox.engine.decode import Forwarded, OutcomeLayout
from onebox.engine.graphs import GraphDecoder, _SamplingGraph, _Shape
from onebox.engine.inputs import InputPacker
from onebox.model.load import load_model
from tests.engine.gate import Variant
from tests.engine.gate_prompts import all_cases
from tests.engine.tiny import tiny_runner


class CalledGraph:
    """Does its work at every replay, into the same tensors, as a captured graph does."""

    def __init__(self, work, results):
        self._work, self._results, self.num_replays = work, results, 0

    def replay(self):
        self.num_replays += 1
        made = self._work()
        parts = (made.hidden, made.logits) if isinstance(made, Forwarded) else (made,)
        for result, part in zip(self._results, parts, strict=True):
            result.copy_(part)


class Clock:
    """The device's event; keeps the order in which things happen."""

    def __init__(self):
        self.happened = []

    def record(self):
        self.happened.append("given")

    def synchronize(self):
        self.happened.append("read")


class CalledGraphs(GraphDecoder):
    """Captures nothing, for the CPU's twins do not take blank rows: so no shape may have any, up to 16 rows a step."""

    def __init__(self, decoder, spec):
        self._decoder, self._spec, self._shapes = decoder, spec, {}
        self._done, self._last, self._folded = Clock(), None, set()
        self.was_predicted = []
        """Of each step behind which one was queued: whether it was the next one."""

    def start(self, parts, depth, *, is_alone, may_capture):
        is_queued = self._last is not None and self._last.continues
        before = self._num_forwards()
        step = super().start(parts, depth, is_alone=is_alone, may_capture=may_capture)
        if step and is_queued:
            self.was_predicted.append(self._num_forwards() == before)
        return step

    def _num_forwards(self):
        return sum(shape.forward.num_replays for shape in self._shapes.values())

    def _capture(self, sizes):
        packer = InputPacker(sizes)
        words = packer.words.clone()
        results = [torch.empty(sizes.num_rows, width) for width in (self._spec.hidden_size, self._spec.vocab_size)]
        graph = CalledGraph(lambda: self._decoder.forward(decode_inputs(words, sizes).batch), results)
        shape = self._shapes[sizes] = _Shape(sizes, packer, words, graph, Forwarded(*results))
        return shape

    def _capture_sampling(self, shape, depth):
        sizes, forwarded, inputs = shape.sizes, shape.forwarded, shape.words
        layout = OutcomeLayout(sizes.num_rows, sizes.num_sequences, depth)
        words = torch.empty(layout.size, dtype=torch.int64)
        graph = CalledGraph(lambda: self._decoder.sample(forwarded, decode_inputs(inputs, sizes), depth), [words])
        pinned = torch.empty_like(words)
        shape.sampling[depth] = _SamplingGraph(graph, layout, words, layout.split(words), pinned, pinned.numpy())


def over_graphs(runner):
    runner._graphs = CalledGraphs(runner._decoder, runner._model.spec)
    return runner


@pytest.mark.parametrize(
    "variant",
    [
        Variant("bf16", drafts="none", load="eight", pages="few"),
        Variant("fp8", drafts="mtp3", load="random", aborts="aborts"),
        Variant("turboquant", "warm", "oracle4", "two"),
    ],
    ids=str,
)
def test_inputs_that_are_packed_over_those_of_the_step_before_give_the_same_bits(gate, variant):
    cases = [case for case in all_cases() if not case.is_long][::9]
    used = []
    report = gate.run(variant, cases, wrap=lambda runner: used.append(runner) or over_graphs(runner))
    assert not report.differences, "\n".join(report.differences)
    assert len({sizes.num_pages for sizes in used[0]._graphs._shapes}) > 1


@pytest.mark.parametrize(
    "variant",
    [
        Variant("bf16", drafts="none", load="random", aborts="aborts", pages="few"),
        Variant("bf16", drafts="mtp2", load="two"),
        Variant("bf16", "warm", "auto", "random", aborts="aborts"),
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
    # The prompt's token is told before the first graphs are captured, which takes long; the last one waits for nobody.
    assert happened == [
        (Started, Tokens),
        *("given", "read"),
        *("given", (Tokens,), "read"),
        *("given", (Tokens,), "read"),
        *("given", (Tokens,), "read"),
        (Tokens, Finished),
    ]
