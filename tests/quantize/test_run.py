"""A calibrated build from beginning to end: its values, its bytes, and going on after being stopped."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.manifest import Manifest, read_manifest
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.verify import verify_checkpoint
from onebox.model.reference import Cache, forward
from onebox.model.reference_weights import load_weights
from onebox.quantize.documents import index_files
from onebox.quantize.run import QuantizePlan, build_calibrated, calibrate, plan_quantize
from onebox.quantize.settings import CalibrationSettings
from onebox.spec.errors import DoesNotFitError, UsageError, WriteError

INT4 = TargetFormat.INT4
# One expert's matrices in 3 bits, its down projections in 4, the mixers of both kinds tuned, the rest in FP8.
RECIPE = Recipe(
    experts=TargetFormat.INT3,
    experts_down=INT4,
    attention=INT4,
    delta=INT4,
    shared=TargetFormat.FP8,
    mtp=INT4,
)
SETTINGS = CalibrationSettings(
    num_sequences=6, sequence_tokens=48, num_steps=12, batch_tokens=160, experts_at_once=3, min_tokens=40
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The {number}th line says {number * number} and a word.\n" for number in range(900)))
    return path


@pytest.fixture(scope="module")
def planned(checkpoint, text) -> Callable[..., QuantizePlan]:
    def plan(recipe: Recipe = RECIPE, **settings: int) -> QuantizePlan:
        sources = BuildSources(open_source("base", checkpoint))
        given = replace(SETTINGS, **settings)
        return plan_quantize(recipe, sources, index_files([text]), given, torch.device("cpu"), 1 << 30)

    return plan


def quantize(plan: QuantizePlan, out: Path, **options) -> Manifest:
    return build_calibrated(calibrate(plan, out, **options), out)


@pytest.fixture(scope="module")
def calibrated(planned, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("calibrated") / "out"
    quantize(planned(), out)
    return out


@pytest.fixture(scope="module")
def rounded(planned, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rounded") / "out"
    build = planned().build
    run_build(plan_build(build.recipe, build.sources), out)
    return out


def digests(out: Path) -> dict[str, str]:
    return {name: record.sha256 for name, record in read_manifest(out).tensors.items()}


def hidden_states(directory: Path, plan: QuantizePlan) -> torch.Tensor:
    spec, weights, _ = load_weights(directory)
    return torch.stack([forward(spec, weights, ids, Cache.empty(spec)) for ids in plan.tokens.token_ids])


def test_a_calibrated_build_is_closer_to_the_source_than_a_rounded_one(checkpoint, calibrated, rounded, planned):
    wanted, tuned, nearest = (hidden_states(path, planned()) for path in (checkpoint, calibrated, rounded))
    assert (tuned - wanted).square().mean() < 0.6 * (nearest - wanted).square().mean()


def test_the_build_has_the_tensors_of_a_rounded_one_and_is_verified(calibrated, rounded):
    assert verify_checkpoint(calibrated) == []
    one, other = read_manifest(calibrated), read_manifest(rounded)
    assert {name: (record.dtype, record.shape) for name, record in one.tensors.items()} == {
        name: (record.dtype, record.shape) for name, record in other.tensors.items()
    }
    assert (calibrated / "config.json").read_bytes() == (rounded / "config.json").read_bytes()
    changed = {name for name in one.tensors if one.tensors[name].sha256 != other.tensors[name].sha256}
    assert changed == {
        name
        for name, record in one.tensors.items()
        if record.action == "calibrated" and not name.endswith("weight_shape")
    }
    assert not calibrated.with_name("out.calibration").exists()


def test_every_kind_of_matrix_is_calibrated_and_the_report_counts_them(calibrated):
    manifest = read_manifest(calibrated)
    modules = {name.rpartition(".")[0] for name, record in manifest.tensors.items() if record.action == "calibrated"}
    assert len(modules) == sum(block["num_tuned"] for block in manifest.calibration)
    kinds = {"self_attn.q_proj", "linear_attn.in_proj_qkv", "experts.0.gate_proj", "experts.0.down_proj"}
    assert all(any(module.endswith(kind) for module in modules) for kind in kinds)
    assert any(module.startswith("mtp.layers.0.mlp.experts.") for module in modules)
    assert [block["name"].rpartition(".")[2] for block in manifest.calibration] == ["0", "1", "2", "3", "0"]
    assert all(block["tuned_error"] < block["rounded_error"] for block in manifest.calibration)


def test_experts_that_few_tokens_reach_are_rounded_to_nearest_and_counted(planned, rounded, tmp_path):
    """The router sends each of 8 experts about 72 of 288 tokens."""
    plan = planned(Recipe(experts=INT4), num_steps=2, min_tokens=70)
    manifest = quantize(plan, tmp_path / "out")
    counted = sum(block["num_rounded"] for block in manifest.calibration)
    assert 0 < counted < 3 * 8 * 4
    assert all(block["fewest_tokens"] < 70 for block in manifest.calibration if block["num_rounded"])
    run_build(plan_build(Recipe(experts=INT4), plan.build.sources), tmp_path / "rounded")
    nearest = digests(tmp_path / "rounded")
    few = {name: record for name, record in manifest.tensors.items() if record.action == "quantised"}
    assert len(few) >= 3 * counted
    assert all(record.sha256 == nearest[name] for name, record in few.items())


class StoppedError(Exception):
    """Stands for the kill of a process."""


def test_a_run_stopped_anywhere_goes_on_at_the_last_finished_block(planned, tmp_path, calibrated):
    """Stopped at a step of the first, the third and the last block; the bytes are those of a run that was not."""
    plan, out = planned(), tmp_path / "out"
    total = plan.num_steps(plan.blocks)
    per_block = total // len(plan.blocks)
    for number in (3, 2 * per_block + 5, total - 4):
        done = 0

        def stop(count: int, at: int = number) -> None:
            nonlocal done
            done += count
            if done >= at:
                raise StoppedError

        with pytest.raises(StoppedError):
            calibrate(plan, out, on_step=stop)
    steps: list[int] = []
    manifest = build_calibrated(calibrate(plan, out, on_step=steps.append), out)
    assert steps[0] == plan.num_steps(plan.blocks[:4])
    assert sum(steps) == total
    assert {name: record.sha256 for name, record in manifest.tensors.items()} == digests(calibrated)


def test_a_finished_build_is_found_and_nothing_is_calibrated_again(planned, calibrated):
    before = (calibrated / "onebox_manifest.json").stat().st_mtime_ns
    steps: list[int] = []
    build_calibrated(calibrate(planned(), calibrated, on_step=steps.append), calibrated)
    assert len(steps) == 1
    assert (calibrated / "onebox_manifest.json").stat().st_mtime_ns == before


def test_another_calibration_is_told_from_a_finished_and_from_an_unfinished_one(planned, calibrated, tmp_path):
    with pytest.raises(WriteError, match="is not this build, which has another calibration"):
        calibrate(planned(seed=1), calibrated)

    def stop(_: int) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        calibrate(planned(), tmp_path / "out", on_step=stop)
    with pytest.raises(WriteError, match=r"\(this one has another calibration\): finish that one, or pass --restart"):
        calibrate(planned(seed=1), tmp_path / "out")
    calibrate(planned(Recipe(experts=INT4), num_steps=1), tmp_path / "out", restart=True)


def test_the_seed_decides_the_bytes(planned, tmp_path):
    recipe = Recipe(experts=INT4)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        quantize(planned(recipe, num_steps=2, min_tokens=0, seed=seed), tmp_path / name)
    assert digests(tmp_path / "one") == digests(tmp_path / "same")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")


def test_what_does_not_fit_is_refused_before_it_starts(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("onebox.quantize.run.available_memory_bytes", lambda: 1 << 30)
    with pytest.raises(DoesNotFitError, match=r"GB of host memory and 1.1 GB are free: give smaller --experts-at-once"):
        calibrate(planned(), tmp_path / "out")


def test_a_recipe_without_integers_has_nothing_to_calibrate(planned):
    with pytest.raises(UsageError, match="there is nothing to calibrate: give --experts int4"):
        planned(Recipe(experts=TargetFormat.FP8))
