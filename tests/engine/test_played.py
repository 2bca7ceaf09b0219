"""The gate on a GPU that is played on a CPU (`played.py`): the path of a GPU's steps, without one.

`make test` runs a third of the sample; `-m gate` runs all of it, and the kernels themselves in Triton's interpreter.
"""

import random
from dataclasses import replace

import pytest
import torch

from onebox.engine.api import Engine, EngineConfig, Request, SamplingParams
from onebox.kernels.common import dispatch
from onebox.model.dflash import DFlash
from onebox.model.layers.fused import FusedStack
from onebox.model.load import load_model
from onebox.model.mtp import FusedMtpHead
from tests.conftest import HAS_GPU
from tests.engine.gate import DIMENSIONS, SPECULATION, Gate, Variant, new_runner, read
from tests.engine.gate_prompts import all_cases
from tests.engine.played import PlayedRecorder, play_gpu
from tests.engine.test_gate import SAMPLE, SAMPLE_NAMES, check
from tests.engine.tiny import tiny_runner

KINDS = ("tiny", "autoround")
"""BF16 throughout, and INT4 experts."""
CHOSEN = random.Random(1).sample(range(len(SAMPLE)), len(SAMPLE) // 3)
PLAYED = [
    pytest.param(KINDS[place % 2], *each, marks=() if place in CHOSEN else pytest.mark.gate, id=name)
    for place, (each, name) in enumerate(zip(SAMPLE, SAMPLE_NAMES, strict=True))
]


@pytest.mark.parametrize(("kind", "variant", "cases"), PLAYED)
def test_answers_are_the_same_bits_on_the_path_of_a_gpu(played_gate, kind, variant, cases):
    check(played_gate(kind), variant, cases)


class OwnGraphs(Gate):
    """Every engine has the graphs of its own settings, with page tables of two widths, instead of those of the most."""

    def _runner(self, kv, config):
        return new_runner(self._model, kv, replace(config, max_model_len=9000), PlayedRecorder())


@pytest.mark.parametrize("drafts", ["none", "ngram", "oracle8", "mtp2", "dflash7", "auto"])
def test_answers_are_the_same_bits_over_the_graphs_of_one_method(played_gate, drafts):
    cases = [case for case in all_cases() if not case.is_long][1::7]
    report = OwnGraphs(played_gate()._model).run(Variant("bf16", "warm", drafts, "two"), cases)
    assert not report.differences, "\n".join(report.differences)


class RandomEngine(Gate):
    """An engine whose sizes are drawn: up to 24 sequences, so that steps have more rows than kernels take at once."""

    def __init__(self, model, rng):
        super().__init__(model)
        self._rng = rng

    def config(self, variant, cases):
        rng = self._rng
        return replace(
            super().config(variant, cases),
            max_model_len=rng.choice((4608, 9000, 20_000)),
            max_num_seqs=rng.choice((1, 2, 3, 5, 8, 13, 24)),
            num_checkpoints=rng.choice((3, 64)),
            max_num_batched_tokens=rng.choice((64, 192, 512, 2048)),
        )

    def _runner(self, kv, config):
        return new_runner(self._model, kv, config, PlayedRecorder())


@pytest.mark.gate
@pytest.mark.parametrize("seed", range(40))
def test_answers_are_the_same_bits_on_engines_of_any_size(played_gate, seed):
    rng = random.Random(seed)
    kind = rng.choice(("tiny", "autoround", "nvfp4-llmc", "fp8", "packed-int3"))
    values = [rng.choice(DIMENSIONS[name]) for name in ("kv", "cache", "drafts", "load", "aborts")]
    cases = rng.sample([case for case in all_cases() if not case.is_long], rng.randint(3, 26))
    report = RandomEngine(played_gate(kind)._model, rng).run(Variant(*values), cases)
    assert not report.differences, "\n".join(report.differences)


def test_what_is_played_is_what_a_gpu_runs(played_gate):
    gate = played_gate()
    check(gate, *SAMPLE[0])
    runner = gate._shared["bf16", None]
    model = runner._model
    assert isinstance(model.stack, FusedStack)
    assert isinstance(model.mtp, FusedMtpHead)
    assert isinstance(model.drafter, DFlash)
    assert model.drafter.is_fused
    graphs, prefills = runner._graphs, runner._prefill_graphs
    assert len(graphs._shapes) == len(graphs.sizes)
    assert len(prefills._graphs) == len(prefills.num_rows)


@pytest.mark.gate
@pytest.mark.skipif(HAS_GPU, reason="the interpreter is for machines without a GPU; there the gate runs the kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_themselves_give_the_answer_of_their_twins(checkpoint, checkpoints, monkeypatch, kind):
    """In the interpreter, with the arguments of a whole engine: a prompt, and a step that verifies a wrong draft."""
    play_gpu(monkeypatch)
    directory = checkpoint if kind == "tiny" else checkpoints / kind
    model = load_model(directory, torch.device("cpu"), torch.float32)
    config = EngineConfig(max_model_len=100, num_pages=4, max_num_seqs=1, speculation=SPECULATION["mtp1"])
    request = Request("a", (1, 2, 3, 4, 5), SamplingParams(max_tokens=3, temperature=0.0, logprobs=3, ignore_eos=True))

    def answer():
        with Engine(tiny_runner(model, config), config) as engine:
            return read(engine.submit(request)), engine.stats()

    expected, stats = answer()
    assert stats.totals.drafts.num_drafted > stats.totals.drafts.num_accepted
    monkeypatch.setattr(dispatch, "_is_on_gpu", lambda *_: True)
    found, _ = answer()
    assert found.token_ids == expected.token_ids
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
