"""A calibrated build from beginning to end: its values, its bytes, and going on after being stopped."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.manifest import Manifest, read_manifest
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.verify import verify_checkpoint
from onebox.model.random import TINY, random_weights
from onebox.model.random_text import text_files
from onebox.model.reference import Cache, forward
from onebox.model.reference_weights import load_weights
from onebox.quantize.block_tuning import BlockTuning
from onebox.quantize.documents import index_files
from onebox.quantize.expert_tuning import ErrorSums, ExpertTuning
from onebox.quantize.row_errors import PredictionErrors, RelativeSquares
from onebox.quantize.run import QuantizePlan, _errors_behind, build_calibrated, calibrate, plan_quantize
from onebox.quantize.settings import CalibrationSettings
from onebox.spec.errors import DoesNotFitError, UsageError, WriteError
from onebox.spec.model import spec_from_config

INT4 = TargetFormat.INT4
# Experts' matrices in 3 bits, their down projections in 4, DeltaNet and the shared expert in FP8, attention in INT4.
RECIPE = Recipe(
    experts=TargetFormat.INT3,
    experts_down=INT4,
    attention=INT4,
    delta=TargetFormat.FP8,
    shared=TargetFormat.FP8,
    mtp=INT4,
)
SETTINGS = CalibrationSettings(
    num_sequences=6, sequence_tokens=32, num_steps=8, batch_tokens=96, experts_at_once=3, min_tokens=86, num_held_out=3
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random model of two layers, one of each kind, with four experts and an MTP head."""
    text = {**TINY["text_config"], "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = {**TINY, "text_config": {**text, "num_experts": 4}}
    directory = tmp_path_factory.mktemp("source")
    save_file(random_weights(spec_from_config(config)), directory / "model.safetensors", {"format": "pt"})
    for name, content in {"config.json": json.dumps(config), **text_files()}.items():
        (directory / name).write_text(content)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The {number}th line says {number * number} and a word.\n" for number in range(900)))
    return path


@pytest.fixture(scope="module")
def planned(source, text) -> Callable[..., QuantizePlan]:
    def plan(recipe: Recipe = RECIPE, **settings: int) -> QuantizePlan:
        sources = BuildSources(open_source("base", source))
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


def test_a_calibrated_build_is_closer_to_the_source_than_a_rounded_one(source, calibrated, rounded, planned):
    wanted, tuned, nearest = (hidden_states(path, planned()) for path in (source, calibrated, rounded))
    assert (tuned - wanted).square().mean() < 0.6 * (nearest - wanted).square().mean()


def is_untouched(name: str, dtypes: dict[str, str]) -> bool:
    """Whether calibration changes nothing of a tensor: it is a shape, or has the scales of an FP8 matrix."""
    matrix, _, suffix = name.rpartition(".")
    return suffix == "weight_shape" or (suffix == "weight_scale" and dtypes.get(f"{matrix}.weight") == "F8_E4M3")


def test_the_build_has_the_tensors_of_a_rounded_one_and_is_verified(calibrated, rounded):
    assert verify_checkpoint(calibrated) == []
    one, other = read_manifest(calibrated), read_manifest(rounded)
    assert {name: (record.dtype, record.shape) for name, record in one.tensors.items()} == {
        name: (record.dtype, record.shape) for name, record in other.tensors.items()
    }
    assert (calibrated / "config.json").read_bytes() == (rounded / "config.json").read_bytes()
    changed = {name for name in one.tensors if one.tensors[name].sha256 != other.tensors[name].sha256}
    found = {name for name, record in one.tensors.items() if record.action == "calibrated"}
    dtypes = {name: record.dtype for name, record in one.tensors.items()}
    assert changed == {name for name in found if not is_untouched(name, dtypes)}
    assert not calibrated.with_name("out.calibration").exists()


def test_every_kind_of_matrix_is_calibrated_and_the_report_counts_them(calibrated):
    manifest = read_manifest(calibrated)
    modules = {name.rpartition(".")[0] for name, record in manifest.tensors.items() if record.action == "calibrated"}
    assert len(modules) == sum(block["num_tuned"] for block in manifest.calibration)
    kinds = {"self_attn.q_proj", "linear_attn.in_proj_qkv", "shared_expert.up_proj", "experts.0.gate_proj"}
    kinds |= {"experts.0.down_proj"}
    assert all(any(module.endswith(kind) for module in modules) for kind in kinds)
    assert any(module.startswith("mtp.layers.0.mlp.experts.") for module in modules)
    assert [block["name"].rpartition(".")[2] for block in manifest.calibration] == ["0", "1", "0"]
    assert all(block["tuned_error"] < block["rounded_error"] for block in manifest.calibration)
    rounded, tuned = (
        sum(block[f"held_out_{kind}_error"] for block in manifest.calibration) for kind in ("rounded", "tuned")
    )
    assert 0 < tuned < rounded


def test_experts_that_few_tokens_reach_are_rounded_to_nearest_and_counted(calibrated, rounded):
    manifest, nearest = read_manifest(calibrated), digests(rounded)
    of_experts = {name: record for name, record in manifest.tensors.items() if ".mlp.experts." in name}
    few = {name: record for name, record in of_experts.items() if record.action == "quantised"}
    assert all(record.sha256 == nearest[name] for name, record in few.items())
    counts = [block["num_rounded"] + block["num_not_better"] for block in manifest.calibration]
    packed = [name for name in manifest.tensors if name.endswith(".weight_packed")]
    assert sum(counts) == sum(manifest.tensors[name].action == "quantised" for name in packed)
    assert 0 < sum(block["num_rounded"] for block in manifest.calibration) < len(of_experts) // 3
    for block in manifest.calibration:
        assert (block["num_rounded"] > 0) == (block["fewest_tokens"] < SETTINGS.min_tokens)


def test_nothing_is_tuned_on_what_is_held_out(planned, tmp_path, monkeypatch):
    sequences, rows = [], []
    mixed, errors = BlockTuning._mixed, ExpertTuning._errors

    def seen_mixed(tuning, weights, x):
        if torch.is_grad_enabled():
            sequences.append(x.storage_offset() // x.numel())
        return mixed(tuning, weights, x)

    def seen_errors(tuning, branches, matrices, at):
        if torch.is_grad_enabled():
            rows.append((int(at.max()), tuning.num_tuned_on))
        return errors(tuning, branches, matrices, at)

    monkeypatch.setattr(BlockTuning, "_mixed", seen_mixed)
    monkeypatch.setattr(ExpertTuning, "_errors", seen_errors)
    calibrate(planned(), tmp_path / "out")
    assert set(sequences) == set(range(SETTINGS.num_sequences))
    assert all(highest < end for highest, end in rows)
    # The MTP head's sequences are a token shorter.
    assert {end for _, end in rows} == {SETTINGS.num_sequences * tokens for tokens in (32, 31)}


def test_tuning_is_better_if_it_is_on_what_is_held_out():
    rounded = ErrorSums(tuned_on=2.0, held_out=2.5)
    assert ErrorSums(1.0, 2.4).is_less(rounded)
    assert not ErrorSums(1.0, 2.6).is_less(rounded)
    assert ErrorSums(1.0).is_less(ErrorSums(2.0))
    assert not ErrorSums(2.0).is_less(ErrorSums(1.0))


class StoppedError(Exception):
    """Stands for the kill of a process."""


def test_a_run_stopped_anywhere_goes_on_at_the_last_finished_block(planned, tmp_path, calibrated):
    """Stopped at a step of the second and of the last block; the bytes are those of a run that was not stopped."""
    plan, out = planned(), tmp_path / "out"
    total = plan.num_steps(plan.blocks)
    per_block = total // len(plan.blocks)
    for number in (per_block + 2, total - per_block + 1):
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
    assert steps[0] == plan.num_steps(plan.blocks[:2])
    assert sum(steps) == total
    assert {name: record.sha256 for name, record in manifest.tensors.items()} == digests(calibrated)


def test_a_finished_build_is_found_and_nothing_is_calibrated_again(planned, calibrated):
    before = (calibrated / "onebox_manifest.json").stat().st_mtime_ns
    steps: list[int] = []
    build_calibrated(calibrate(planned(), calibrated, on_step=steps.append), calibrated)
    assert len(steps) == 1
    assert (calibrated / "onebox_manifest.json").stat().st_mtime_ns == before


def test_another_calibration_is_told_from_a_finished_and_from_an_unfinished_one(
    planned, calibrated, tmp_path, monkeypatch
):
    with pytest.raises(WriteError, match="is not this build, which has another calibration"):
        calibrate(planned(seed=1), calibrated)
    with monkeypatch.context() as patch:
        patch.setattr("onebox.quantize.run._REVISION", "1")
        with pytest.raises(WriteError, match="is not this build, which has another revision of the calibration"):
            calibrate(planned(), calibrated)

    def stop(_: int) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        calibrate(planned(), tmp_path / "out", on_step=stop)
    with pytest.raises(WriteError, match=r"\(this one has another calibration\): finish that one, or pass --restart"):
        calibrate(planned(seed=1), tmp_path / "out")
    with pytest.raises(StoppedError):
        calibrate(planned(seed=1), tmp_path / "out", restart=True, on_step=stop)


def test_what_does_not_fit_is_refused_before_it_starts(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("onebox.quantize.run.available_memory_bytes", lambda: 1 << 30)
    with pytest.raises(DoesNotFitError, match=r"GB of host memory and 1.1 GB are free: give smaller --experts-at-once"):
        calibrate(planned(), tmp_path / "out")


def test_the_head_reads_what_the_last_layer_and_the_mtp_head_give(planned):
    plan = planned()
    kinds = [type(_errors_behind(plan, number, {})) for number in range(len(plan.blocks))]
    names = [block.name for block in plan.blocks]
    assert [name for name, kind in zip(names, kinds, strict=True) if kind is PredictionErrors] == names[-2:]
    assert set(kinds[:-2]) == {RelativeSquares}


def test_a_recipe_that_quantises_no_block_has_nothing_to_calibrate(planned):
    with pytest.raises(UsageError, match="there is nothing to calibrate: give --experts int4"):
        planned(Recipe(lm_head=TargetFormat.INT8))
