"""`onebox build` to NVFP4: what compressed-tensors itself would write and read, and what the engine runs."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file

import onebox
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.verify import verify_checkpoint
from onebox.formats import Dialect, dequantize_nvfp4, quantize_nvfp4
from onebox.model import reference
from onebox.model.load import load_model
from onebox.model.random import write_random_checkpoint
from onebox.model.reference_weights import load_weights
from onebox.spec.errors import UnsupportedError
from onebox.spec.kv import KVFormat
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass, modules
from recipes.pocket.evaluation.predictions import HeldOutPassage, ModelVariant, predict
from tests.formats.test_nvfp4 import ARGS, SCHEME
from tests.stock_model import open_with_transformers
from tests.synthetic import Tensors, tiny_config, write_checkpoint

SPEC = spec_from_config(tiny_config())
LAYER = "model.language_model.layers"
PUBLISHED = Recipe(experts=TargetFormat.NVFP4, shared=TargetFormat.NVFP4, attention=TargetFormat.NVFP4)
EVERYWHERE = Recipe(TargetFormat.NVFP4, TargetFormat.NVFP4, TargetFormat.NVFP4, TargetFormat.NVFP4, TargetFormat.NVFP4)
SUFFIXES = ("weight_packed", "weight_scale", "weight_global_scale")


def all_tensors(directory: Path) -> Tensors:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def plan(recipe: Recipe, base: Path, shard_bytes: int = 1 << 30):
    return plan_build(recipe, BuildSources(open_source("base", base)), shard_bytes)


@pytest.fixture(scope="module")
def made(checkpoints, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("nvfp4") / "out"
    run_build(plan(EVERYWHERE, checkpoints / "bf16-fused", 500_000), out)
    return out


def theirs(weight: torch.Tensor, fused: list[torch.Tensor]) -> Tensors:
    """What compressed-tensors writes of a weight whose global scale is that of all `fused` together."""
    together = torch.cat([part.flatten() for part in fused])
    global_scale = generate_gparam(together.amin(), together.amax())
    groups = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), ARGS, global_scale)
    tensors = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(tensors, SCHEME)


@pytest.mark.parametrize(
    ("stem", "fused"),
    [
        (f"{LAYER}.1.mlp.experts.2", ["gate_proj", "up_proj"]),
        (f"{LAYER}.1.mlp.experts.2", ["down_proj"]),
        (f"{LAYER}.0.mlp.shared_expert", ["gate_proj", "up_proj"]),
        (f"{LAYER}.3.self_attn", ["q_proj", "k_proj", "v_proj"]),
        (f"{LAYER}.3.self_attn", ["o_proj"]),
        (f"{LAYER}.0.linear_attn", ["in_proj_qkv", "in_proj_z"]),
        ("mtp.layers.0.mlp.experts.3", ["up_proj", "gate_proj"]),
    ],
)
def test_bytes_are_those_compressed_tensors_writes_with_one_global_scale_for_what_is_fused(
    checkpoints, made, stem, fused
):
    plain = all_tensors(checkpoints / "bf16-per-expert")
    built = all_tensors(made)
    weights = [plain[f"{stem}.{part}.weight"].float() for part in fused]
    for part, weight in zip(fused, weights, strict=True):
        expected = theirs(weight, weights)
        for suffix in SUFFIXES:
            found = built[f"{stem}.{part}.{suffix}"]
            assert found.dtype == expected[suffix].dtype
            assert torch.equal(found.view(torch.uint8), expected[suffix].view(torch.uint8)), (part, suffix)


def test_compressed_tensors_reads_every_module_as_we_do(made):
    """The scheme is looked up by name in our quantization_config, as a loader does."""
    description = json.loads((made / "config.json").read_text())["quantization_config"]
    assert description["format"] == "nvfp4-pack-quantized"
    config = QuantizationConfig.model_validate(description)
    built = all_tensors(made)
    classes: set[ModuleClass] = set()
    for module in modules(SPEC):
        if f"{module.name}.weight_packed" not in built:
            continue
        schemes = [
            scheme
            for scheme in config.config_groups.values()
            if any(match_name(module.name, target) for target in scheme.targets)
        ]
        assert len(schemes) == 1, module.name
        assert not any(match_name(module.name, target) for target in config.ignore)
        parts = {suffix: built[f"{module.name}.{suffix}"] for suffix in SUFFIXES}
        read = NVFP4PackedCompressor.decompress(parts, schemes[0])["weight"]
        ours = dequantize_nvfp4(*parts.values(), Dialect.LLM_COMPRESSOR)
        assert torch.equal(read, ours.to(read.dtype)), module.name
        values = unpack_fp4_from_uint8(parts["weight_packed"], *module.shape, dtype=torch.float32)
        exact = ct_dequantize(values, parts["weight_scale"].float(), None, ARGS, global_scale=parts[SUFFIXES[2]])
        assert torch.equal(ours, exact), module.name
        classes.add(module.module_class)
    main = {ModuleClass.EXPERTS, ModuleClass.SHARED, ModuleClass.ATTENTION, ModuleClass.DELTA}
    assert classes == main | {ModuleClass.MTP_EXPERTS, ModuleClass.MTP_SHARED, ModuleClass.MTP_ATTENTION}
    assert built["mtp.fc.weight"].dtype == built["lm_head.weight"].dtype == torch.bfloat16


def test_inspect_and_verify_know_it_and_its_bytes_are_the_planned_ones(checkpoints, made, run_cli):
    assert verify_checkpoint(made) == []
    report = inspect_checkpoint(made, deep=True)
    assert report.is_servable, report.problems
    assert report.class_bytes == plan(EVERYWHERE, checkpoints / "bf16-fused").class_bytes
    assert "nvfp4 g16" in run_cli("inspect", made).out


def test_a_stopped_build_goes_on_to_the_same_bytes(checkpoints, made, tmp_path):
    again = plan(EVERYWHERE, checkpoints / "bf16-fused", 500_000)
    left = [again.nbytes // 2]

    def stop(count: int) -> None:
        left[0] -= count
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_build(again, tmp_path / "out", on_bytes=stop)
    assert not (tmp_path / "out").exists()
    run_build(again, tmp_path / "out")
    for path in made.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_slabs_of_rows_round_as_the_whole_matrix_does(checkpoints, made, tmp_path, monkeypatch):
    monkeypatch.setattr("onebox.checkpoint.rounding._SLAB_BYTES", 1)  # slabs of one block of rows
    run_build(plan(Recipe(attention=TargetFormat.NVFP4), checkpoints / "bf16-fused"), tmp_path / "out")
    ours, whole = all_tensors(tmp_path / "out"), all_tensors(made)
    for suffix in SUFFIXES:
        name = f"{LAYER}.3.self_attn.q_proj.{suffix}"
        assert torch.equal(ours[name].view(torch.uint8), whole[name].view(torch.uint8))


def test_transformers_opens_the_dense_layers_and_reads_the_same_numbers(checkpoints, tmp_path):
    run_build(
        plan(Recipe(attention=TargetFormat.NVFP4, shared=TargetFormat.NVFP4), checkpoints / "bf16-fused"),
        tmp_path / "out",
    )
    # compressed-tensors dequantises NVFP4 to bfloat16.
    read = open_with_transformers(tmp_path / "out", torch.bfloat16).state_dict()
    built = all_tensors(tmp_path / "out")
    names = [name.removesuffix(".weight_packed") for name in built if name.endswith(".weight_packed")]
    assert names
    for name in names:
        ours = dequantize_nvfp4(*(built[f"{name}.{suffix}"] for suffix in SUFFIXES), Dialect.LLM_COMPRESSOR)
        found = read[f"{name}.weight"]
        assert torch.equal(found, ours.to(found.dtype)), name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tiny-nvfp4")
    write_random_checkpoint(root / "master")
    run_build(plan(EVERYWHERE, root / "master"), root / "out")
    return root / "out"


def test_the_engines_model_computes_the_reference_on_the_rounded_numbers(tiny):
    passage = HeldOutPassage("counting", tuple(range(100)), 40)
    model = load_model(tiny, torch.device("cpu"), torch.float32)
    found = predict(ModelVariant(model, KVFormat.parse("bf16")), passage)
    loaded = load_weights(tiny)
    hidden = reference.forward(
        loaded.spec, loaded.weights, torch.tensor(passage.token_ids), reference.Cache.empty(loaded.spec)
    )
    expected = reference.lm_head(loaded.spec, loaded.weights, hidden).log_softmax(-1)[39:99]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
    rounded = loaded.weights[f"{LAYER}.3.self_attn.q_proj.weight"]
    master = load_weights(tiny.parent / "master").weights[f"{LAYER}.3.self_attn.q_proj.weight"]
    assert 0 < float((rounded - master).abs().max()) < 0.2 * float(master.abs().max())


def test_the_engine_answers_with_and_without_its_drafts_alike(tiny):
    params = onebox.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with onebox.LLM(tiny, speculation="mtp", num_speculative_tokens=2) as llm:
        drafted = llm.generate([(1, 2, 3)], params)[0].token_ids
    with onebox.LLM(tiny, speculation="none") as llm:
        assert llm.generate([(1, 2, 3)], params)[0].token_ids == drafted


def test_rounded_and_kept_modules_are_described_apart_where_only_one_has_input_scales(checkpoints, tmp_path):
    """A kept llm-compressor expert says how its inputs were scaled; what we round has nothing to say of inputs."""
    run_build(
        plan(Recipe(experts=TargetFormat.NVFP4, shared=TargetFormat.NVFP4), checkpoints / "nvfp4-llmc"),
        tmp_path / "out",
    )
    before, after = all_tensors(checkpoints / "nvfp4-llmc"), all_tensors(tmp_path / "out")
    expert = f"{LAYER}.1.mlp.experts.2.up_proj"
    assert torch.equal(after[f"{expert}.weight_packed"], before[f"{expert}.weight_packed"])
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    by_target = {target: group for group in groups.values() for target in group["targets"]}
    inputs = {
        "shared" if "shared" in target else "experts": group["input_activations"] for target, group in by_target.items()
    }
    assert inputs["shared"] is None
    assert inputs["experts"]["dynamic"] == "local"


def test_the_official_fp8_may_become_nvfp4_and_four_bits_may_not(checkpoints, tmp_path):
    run_build(plan(Recipe(shared=TargetFormat.NVFP4), checkpoints / "fp8"), tmp_path / "out")
    assert all_tensors(tmp_path / "out")[f"{LAYER}.0.mlp.shared_expert.up_proj.weight_packed"].dtype == torch.uint8
    with pytest.raises(UnsupportedError, match="cannot become nvfp4"):
        plan(Recipe(experts=TargetFormat.NVFP4), checkpoints / "autoround")


def test_rows_that_fill_no_group_are_refused_by_name(tmp_path):
    config = tiny_config(moe_intermediate_size=24)
    write_checkpoint(tmp_path / "base", "bf16-fused", config=config)
    with pytest.raises(UnsupportedError, match=r"experts\.0\.down_proj has rows of 24 values.*NVFP4's group of 16"):
        plan(Recipe(experts=TargetFormat.NVFP4), tmp_path / "base")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused_under_its_own_modules_name(tmp_path, bad):
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.3.self_attn.v_proj.weight"][5, 5] = bad

    write_checkpoint(tmp_path / "base", "bf16-fused", change=change)
    with pytest.raises(UnsupportedError, match=r"v_proj: .*infinite or NaN"):
        run_build(plan(Recipe(attention=TargetFormat.NVFP4), tmp_path / "base"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_matrix_of_zeros_beside_others_does_not_spoil_their_scale(tmp_path):
    gate, up = (f"{LAYER}.0.mlp.shared_expert.{part}_proj" for part in ("gate", "up"))

    def change(tensors: Tensors) -> None:
        tensors[f"{gate}.weight"].zero_()

    base = write_checkpoint(tmp_path / "base", "bf16-fused", change=change)
    run_build(plan(Recipe(shared=TargetFormat.NVFP4), base), tmp_path / "out")
    built, weight = all_tensors(tmp_path / "out"), all_tensors(base)[f"{up}.weight"]
    assert torch.equal(built[f"{up}.weight_packed"], quantize_nvfp4(weight, Dialect.LLM_COMPRESSOR).packed)
    zeros = dequantize_nvfp4(*(built[f"{gate}.{suffix}"] for suffix in SUFFIXES), Dialect.LLM_COMPRESSOR)
    assert not zeros.any()


def test_the_command_takes_the_published_recipe_and_says_what_it_does(checkpoints, tmp_path, run_cli):
    options = ("--experts", "nvfp4", "--shared", "nvfp4", "--attention", "nvfp4", "--delta", "keep", "--mtp", "keep")
    result = run_cli("build", "--base", checkpoints / "bf16-fused", "--out", tmp_path / "out", *options)
    assert result.code == 0
    assert "bf16 -> nvfp4 g16" in result.out
    assert run_cli("verify", tmp_path / "out").code == 0
    assert plan(PUBLISHED, checkpoints / "bf16-fused").nbytes == inspect_checkpoint(tmp_path / "out").nbytes
