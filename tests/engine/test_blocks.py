"""The block drafter's drafts: the same ones whatever the context went through before they were made.

A wrong draft costs time and changes no answer, so the gate would not notice a context that was lost.
"""

from dataclasses import replace

import pytest

from onebox.engine.draft.kinds import Drafter
from onebox.engine.request import SamplingParams
from onebox.engine.step import Result, StepOutput
from tests.engine.gate import Variant
from tests.engine.gate_prompts import Case, message, text
from tests.engine.scripted import DeferredRun

DEPTH = 7
CASES = [
    Case(
        f"long {i}",
        "blocks",
        message(150 + 40 * i, f"first {i}") + message(90, f"second {i}"),
        SamplingParams(temperature=i % 2, seed=2000 + i, max_tokens=24 + DEPTH, ignore_eos=True),
    )
    for i in range(3)
]


class Recorder:
    """Notes the drafts of whole blocks, by request and by the place of the token that they follow."""

    def __init__(self, runner):
        self._runner = runner
        self.drafts = {}

    @property
    def vocab_size(self):
        return self._runner.vocab_size

    def put_draft_rows(self, places, token_ids):
        self._runner.put_draft_rows(places, token_ids)

    def start(self, plan):
        return DeferredRun(lambda: self._run(plan))

    def _run(self, plan):
        output: StepOutput = self._runner.start(plan).finish()
        for part, result in zip(plan.rows, output.rows, strict=True):
            self._note(part, part.start + result.num_accepted, result)
        for chunk, result in zip(plan.chunks, output.chunks, strict=True):
            if chunk.draw:
                self._note(chunk, chunk.end, result)
        return output

    def _note(self, part, place, result):
        if part.draw.drafter is Drafter.DFLASH and part.draw.depth == DEPTH and isinstance(result, Result):
            self.drafts.setdefault((part.request_id, place), set()).add(result.drafts)


def drafts_of(gate, variant, cases):
    """(drafts by request and place, the engine's counts)."""
    recorders = []

    def record(runner):
        recorders.append(Recorder(runner))
        return recorders[-1]

    report = gate.run(variant, cases, wrap=record)
    assert not report.differences, "\n".join(report.differences)
    return recorders[-1].drafts, report.stats


@pytest.fixture(scope="module")
def alone(gate):
    """One request at a time, each prompt in one piece, nothing cached."""
    drafts, _ = drafts_of(gate, Variant("bf16", drafts="dflash7"), CASES)
    assert all(len(found) == 1 for found in drafts.values())
    # Every place of every answer, and they do follow the context.
    assert len(drafts) > 60
    assert len({next(iter(found)) for found in drafts.values()}) > 50
    return drafts


@pytest.mark.parametrize(
    ("variant", "happened"),
    [
        (Variant("bf16", "warm", "dflash7"), lambda stats: stats.prefix.hit_tokens),
        (Variant("bf16", "disk", "dflash7", "two"), lambda stats: stats.disk.num_hits),
        (Variant("bf16", "cold", "dflash7", "two", chunk="64"), lambda stats: stats.totals.drafts.num_drafted),
        (Variant("bf16", "warm", "dflash7", "eight", "aborts", "64"), lambda stats: stats.prefix.hit_tokens),
        (Variant("bf16", "warm", "mixed7", "alone"), lambda stats: stats.totals.drafts.num_accepted),
    ],
    ids=["from memory", "from disk", "in chunks", "beside aborts", "while others drafted"],
)
def test_a_block_is_the_same_whatever_its_context_went_through(gate, alone, variant, happened):
    drafts, stats = drafts_of(gate, variant, CASES)
    assert happened(stats)
    shared = alone.keys() & drafts.keys()
    # Most blocks of the mixture have other depths, and their rows see each other.
    assert len(shared) > (1 if variant.drafts == "mixed7" else 30)
    assert {key: drafts[key] for key in shared} == {key: alone[key] for key in shared}


def test_a_block_is_the_same_after_a_preemption(gate):
    sampling = SamplingParams(max_tokens=30 + DEPTH, ignore_eos=True)
    cases = [
        Case(f"growing {i}", "blocks", text(40 + 2 * i, i), replace(sampling, seed=3000 + i, temperature=i % 2))
        for i in range(5)
    ]
    alone, _ = drafts_of(gate, Variant("bf16", drafts="dflash7"), cases)
    drafts, stats = drafts_of(gate, Variant("bf16", drafts="dflash7", load="eight", pages="few"), cases)
    assert stats.totals.num_preempted > 0
    shared = alone.keys() & drafts.keys()
    assert len(shared) > 100
    assert {key: drafts[key] for key in shared} == {key: alone[key] for key in shared}


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_over_graphs_a_block_is_the_same(played_gate, cache):
    gate = played_gate()
    alone, _ = drafts_of(gate, Variant("bf16", drafts="dflash7"), CASES)
    drafts, _ = drafts_of(gate, Variant("bf16", cache, "dflash7", "two"), CASES)
    assert len(alone.keys() & drafts.keys()) > 30
    assert all(drafts[key] == alone[key] for key in alone.keys() & drafts.keys())


def test_short_prompts_are_drafted_from_their_first_token_on(gate):
    case = Case("one", "blocks", text(1, "x"), SamplingParams(seed=1, max_tokens=12, ignore_eos=True))
    drafts, _ = drafts_of(gate, Variant("bf16", drafts="dflash7"), [case])
    assert ("one", 1) in drafts
