"""Decode steps in few launches compute what the layers one by one compute, and what the float32 reference says.

On a CPU the operations' twins run; the kernels themselves run under `-m gpu` in `test_qwen3_5.py`, where a loaded model
is fused by itself.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.kernels.common.dispatch import Operation
from onebox.model.build import fuse_model
from onebox.model.layers.fused import FusedStack
from onebox.model.load import load_model
from onebox.model.mtp import FusedMtpHead
from onebox.model.qwen3_5 import Qwen35
from tests.model.opened import packed_model
from tests.model.test_qwen3_5 import PROMPT, expected_logits, start
from tests.synthetic import tiny_config, write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["autoround", "packed-int3"])
def directory(request, tmp_path_factory) -> Path:
    """INT4 experts, attention and DeltaNet, or INT3 with INT4 in the experts' down; rows go to every expert."""
    root = tmp_path_factory.mktemp("fused") / request.param
    write_checkpoint(root, request.param, config=tiny_config(num_experts_per_tok=4))
    return root


@pytest.fixture
def model(directory, monkeypatch) -> Qwen35:
    """A model in the kernels' layouts on a CPU, its operations the plain twins: packed weights, float32 activations."""
    monkeypatch.setattr(Operation, "cpu", property(lambda operation: operation.twin))
    plain = packed_model(directory)
    # The checkpoint's own head has BF16 experts; with the layer of the last attention it has all that is fused.
    last = plain.stack.layers[-1]
    made = fuse_model(replace(plain, mtp=replace(plain.mtp, attention=last, layer=last)))
    assert isinstance(made.stack, FusedStack)
    assert isinstance(made.mtp, FusedMtpHead)
    return made


def steps(model: Qwen35) -> torch.Tensor:
    """Logits of a prompt's end and of steps with one, three (one kept) and two rows."""
    with torch.inference_mode():
        session = start(model)
        rows = [session.prefill(PROMPT[:70])[-2:], session.step([PROMPT[70]], keep=1)]
        wrong = [(token + 1) % 480 for token in PROMPT[72:74]]
        rows.append(session.step([PROMPT[71], *wrong], keep=1)[:1])
        rows.append(session.step(PROMPT[72:74], keep=2))
        return model.logits(torch.cat(rows))


def test_a_fused_step_is_the_step_of_the_layers(model):
    found, expected = steps(model), steps(replace(model, stack=model.stack.plain))
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_a_fused_step_is_that_of_the_reference(model, directory):
    expected = expected_logits(directory, PROMPT[:74])[68:]
    assert float((steps(model) - expected).abs().max() / expected.abs().max()) <= 1e-2


def test_a_fused_draft_is_that_of_the_head_layer_by_layer(model):
    def drafts(chosen: Qwen35) -> torch.Tensor:
        with torch.inference_mode():
            session = start(chosen)
            hidden = session.prefill(PROMPT[:66])[-1:]
            session.num_tokens += 1
            batch = session.batch([PROMPT[66]])
            return chosen.logits(chosen.draft(batch, hidden, session.memory.mtp))

    found, expected = drafts(model), drafts(replace(model, mtp=model.mtp.plain))
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4


@pytest.mark.parametrize("head", [TargetFormat.AUTO, TargetFormat.FP8, TargetFormat.NVFP4])
def test_a_built_head_of_every_format_is_fused_and_drafts_alike(directory, tmp_path, monkeypatch, head):
    """INT4 with an FP8 shared expert as the body has it, FP8 and NVFP4; in steps of one row and of 128, the most."""
    monkeypatch.setattr(Operation, "cpu", property(lambda operation: operation.twin))
    run_build(plan_build(Recipe(mtp=head), BuildSources(open_source("base", directory))), tmp_path / "out")
    model = fuse_model(packed_model(tmp_path / "out"))
    assert isinstance(model.mtp, FusedMtpHead)

    def drafts(chosen: Qwen35, num_rows: int) -> torch.Tensor:
        with torch.inference_mode():
            session = start(chosen)
            hidden = session.prefill(PROMPT[:66])[-1:]
            session.num_tokens += 1
            batch = session.batch((PROMPT * 2)[66 : 66 + num_rows])
            return chosen.logits(chosen.draft(batch, hidden.expand(num_rows, -1).contiguous(), session.memory.mtp))

    for num_rows in (1, 128):
        found, expected = drafts(model, num_rows), drafts(replace(model, mtp=model.mtp.plain), num_rows)
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_a_model_with_other_experts_is_not_fused(tmp_path):
    write_checkpoint(tmp_path / "fp8", "fp8", config=tiny_config(num_experts_per_tok=4))
    loaded = load_model(tmp_path / "fp8", CPU, torch.float32)
    assert fuse_model(loaded).stack is loaded.stack
