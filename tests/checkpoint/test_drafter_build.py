"""A drafter is built in INT4 and FP8 with its norms as they are, and the build is read, verified and inspected."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from typer.testing import CliRunner

from onebox.checkpoint.drafter_build import plan_drafter_build, run_drafter_build
from onebox.checkpoint.drafter_inspect import inspect_drafter
from onebox.checkpoint.recipe import TargetFormat
from onebox.checkpoint.verify import verify_checkpoint
from onebox.cli.main import app
from onebox.model.dflash_parts import load_reference_drafter
from onebox.planner.presets import WRITTEN_PACKINGS
from onebox.spec.block_drafter import BlockDrafter
from onebox.spec.errors import UnsupportedError, UsageError, WriteError
from onebox.spec.model import spec_from_config
from onebox.spec.weights import WeightFormat
from tests.drafters import small_drafter_config, write_drafter
from tests.synthetic import tiny_config, write_checkpoint

TARGET = tiny_config()
SPEC = spec_from_config(TARGET)
ERROR = {TargetFormat.INT4: 0.14, TargetFormat.FP8: 0.04}


@pytest.fixture
def drafter(tmp_path):
    return write_drafter(tmp_path / "drafter", small_drafter_config(TARGET))


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("target", ERROR)
def test_a_build_has_its_matrices_rounded_and_its_norms_unchanged(drafter, tmp_path, target):
    out = tmp_path / "out"
    plan = plan_drafter_build(drafter, target)
    run_drafter_build(plan, out)
    assert not verify_checkpoint(out)
    _, before = load_reference_drafter(drafter, SPEC)
    spec, after = load_reference_drafter(out, SPEC)
    for module in spec.modules():
        was, now = before[module.plain_tensor], after[module.plain_tensor]
        if not module.is_matrix:
            assert torch.equal(was, now)
        else:
            error = float((was - now).norm() / was.norm())
            assert 0 < error < ERROR[target]
    predicted = BlockDrafter.predicted(spec, WeightFormat(target.value), WRITTEN_PACKINGS)
    assert inspect_drafter(out, SPEC).loaded == predicted
    assert plan.nbytes == predicted.weight_bytes


@pytest.mark.parametrize("target", ERROR)
def test_other_tools_read_the_description(drafter, tmp_path, target):
    run_drafter_build(plan_drafter_build(drafter, target), tmp_path / "out")
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    [group] = QuantizationConfig.model_validate(described).config_groups.values()
    assert (group.weights.num_bits, group.targets) == ({"int4": 4, "fp8": 8}[target], ["Linear"])


def test_a_finished_build_is_found_and_another_is_not_overwritten(drafter, tmp_path):
    out = tmp_path / "out"
    first = run_drafter_build(plan_drafter_build(drafter, TargetFormat.INT4), out)
    assert run_drafter_build(plan_drafter_build(drafter, TargetFormat.INT4), out) == first
    with pytest.raises(WriteError, match="another recipe"):
        run_drafter_build(plan_drafter_build(drafter, TargetFormat.FP8), out)


def test_what_cannot_be_restored_is_refused(drafter, tmp_path):
    run_drafter_build(plan_drafter_build(drafter, TargetFormat.INT4), tmp_path / "int4")
    with pytest.raises(UnsupportedError, match="cannot become bf16"):
        plan_drafter_build(tmp_path / "int4", TargetFormat.BF16)
    with pytest.raises(UsageError, match="nvfp4"):
        plan_drafter_build(drafter, TargetFormat.NVFP4)
    kept = plan_drafter_build(tmp_path / "int4", TargetFormat.KEEP)
    assert kept.config["quantization_config"]["format"] == "pack-quantized"


def test_the_commands_build_and_inspect_a_drafter_alone_and_beside_its_model(drafter, tmp_path):
    out, model = tmp_path / "out", write_checkpoint(tmp_path / "model", "bf16-fused", config=TARGET)
    built = invoke("build", "--base", drafter, "--drafter", "int4", "--out", out)
    assert built.exit_code == 0, built.output
    alone = invoke("inspect", out)
    assert alone.exit_code == 0, alone.output
    assert "layers 0 to 1: causal, window 6" in alone.output
    assert "layer 2: bidirectional, all positions" in alone.output
    beside = json.loads(invoke("inspect", model, "--drafter", out, "--deep", "--json").output)
    assert beside["drafter"]["servable"]
    assert beside["drafter"]["deep"]
    other = write_drafter(tmp_path / "other", small_drafter_config(TARGET, vocab_size=1000))
    refused = invoke("inspect", model, "--drafter", other)
    assert refused.exit_code == 1
    assert "made for another model: its vocab_size is 1,000" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    "options", [("--experts", "int4"), ("--mtp", "int4"), ("--draft-vocab", "none"), ("--shard-gib", "1")]
)
def test_options_of_a_models_build_are_refused_for_a_drafter(drafter, tmp_path, options):
    result = invoke("build", "--base", drafter, "--out", tmp_path / "out", *options)
    assert isinstance(result.exception, UsageError)
    assert f"{options[0]} has nothing to act on" in str(result.exception)


def test_the_option_of_a_drafter_is_refused_for_a_model(tmp_path):
    model = write_checkpoint(tmp_path / "model", "bf16-fused", config=TARGET)
    result = invoke("build", "--base", model, "--out", tmp_path / "out", "--drafter", "int4")
    assert isinstance(result.exception, UsageError)
    assert "is no DFlash drafter" in str(result.exception)
