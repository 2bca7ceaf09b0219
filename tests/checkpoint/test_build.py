"""`onebox build`: recipes, bits that are only moved, what is refused, and what the command says."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.formats import (
    pack_quantized,
    quantize,
    quantize_fp8_block,
    quantize_int8_rows,
    unpack_gptq,
    unpack_quantized,
)
from onebox.spec.errors import MismatchError, UnsupportedError, UsageError
from onebox.spec.modules import ModuleClass
from tests.checkpoint.building import HYBRID, all_tensors, build, same_bits, sources
from tests.synthetic import Tensors, gptq_int4_asymmetric, tiny_config, write_checkpoint

EXPERT = "model.language_model.layers.1.mlp.experts.2.up_proj"


SHARED = "model.language_model.layers.0.mlp.shared_expert.gate_proj"


MTP_EXPERT = "mtp.layers.0.mlp.experts.3.down_proj"


def test_the_seeds_hybrid_moves_every_number_it_does_not_quantise(checkpoints, tmp_path):
    made = build(checkpoints, tmp_path / "out", HYBRID, "autoround", fp8="fp8", shard_bytes=500_000)
    base, fp8 = all_tensors(checkpoints / "autoround"), all_tensors(checkpoints / "fp8")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    assert same_bits(made[f"{SHARED}.weight"], fp8[f"{SHARED}.weight"])
    assert same_bits(made[f"{SHARED}.weight_scale"], fp8[f"{SHARED}.weight_scale_inv"])
    assert f"{SHARED}.weight_scale_inv" not in made
    for name, tensor in base.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "qweight":
            before = unpack_gptq(tensor, base[f"{stem}.qzeros"], base[f"{stem}.scales"])
            parts = {key: made[f"{stem}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
            after = unpack_quantized(**parts, group_size=128)
            assert torch.equal(before.codes, after.codes)
            assert same_bits(before.scales, after.scales)
        elif name in made and "lm_head" not in name and not ("shared_expert." in name and "mtp." not in name):
            assert same_bits(made[name], tensor), name
        else:
            assert suffix in ("qzeros", "scales") or "shared_expert." in name or name == "lm_head.weight", name


def test_lm_head_is_rounded_by_the_published_int8_rule(checkpoints, tmp_path):
    made = build(checkpoints, tmp_path / "out", Recipe(lm_head=TargetFormat.INT8), "bf16-fused")
    weight = all_tensors(checkpoints / "bf16-fused")["lm_head.weight"]
    expected = pack_quantized(quantize(weight, 8, None, torch.bfloat16))
    assert all(same_bits(made[f"lm_head.{suffix}"], tensor) for suffix, tensor in expected.items())


@pytest.mark.parametrize("base", ["bf16-fused", "bf16-per-expert"])
def test_every_class_of_a_bf16_source_is_rounded_to_nearest(checkpoints, tmp_path, base):
    recipe = Recipe(
        experts=TargetFormat.INT4,
        attention=TargetFormat.FP8,
        delta=TargetFormat.INT8,
        shared=TargetFormat.FP8,
        mtp=TargetFormat.INT4,
        lm_head=TargetFormat.INT8,
    )
    made = build(checkpoints, tmp_path / "out", recipe, base)
    plain = all_tensors(checkpoints / "bf16-per-expert")
    for name in (EXPERT, MTP_EXPERT):
        expected = pack_quantized(quantize(plain[f"{name}.weight"], 4, 128, torch.bfloat16))
        assert all(same_bits(made[f"{name}.{suffix}"], tensor) for suffix, tensor in expected.items())
    query = "model.language_model.layers.3.self_attn.q_proj"
    codes, scale = quantize_fp8_block(plain[f"{query}.weight"], 128, torch.bfloat16)
    assert same_bits(made[f"{query}.weight"], codes)
    assert same_bits(made[f"{query}.weight_scale"], scale)
    for kept in ("mtp.fc.weight", "model.language_model.layers.0.linear_attn.in_proj_a.weight"):
        assert same_bits(made[kept], plain[kept])


def test_slabs_of_rows_round_as_the_whole_matrix_does(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("onebox.checkpoint.rounding._SLAB_BYTES", 1)  # slabs of one block of rows
    made = build(
        checkpoints, tmp_path / "out", Recipe(lm_head=TargetFormat.INT8, attention=TargetFormat.FP8), "bf16-fused"
    )
    plain = all_tensors(checkpoints / "bf16-per-expert")
    expected = pack_quantized(quantize(plain["lm_head.weight"], 8, None, torch.bfloat16))
    assert same_bits(made["lm_head.weight_packed"], expected["weight_packed"])
    query = "model.language_model.layers.3.self_attn.q_proj"
    codes, _ = quantize_fp8_block(plain[f"{query}.weight"], 128, torch.bfloat16)
    assert same_bits(made[f"{query}.weight"], codes)


@pytest.mark.parametrize("mtp", ["bf16-fused", "bf16-per-expert", "autoround", "fp8"])
def test_mtp_head_is_grafted_bit_for_bit_and_the_bases_description_stays(checkpoints, tmp_path, mtp):
    """NVFP4 checkpoints that are published without an MTP head get one from another source."""
    out = tmp_path / "out"
    made = build(checkpoints, out, Recipe(), "nvfp4-modelopt", mtp=mtp)
    head = {name: tensor for name, tensor in all_tensors(checkpoints / mtp).items() if name.startswith("mtp.")}
    assert head
    renamed = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in head.items()}
    assert all(same_bits(made[name], tensor) for name, tensor in (renamed if mtp == "fp8" else head).items())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("compressed-tensors" if mtp == "fp8" else "modelopt")
    assert inspect_checkpoint(out).mtp.is_complete


def test_fused_experts_of_the_mtp_head_are_grafted_too(checkpoints, tmp_path):
    from onebox.spec.model import spec_from_config
    from tests.synthetic import fuse

    fused = tmp_path / "fused"
    write_checkpoint(fused, "bf16-per-expert")
    tensors = fuse(spec_from_config(tiny_config()), load_file(fused / "model.safetensors"))
    save_file(tensors, fused / "model.safetensors")
    made = build(tmp_path, tmp_path / "moved", Recipe(), "fused", mtp="fused")
    assert same_bits(made["mtp.layers.0.mlp.experts.down_proj"], tensors["mtp.layers.0.mlp.experts.down_proj"])
    made = build(tmp_path, tmp_path / "int4", Recipe(mtp=TargetFormat.INT4), "fused", mtp="fused")
    plain = all_tensors(checkpoints / "bf16-per-expert")[f"{MTP_EXPERT}.weight"]
    expected = pack_quantized(quantize(plain, 4, 128, torch.bfloat16))
    assert same_bits(made[f"{MTP_EXPERT}.weight_packed"], expected["weight_packed"])


def test_mtp_head_of_the_fp8_checkpoint_can_become_int4(checkpoints, tmp_path):
    made = build(checkpoints, tmp_path / "out", Recipe(mtp=TargetFormat.INT4), "autoround", mtp="fp8")
    assert made[f"{MTP_EXPERT}.weight_packed"].dtype == torch.int32
    assert made["mtp.fc.weight"].dtype == torch.bfloat16


def test_attention_and_delta_projections_come_from_the_official_fp8(checkpoints, tmp_path):
    recipe = Recipe(attention=TargetFormat.FP8, delta=TargetFormat.FP8, shared=TargetFormat.FP8)
    made = build(checkpoints, tmp_path / "out", recipe, "autoround", fp8="fp8")
    fp8 = all_tensors(checkpoints / "fp8")
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv"
    assert same_bits(made[f"{name}.weight"], fp8[f"{name}.weight"])
    assert made[f"{EXPERT}.weight_packed"].dtype == torch.int32


def test_a_build_that_changes_nothing_repairs_the_index(checkpoints, tmp_path):
    made = build(checkpoints, tmp_path / "out", Recipe(), "autoround-sharded", shard_bytes=2_000_000)
    before = all_tensors(checkpoints / "autoround-sharded")
    assert made.keys() == before.keys()
    assert all(same_bits(made[name], tensor) for name, tensor in before.items())
    report = inspect_checkpoint(tmp_path / "out")
    assert report.mtp.is_indexed
    assert report.problems == ()
    assert report.quant_method == "auto-round"


def test_modelopt_nvfp4_can_stand_beside_other_formats(checkpoints, tmp_path):
    from onebox.formats import Dialect, dequantize_nvfp4

    made = build(checkpoints, tmp_path / "out", Recipe(lm_head=TargetFormat.INT8), "nvfp4-modelopt")
    base = all_tensors(checkpoints / "nvfp4-modelopt")
    parts = (made[f"{EXPERT}.{suffix}"] for suffix in ("weight_packed", "weight_scale", "weight_global_scale"))
    after = dequantize_nvfp4(*parts, Dialect.LLM_COMPRESSOR)
    parts = (base[f"{EXPERT}.{suffix}"] for suffix in ("weight", "weight_scale", "weight_scale_2"))
    before = dequantize_nvfp4(*parts, Dialect.MODELOPT)
    assert same_bits(made[f"{EXPERT}.weight_packed"], base[f"{EXPERT}.weight"])
    # One number is inverted: at most two roundings of float32 apart.
    assert torch.allclose(after, before, rtol=2**-22, atol=0)


def test_asymmetric_int4_keeps_its_zero_points(tmp_path):
    def change(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(128, 256, generator=generator)
        tensors.update({f"{EXPERT}.{suffix}": part for suffix, part in gptq_int4_asymmetric(weight).items()})

    base = write_checkpoint(tmp_path / "base", "autoround", change=change)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["sym"] = False
    (base / "config.json").write_text(json.dumps(config))
    made = build(tmp_path, tmp_path / "out", Recipe(lm_head=TargetFormat.INT8), "base")
    tensors = all_tensors(base)
    before = unpack_gptq(*(tensors[f"{EXPERT}.{suffix}"] for suffix in ("qweight", "qzeros", "scales")))
    suffixes = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    after = unpack_quantized(**{suffix: made[f"{EXPERT}.{suffix}"] for suffix in suffixes}, group_size=128)
    assert torch.equal(before.zeros, after.zeros)
    assert torch.equal(before.codes, after.codes)


def test_zero_points_that_the_config_denies_are_refused(tmp_path):
    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERT}.qzeros"].fill_(0x55555555)

    write_checkpoint(tmp_path / "base", "autoround", change=change)
    with pytest.raises(MismatchError, match=f"{EXPERT}: its qzeros hold other zero points"):
        build(tmp_path, tmp_path / "out", Recipe(lm_head=TargetFormat.INT8), "base")
    assert not (tmp_path / "out").exists()


def test_column_order_that_cannot_be_described_is_refused(tmp_path):
    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERT}.g_idx"] = tensors[f"{EXPERT}.g_idx"].flip(0).contiguous()

    write_checkpoint(tmp_path / "base", "gptq", change=change)
    with pytest.raises(UnsupportedError, match="reorders the columns"):
        build(tmp_path, tmp_path / "out", Recipe(lm_head=TargetFormat.INT8), "base")


@pytest.mark.parametrize(
    ("base", "recipe", "words"),
    [
        ("autoround", Recipe(experts=TargetFormat.BF16), "cannot become bf16"),
        ("autoround", Recipe(attention=TargetFormat.FP8), "--fp8"),
        ("nvfp4-llmc", Recipe(experts=TargetFormat.INT4), "cannot become int4"),
    ],
)
def test_precision_that_is_not_there_is_not_made_up(checkpoints, base, recipe, words):
    with pytest.raises(UnsupportedError, match=words):
        plan_build(recipe, sources(checkpoints, base))


def test_a_target_that_would_be_ignored_is_refused(checkpoints, tmp_path):
    with pytest.raises(UsageError, match="--mtp int4 has nothing to act on"):
        plan_build(Recipe(mtp=TargetFormat.INT4), sources(checkpoints, "nvfp4-modelopt"))
    write_checkpoint(
        tmp_path / "tied",
        "bf16-fused",
        config={**tiny_config(), "tie_word_embeddings": True},
    )
    with pytest.raises(UsageError, match="--lm-head int8 has nothing to act on"):
        plan_build(Recipe(lm_head=TargetFormat.INT8), sources(tmp_path, "tied"))


def test_a_nan_in_the_source_stops_the_build_with_the_modules_name(tmp_path):
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"][5, 5] = float("nan")

    write_checkpoint(tmp_path / "base", "bf16-fused", change=change)
    with pytest.raises(UnsupportedError, match="lm_head"):
        build(tmp_path, tmp_path / "out", Recipe(lm_head=TargetFormat.INT8), "base")
    assert not (tmp_path / "out").exists()


def test_sources_of_different_models_are_refused(checkpoints, tmp_path):
    with pytest.raises(MismatchError, match=r"differs between the base .* though their shapes agree"):
        plan_build(HYBRID, sources(checkpoints, "autoround", fp8="other-weights"))
    write_checkpoint(tmp_path / "wider", "fp8", config=tiny_config(moe_intermediate_size=256))
    mixed = BuildSources(open_source("base", checkpoints / "autoround"), open_source("fp8", tmp_path / "wider"))
    with pytest.raises(MismatchError, match="moe_intermediate_size 128 and 256"):
        plan_build(HYBRID, mixed)


def test_a_source_without_a_head_cannot_give_one(checkpoints):
    with pytest.raises(MismatchError, match="holds no MTP head"):
        plan_build(Recipe(), sources(checkpoints, "autoround", mtp="nvfp4-modelopt"))


def test_a_damaged_source_is_refused_before_anything_is_written(tmp_path):
    write_checkpoint(tmp_path / "base", "bf16-fused", change=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(MismatchError, match=r"The base checkpoint .* lm_head.weight is missing"):
        open_source("base", tmp_path / "base")


def test_dry_run_tells_size_and_bytes_per_token_and_writes_nothing(checkpoints, tmp_path, run_cli):
    arguments = ["--base", checkpoints / "autoround", "--fp8", checkpoints / "fp8", "--out", tmp_path / "out"]
    result = run_cli("build", *arguments, "--lm-head", "int8", "--mtp", "int4", "--dry-run")
    assert result.code == 0
    assert "GB of weights read per token" in result.out
    assert "compressed-tensors" in result.out
    assert list(tmp_path.iterdir()) == []
    plan = plan_build(
        Recipe(shared=TargetFormat.FP8, lm_head=TargetFormat.INT8, mtp=TargetFormat.INT4),
        sources(checkpoints, "autoround", fp8="fp8"),
    )
    run_build(plan, tmp_path / "out")
    report = inspect_checkpoint(tmp_path / "out")
    assert plan.class_bytes == report.class_bytes
    assert plan.nbytes == report.nbytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--experts", "int5"], "--experts"),
        (["--lm-head", "fp8"], "--lm-head"),
        (["--shard-gib", "0"], "--shard-gib"),
    ],
)
def test_a_wrong_option_is_named(checkpoints, tmp_path, run_cli, arguments, words):
    result = run_cli("build", "--base", checkpoints / "fp8", "--out", tmp_path / "out", *arguments)
    assert result.code == 2
    assert words in result.err


def test_side_files_travel_and_the_manifest_names_no_machine(checkpoints, tmp_path):
    out = tmp_path / "out"
    run_build(plan_build(Recipe(), sources(checkpoints, "fp8")), out)
    assert (out / "tokenizer.json").exists()
    assert (out / "generation_config.json").exists()
    manifest = (out / "onebox_manifest.json").read_text()
    assert str(checkpoints) not in manifest
    assert json.loads(manifest)["sources"] == {"base": "fp8"}


def test_a_description_of_its_own_stays_only_while_it_is_true(tmp_path):
    """Some ModelOpt checkpoints say how they are quantised in hf_quant_config.json and nowhere else."""
    base = write_checkpoint(tmp_path / "base", "nvfp4-modelopt")
    config = json.loads((base / "config.json").read_text())
    config.pop("quantization_config")
    (base / "config.json").write_text(json.dumps(config))
    (base / "hf_quant_config.json").write_text("{}")
    run_build(plan_build(Recipe(), sources(tmp_path, "base")), tmp_path / "kept")
    assert (tmp_path / "kept" / "hf_quant_config.json").exists()
    run_build(plan_build(Recipe(lm_head=TargetFormat.INT8), sources(tmp_path, "base")), tmp_path / "mixed")
    assert not (tmp_path / "mixed" / "hf_quant_config.json").exists()
    assert "quantization_config" in json.loads((tmp_path / "mixed" / "config.json").read_text())


BIG_BUILD = """
import json, sys
from pathlib import Path
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import Recipe, BuildSources, TargetFormat, open_source
plan = plan_build(Recipe(lm_head=TargetFormat.INT8), BuildSources(open_source("base", Path(sys.argv[1]))), 1 << 30)
run_build(plan, Path(sys.argv[2]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(int(peak) * 1024)
"""


def test_memory_stays_under_a_gib_and_the_largest_tensor(tmp_path):
    """LM head and embedding of 410 MB each, sparse; holding the head in float32 as a whole would break the bound."""
    from onebox.checkpoint.header import write_header
    from onebox.spec.model import spec_from_config
    from onebox.spec.modules import modules
    from onebox.spec.weights import StoredTensor, tensor_bytes

    config = tiny_config(vocab_size=800_000)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    stored = {module.plain_tensor: StoredTensor("BF16", module.shape) for module in modules(spec_from_config(config))}
    sizes = [(name, tensor, tensor_bytes(tensor)) for name, tensor in stored.items()]
    header = write_header(sizes, {"format": "pt"})
    with (base / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(size for _, _, size in sizes))
    command = [sys.executable, "-c", BIG_BUILD, str(base), str(tmp_path / "out")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak < (1 << 30) + max(size for _, _, size in sizes)


def test_the_classes_of_a_plan_cover_all_of_it(checkpoints):
    plan = plan_build(HYBRID, sources(checkpoints, "autoround", fp8="fp8"))
    assert sum(plan.class_bytes.values()) == plan.nbytes
    assert set(plan.class_bytes) == set(ModuleClass) - {ModuleClass.DRAFTER}


def test_int8_rows_are_repacked_beside_other_formats(tmp_path):
    """As compressed-tensors' packed words, with the same codes: vLLM reads plain int8 with quantised inputs alone."""
    base = write_checkpoint(tmp_path / "base", "bf16-per-expert", config=tiny_config())
    tensors = load_file(base / "model.safetensors")
    weight = tensors.pop("lm_head.weight")
    codes, scale = quantize_int8_rows(weight)
    tensors |= {"lm_head.weight": codes, "lm_head.weight_scale": scale[:, None].to(torch.bfloat16)}
    save_file(tensors, base / "model.safetensors")
    run_build(plan_build(Recipe(shared=TargetFormat.INT4), BuildSources(open_source("base", base))), tmp_path / "out")
    made = all_tensors(tmp_path / "out")
    parts = {key: made[f"lm_head.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
    after = unpack_quantized(**parts, bits=8)
    assert torch.equal(after.codes, codes)
    assert same_bits(after.scales, scale[:, None].to(torch.bfloat16))
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    head = next(group for group in groups.values() if "re:.*lm_head$" in group["targets"])
    assert (head["format"], head["weights"]["strategy"]) == ("pack-quantized", "channel")
    assert not [problem for problem in inspect_checkpoint(tmp_path / "out").problems if problem.tensor == "lm_head"]
