"""A head in two planes: the engine's answers are those of the same head read whole, bit for bit."""

from dataclasses import replace

import pytest
import torch

from onebox.engine.request import Request, SamplingParams
from onebox.formats import quantize_int8_rows
from onebox.formats.fragments import to_fragments
from onebox.model.head import PlaneHead
from onebox.model.linear import IntLinear
from onebox.model.load import load_model
from onebox.model.reference_weights import load_weights
from tests.engine.gate import Gate, Variant
from tests.engine.gate_prompts import all_cases
from tests.engine.played import PlayedRecorder, play_gpu
from tests.engine.tiny import tiny_engine


class WholeHead:
    """Any head without the methods that leave something out."""

    def __init__(self, head):
        self.decode, self.prefill = head.decode, head.prefill


class WatchedHead(PlaneHead):
    """Counts how its logits were completed."""

    def __init__(self, head):
        super().__init__(head.high, head.plane)
        object.__setattr__(self, "counts", {"complete": 0, "candidates": 0, "left": 0})

    def complete(self, rows, logits):
        self.counts["complete"] += 1
        super().complete(rows, logits)

    def complete_candidates(self, rows, logits, sampled):
        before, complete = logits.clone(), logits.clone()
        super().complete(rows, complete)
        super().complete_candidates(rows, logits, sampled)
        self.counts["candidates"] += 1
        if not int(sampled.is_complete):
            self.counts["left"] += int(((logits == before) & (before != complete)).sum())


@pytest.fixture(scope="module")
def models(checkpoint):
    return models_of(checkpoint, torch.float32)


def models_of(checkpoint, dtype):
    """(with a head in planes, with the same head read whole), on a CPU."""
    model = load_model(checkpoint, torch.device("cpu"), dtype)
    codes, scale = quantize_int8_rows(load_weights(checkpoint).weights["lm_head.weight"])
    head = PlaneHead.of(IntLinear(8, to_fragments(codes, 8), scale))
    return replace(model, lm_head=head), replace(model, lm_head=WholeHead(head))


def check_answers(planes, whole, variant):
    planes._references = whole._references
    cases = [case for case in all_cases() if not case.is_long][2::9]
    whole.reference(variant.kv, cases)
    report = planes.run(variant, cases)
    assert not report.differences, "\n".join(report.differences)


def test_answers_are_those_of_the_head_read_whole(models):
    check_answers(*map(Gate, models), Variant("bf16", drafts="mtp2", load="two"))


def test_answers_over_graphs_are_those_of_the_head_read_whole(checkpoint, monkeypatch):
    play_gpu(monkeypatch)
    planes, whole = (Gate(model, PlayedRecorder) for model in models_of(checkpoint, torch.bfloat16))
    check_answers(planes, whole, Variant("bf16", load="eight"))


LOGPROBS, PENALTY = SamplingParams(max_tokens=4, logprobs=2), SamplingParams(max_tokens=4, presence_penalty=1.0)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.mark.parametrize(
    ("sampling", "is_whole"),
    [(GREEDY, False), (LOGPROBS, True), (PENALTY, True)],
    ids=["greedy", "logprobs", "penalty"],
)
def test_logits_are_completed_where_someone_reads_or_changes_them(models, sampling, is_whole):
    head = WatchedHead(models[0].lm_head)
    with tiny_engine(replace(models[0], lm_head=head), max_num_seqs=1) as engine:
        list(engine.submit(Request("a", (5, 6, 7), sampling)))
    assert head.counts["candidates"] > 0
    assert (head.counts["complete"] > 0) == is_whole
    assert (head.counts["left"] > 0) != is_whole
