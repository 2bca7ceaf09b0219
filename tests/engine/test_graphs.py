"""The decoder over graphs, on a GPU that is played (`played.py`): all of it but CUDA's own part."""

import threading

import pytest
import torch

from onebox.engine.api import Engine, EngineConfig, Finished, Request, SamplingParams, Started, Tokens
from onebox.engine.graphs import GraphDecoder
from onebox.model.load import load_model
from tests.engine.gate import Variant
from tests.engine.gate_prompts import all_cases
from tests.engine.played import PlayedRecorder, play_gpu
from tests.engine.tiny import tiny_runner


@pytest.fixture
def predicted(monkeypatch) -> list[bool]:
    """Of each step behind which a forward pass was queued: whether it was the next step's."""
    found: list[bool] = []
    start = GraphDecoder.start

    def watched(self, parts, depths, *, is_alone):
        is_queued = self._last is not None and self._last.continues
        before = num_forwards(self)
        step = start(self, parts, depths, is_alone=is_alone)
        if is_queued:
            found.append(num_forwards(self) == before)
        return step

    monkeypatch.setattr(GraphDecoder, "start", watched)
    return found


def num_forwards(graphs: GraphDecoder) -> int:
    return sum(graph.num_replays for shape in graphs._shapes.values() for graph in shape.forward.values())


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
def test_forward_passes_queued_before_an_outcome_is_known_change_no_bit_whether_used_or_discarded(
    played_gate, predicted, variant
):
    cases = [case for case in all_cases() if not case.is_long][3::7]
    report = played_gate().run(variant, cases)
    assert not report.differences, "\n".join(report.differences)
    assert set(predicted) == {True, False}


def test_prefills_and_steps_replay_graphs_of_several_shapes_and_table_widths(played_gate):
    gate = played_gate()
    cases = [case for case in all_cases() if not case.is_long][::9]
    report = gate.run(Variant("bf16", "warm", "mixed15", "random", aborts="aborts"), cases)
    assert not report.differences, "\n".join(report.differences)
    runner = gate._shared["bf16", None]
    steps = [graph.num_replays for shape in runner._graphs._shapes.values() for graph in shape.forward.values()]
    prefills = [graph.graph.num_replays for graph in runner._prefill_graphs._graphs.values()]
    assert sum(count > 1 for count in steps) > 2
    assert sum(count > 1 for count in prefills) > 1


def test_what_a_step_gave_is_told_while_the_device_computes_the_next_one(checkpoint, monkeypatch):
    play_gpu(monkeypatch)
    config = EngineConfig(max_model_len=200, num_pages=4, max_num_seqs=1)
    runner = tiny_runner(load_model(checkpoint, torch.device("cpu"), torch.bfloat16), config)
    runner.capture_graphs(recorder=PlayedRecorder())
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
