"""Hybrids of albond's script: served as they are, and what their config says is held against the tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.hybrid import HYBRID_KEY
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.source import INDEX_NAME
from onebox.model.load import load_model
from onebox.spec.errors import MismatchError
from onebox.spec.modules import ModuleClass
from tests.model.opened import tensors_in
from tests.synthetic import Tensors

INFO = {
    "description": "Hybrid GPTQ-INT4 + FP8 checkpoint for single-GPU deployment",
    "moe_experts": "GPTQ INT4 (group_size=128, sym=True, Marlin kernels)",
    "dense_layers": "FP8 E4M3 block-128 (from official Qwen/Qwen3.5-122B-A10B-FP8, calibrated scales)",
    "norms_gates_embeddings": "Preserved at source dtype (BF16 for norms/gates, FP8 for others)",
    "source_gptq": "Qwen/Qwen3.5-122B-A10B-GPTQ-Int4",
    "source_fp8": "Qwen/Qwen3.5-122B-A10B-FP8",
    "vllm_patch": "https://github.com/rmstxrx/vllm/tree/v0.17.1-hybrid-fp8",
    "target_hardware": "NVIDIA DGX Spark (GB10, 128GB unified, 273 GB/s)",
    "converter": "build-hybrid-checkpoint.py",
}


def write_hybrid(
    checkpoints: Path,
    base: str,
    out: Path,
    *,
    info: object = INFO,
    change: Callable[[Tensors], None] | None = None,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """What the script makes: every tensor that the FP8 checkpoint has too, but experts, with its scale; a new index."""
    out.mkdir()
    for path in (checkpoints / base).iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    official = {
        name: tensor
        for path in (checkpoints / "fp8-sharded").glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if ".experts." not in name
    }
    weight_map: dict[str, str] = {}
    for path in sorted((checkpoints / f"{base}-sharded").glob("model-*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if name in official]:
            tensors[name] = official[name]
            scale = name.replace(".weight", ".weight_scale_inv")
            if scale in official:
                tensors[scale] = official[scale]
        if change:
            change(tensors)
        save_file(tensors, out / path.name)
        weight_map |= dict.fromkeys(tensors, path.name)
    (out / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((checkpoints / base / "config.json").read_text())
    config["quantization_config"] |= quantization or {}
    (out / "config.json").write_text(json.dumps({**config, HYBRID_KEY: info}))
    return out


def test_the_autoround_hybrid_is_the_model_that_onebox_builds_of_the_same_sources(checkpoints, tmp_path):
    """Loaded as it is, bit for bit; the script leaves out the MTP head, which lies in a file of its own."""
    hybrid = write_hybrid(checkpoints, "autoround", tmp_path / "hybrid")
    report = inspect_checkpoint(hybrid)
    assert report.is_servable, report.problems
    formats = {row.module_class: row.formats for row in report.rows}
    assert list(formats[ModuleClass.SHARED]) == ["fp8 [fp8-block (weight_scale_inv)]"]
    assert list(formats[ModuleClass.EXPERTS]) == ["int4 g128 [gptq]"]
    sources = BuildSources(open_source("base", checkpoints / "autoround"), open_source("fp8", checkpoints / "fp8"))
    run_build(plan_build(Recipe(shared=TargetFormat.FP8), sources), tmp_path / "ours")
    cpu = torch.device("cpu")
    theirs = list(tensors_in(load_model(hybrid, cpu, torch.float32)))
    ours = list(tensors_in(load_model(tmp_path / "ours", cpu, torch.float32, with_mtp=False)))
    assert len(theirs) > 50
    assert all(torch.equal(one, two) for one, two in zip(theirs, ours, strict=True))


def test_the_gptq_hybrid_has_fp8_in_all_dense_layers(checkpoints, tmp_path):
    hybrid = write_hybrid(checkpoints, "gptq", tmp_path / "hybrid")
    report = inspect_checkpoint(hybrid, deep=True)
    assert report.is_servable, report.problems
    formats = {row.module_class: [name.split()[0] for name in row.formats] for row in report.rows}
    assert formats[ModuleClass.ATTENTION] == formats[ModuleClass.DELTA] == formats[ModuleClass.SHARED] == ["fp8"]
    assert formats[ModuleClass.MTP_EXPERTS] == ["bf16"]
    load_model(hybrid, torch.device("cpu"), torch.float32)


def test_what_other_tools_do_with_it_is_said_and_a_build_describes_it(checkpoints, tmp_path):
    """The FP8 matrices are in no quantization_config until then."""
    hybrid = write_hybrid(checkpoints, "gptq", tmp_path / "hybrid")
    notes = [problem.message for problem in inspect_checkpoint(hybrid).problems if not problem.is_fatal]
    assert any("does not describe the 32 FP8 matrices" in note for note in notes)
    run_build(plan_build(Recipe(), BuildSources(open_source("base", hybrid))), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert HYBRID_KEY not in config
    formats = {group["format"] for group in config["quantization_config"]["config_groups"].values()}
    assert formats == {"pack-quantized", "float-quantized"}
    assert inspect_checkpoint(tmp_path / "out").problems == ()


def without_scale(tensors: Tensors) -> None:
    tensors.pop("model.language_model.layers.0.mlp.shared_expert.up_proj.weight_scale_inv", None)


def both_formats(tensors: Tensors) -> None:
    """As the script's first version leaves it: FP8 tensors beside the INT4 ones that they did not replace."""
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv"
    if f"{name}.qweight" in tensors:
        tensors[f"{name}.weight"] = torch.zeros(512, 256, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"info": "hybrid"}, "is 'hybrid' where an object is expected"),
        ({"info": {**INFO, "moe_experts": "GPTQ INT8 (group_size=128)"}}, "says INT8 .* stored as int4"),
        ({"info": {**INFO, "moe_experts": "GPTQ INT4 (group_size=64)"}}, "in groups of 64, but .* int4 g128"),
        ({"info": {**INFO, "dense_layers": "FP8 E4M3 block-64"}}, "says blocks of 64"),
        ({"quantization": {"sym": False}}, "sym True, but quantization_config has sym False"),
        ({"quantization": {"group_size": 32}}, "group_size 128, but quantization_config has group_size 32"),
        ({"quantization": {"bits": 8}}, "bits 4, but quantization_config has bits 8"),
        ({"change": without_scale}, "weight_scale_inv is missing"),
        ({"change": both_formats}, r"in_proj_qkv\.weight is unexpected beside gptq tensors"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(checkpoints, tmp_path, case, words):
    hybrid = write_hybrid(checkpoints, "autoround", tmp_path / "hybrid", **case)
    with pytest.raises(MismatchError, match=words):
        load_model(hybrid, torch.device("cpu"))
    assert not inspect_checkpoint(hybrid).is_servable


def test_the_note_over_a_checkpoint_without_fp8_is_refused(checkpoints, tmp_path):
    """A hybrid's config.json copied over the INT4 checkpoint that it was made from."""
    base = tmp_path / "base"
    base.mkdir()
    for path in (checkpoints / "autoround").iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, HYBRID_KEY: INFO}))
    with pytest.raises(MismatchError, match="says FP8, but no shared expert"):
        load_model(base, torch.device("cpu"))


def test_words_that_cannot_be_checked_are_named(checkpoints, tmp_path):
    info = {"moe_experts": "four bits", "dense_layers": "eight bits", "lm_head": "INT8"}
    report = inspect_checkpoint(write_hybrid(checkpoints, "autoround", tmp_path / "hybrid", info=info))
    assert report.is_servable
    notes = " ".join(problem.message for problem in report.problems)
    for words in ("lm_head is not checked", "moe_experts names no format", "dense_layers names no format"):
        assert words in notes
