"""Sources that hold only what a build takes from them, made by hand as people do: some files of a whole checkpoint."""

import json
import shutil
from pathlib import Path

import pytest

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.partial import MTP_CLASSES
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, classes_used, open_source
from onebox.spec.errors import MismatchError
from onebox.spec.modules import ModuleClass
from tests.synthetic import write_checkpoint

SHARED = frozenset({ModuleClass.SHARED})
FP8_SHARED = Recipe(shared=TargetFormat.FP8)


def copy_with(source: Path, target: Path, shards: set[str], *, with_index: bool = True) -> Path:
    """The config, the index and `shards` of a checkpoint."""
    target.mkdir()
    for name in {"config.json", *(["model.safetensors.index.json"] if with_index else []), *shards}:
        shutil.copy(source / name, target / name)
    return target


def shards_with(source: Path, part: str) -> set[str]:
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    return {file for name, file in index.items() if part in name}


def built(recipe: Recipe, base: Path, out: Path, **others: Path) -> dict[str, bytes]:
    """The files of a build."""
    sources = {
        role: open_source(role, directory, classes_used(recipe, role, has_mtp_source="mtp" in others))
        for role, directory in others.items()
    }
    run_build(plan_build(recipe, BuildSources(open_source("base", base), **sources)), out)
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "onebox_manifest.json"}


@pytest.mark.parametrize("with_index", [True, False])
def test_config_and_the_mtp_file_are_a_source_of_the_head(tmp_path, checkpoints, with_index):
    whole = tmp_path / "whole"
    write_checkpoint(whole, "bf16-fused", shards=30)
    needed = shards_with(whole, "mtp.")
    assert len(needed) < 20
    part = copy_with(whole, tmp_path / "part", needed, with_index=with_index)
    base = checkpoints / "nvfp4-llmc"
    assert built(Recipe(), base, tmp_path / "a", mtp=part) == built(Recipe(), base, tmp_path / "b", mtp=whole)


def test_the_shards_with_shared_experts_are_a_source_of_them(tmp_path, checkpoints):
    whole = tmp_path / "whole"
    write_checkpoint(whole, "fp8", shards=60)
    needed = shards_with(whole, "layers.") & shards_with(whole, ".shared_expert.")
    assert len(needed) < 40
    part = copy_with(whole, tmp_path / "part", needed)
    base = checkpoints / "autoround"
    assert built(FP8_SHARED, base, tmp_path / "a", fp8=part) == built(FP8_SHARED, base, tmp_path / "b", fp8=whole)


def test_a_missing_shard_with_a_tensor_that_is_used_is_an_error_that_names_both(tmp_path):
    whole = tmp_path / "whole"
    write_checkpoint(whole, "fp8", shards=60)
    needed = shards_with(whole, ".shared_expert.")
    lost = min(needed)
    part = copy_with(whole, tmp_path / "part", needed - {lost})
    with pytest.raises(MismatchError, match=rf"shared_expert.*{lost}"):
        open_source("fp8", part, SHARED)


def test_a_part_is_no_source_of_what_it_lacks(tmp_path, checkpoints):
    whole = checkpoints / "fp8-sharded"
    part = copy_with(whole, tmp_path / "part", shards_with(whole, "mtp."))
    open_source("mtp", part, MTP_CLASSES)
    with pytest.raises(MismatchError):
        open_source("fp8", part, frozenset({ModuleClass.EXPERTS}))
    with pytest.raises(MismatchError):
        open_source("base", part)
    empty = copy_with(whole, tmp_path / "no-head", {"model-00002-of-00003.safetensors"})
    with pytest.raises(MismatchError):
        open_source("mtp", empty, MTP_CLASSES)


def test_a_part_of_another_model_is_still_found_out(tmp_path, checkpoints):
    other = tmp_path / "other"
    write_checkpoint(other, "fp8", shards=20, seed=1)
    shards = shards_with(other, ".shared_expert.") | shards_with(other, "layers.1.input_layernorm")
    part = copy_with(other, tmp_path / "part", shards)
    with pytest.raises(MismatchError, match="Not the same model"):
        built(FP8_SHARED, checkpoints / "autoround", tmp_path / "out", fp8=part)


def test_a_part_without_norms_is_said_to_be_known_by_its_config_alone(tmp_path, checkpoints, run_cli):
    whole = tmp_path / "whole"
    write_checkpoint(whole, "fp8", shards=60)
    part = copy_with(whole, tmp_path / "part", shards_with(whole, ".shared_expert."))
    options = ("--base", checkpoints / "autoround", "--out", tmp_path / "out", "--dry-run", "--fp8")
    assert f"The fp8 checkpoint {part} shares no norm with the base" in run_cli("build", *options, part).out
    assert "shares no norm" not in run_cli("build", *options, whole).out


def test_what_is_wrong_is_not_taken_for_absent(tmp_path):
    part = tmp_path / "part"
    write_checkpoint(part, "fp8", shards=3)
    shard = part / "model-00003-of-00003.safetensors"
    (part / "model-00002-of-00003.safetensors").unlink()
    content = shard.read_bytes()
    name = b"model.language_model.layers.2.mlp.experts.3.down_proj.weight"
    assert name in content
    shard.write_bytes(content.replace(name, name.replace(b"experts.3", b"experts.9")))
    with pytest.raises(MismatchError, match=r"experts\.9\.down_proj"):
        open_source("mtp", part, MTP_CLASSES)
