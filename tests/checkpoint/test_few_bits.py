"""Experts of 3 and 2 bits, alone and mixed with 4: what is built, what compressed-tensors reads, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file

from onebox.checkpoint.bind import bind
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.layer_targets import parse_layer_target
from onebox.checkpoint.manifest import read_manifest
from onebox.checkpoint.recipe import BuildSources, LayerTarget, Recipe, TargetFormat, open_source
from onebox.checkpoint.source import open_checkpoint
from onebox.checkpoint.verify import verify_checkpoint
from onebox.checkpoint.weights import read_weight
from onebox.formats import pack_gptq, quantize
from onebox.spec.errors import MismatchError, UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.traffic import PACKINGS, MatrixPacking, predicted_weight_bytes
from onebox.spec.weights import INTEGER_BITS, ExpertFormats, Layout, StoredTensor, WeightFormat, identify
from tests.stock_model import open_with_transformers
from tests.synthetic import Tensors, tiny_config, write_checkpoint

INT2, INT3, INT4, INT8 = TargetFormat.INT2, TargetFormat.INT3, TargetFormat.INT4, TargetFormat.INT8
SPEC = spec_from_config(tiny_config())
PACKED_INT4 = {WeightFormat.INT4: MatrixPacking(Layout.PACKED, 4, group_size=128)}
RECIPES = {
    "3": Recipe(experts=INT3, lm_head=INT8),
    "2": Recipe(experts=INT2),
    "3 and 4": Recipe(experts=INT3, experts_down=INT4),
    "by layer": Recipe(experts=INT3, experts_down=INT2, expert_layers=(LayerTarget((0, 2), INT4),)),
    "layer in BF16": Recipe(experts=INT3, expert_layers=(LayerTarget((1,), TargetFormat.KEEP),)),
}


def build(base: Path, out: Path, recipe: Recipe) -> Path:
    run_build(plan_build(recipe, BuildSources(open_source("base", base))), out)
    return out


def tensors_of(directory: Path) -> Tensors:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", RECIPES)
def test_compressed_tensors_reads_every_expert_as_we_do(checkpoints, tmp_path, name):
    """The scheme is looked up by module name in our quantization_config, as a loader does; all bits are compared."""
    recipe = RECIPES[name]
    out = build(checkpoints / "bf16-fused", tmp_path / "out", recipe)
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    made, bound = tensors_of(out), bind(open_checkpoint(out)).modules
    for module in modules(SPEC):
        if module.module_class is not ModuleClass.EXPERTS:
            continue
        schemes = [
            scheme
            for scheme in config.config_groups.values()
            if any(match_name(module.name, target) for target in scheme.targets)
        ]
        wanted = recipe.target_of(module)
        is_ignored = any(match_name(module.name, target) for target in config.ignore or [])
        assert is_ignored == (wanted is TargetFormat.KEEP), module.name
        if is_ignored:
            assert not schemes
            continue
        (scheme,) = schemes
        assert f"int{scheme.weights.num_bits}" == wanted.value == bound[module.name].stored.format.value
        parts = {name.rpartition(".")[2]: t for name, t in made.items() if name.rpartition(".")[0] == module.name}
        theirs = BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]
        ours = read_weight(bound[module.name])
        assert torch.equal(theirs.float(), ours.to(theirs.dtype).float()), module.name


def test_mixed_experts_are_described_by_patterns_not_by_name(checkpoints):
    """A 122B model has 36,864 expert matrices: a list of their names would be megabytes of config.json."""
    recipe = replace(RECIPES["by layer"], mtp=INT4)
    plan = plan_build(recipe, BuildSources(open_source("base", checkpoints / "bf16-fused")))
    groups = plan.config["quantization_config"]["config_groups"].values()
    found = {group["weights"]["num_bits"]: group["targets"] for group in groups}
    main = r"re:^(?!mtp\.).*layers\."
    assert found[3] == [main + r"(1|3)\.mlp\.experts\.\d+\.(gate|up)_proj$"]
    assert found[2] == [main + r"(1|3)\.mlp\.experts\.\d+\.(down)_proj$"]
    assert main + r"(0|2)\.mlp\.experts\.\d+\.(gate|up|down)_proj$" in found[4]
    assert all(len(targets) <= 4 for targets in found.values())


def test_a_build_has_exactly_three_bits_and_a_scale_per_group(checkpoints, tmp_path):
    out = build(checkpoints / "bf16-fused", tmp_path / "out", Recipe(experts=INT3))
    report = inspect_checkpoint(out)
    assert read_manifest(out).recipe == {**Recipe().texts, "experts": "int3"}
    (row,) = [row for row in report.rows if row.module_class is ModuleClass.EXPERTS]
    count = sum(module.numel for module in modules(SPEC) if module.module_class is ModuleClass.EXPERTS)
    num_modules = sum(module.module_class is ModuleClass.EXPERTS for module in modules(SPEC))
    assert row.nbytes == count * 3 // 8 + count // 128 * 2 + 16 * num_modules
    assert list(row.formats) == ["int3 g128 [pack-quantized]"]
    assert report.is_servable
    assert verify_checkpoint(out) == []


@pytest.mark.parametrize("name", ["3", "2", "3 and 4"])
def test_the_planner_predicts_the_bytes_of_a_build(checkpoints, name):
    recipe = RECIPES[name]
    plan = plan_build(recipe, BuildSources(open_source("base", checkpoints / "bf16-fused")))
    formats = ExpertFormats(WeightFormat(recipe.experts), WeightFormat(recipe.experts_down or recipe.experts))
    predicted = predicted_weight_bytes(SPEC, {ModuleClass.EXPERTS: formats}, {**PACKINGS, **PACKED_INT4})
    assert plan.class_bytes[ModuleClass.EXPERTS] == predicted[ModuleClass.EXPERTS]


# --- other tools' 3-bit checkpoints ---------------------------------------------------------------------------------


def few_bits_gptq(root: Path, bits: int, pack=pack_gptq) -> Path:
    """An AutoRound checkpoint whose quantised matrices have `bits` bits."""

    def change(tensors: Tensors) -> None:
        for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
            words, rows = tensors[f"{name}.qweight"].shape
            if rows % 32:  # GPTQ packs zero points in whole words: such matrices stay INT4
                continue
            generator = torch.Generator().manual_seed(rows)
            made = pack(quantize(torch.randn(rows, 8 * words, generator=generator), bits, 128, torch.float16))
            tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in made.items()})

    base = write_checkpoint(root / "few", "autoround", change=change)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["bits"] = bits
    (base / "config.json").write_text(json.dumps(config))
    return base


@pytest.mark.parametrize("bits", [3, 2])
def test_gptq_and_auto_round_of_few_bits_are_read_and_relabelled(tmp_path, bits):
    base = few_bits_gptq(tmp_path, bits)
    report = inspect_checkpoint(base)
    assert report.is_servable, report.problems
    (row,) = [row for row in report.rows if row.module_class is ModuleClass.EXPERTS]
    assert list(row.formats) == [f"int{bits} g128 [gptq]"]
    out = build(base, tmp_path / "out", Recipe(lm_head=INT8))
    before, after = bind(open_checkpoint(base)).modules, bind(open_checkpoint(out)).modules
    for name, bound in before.items():
        if bound.stored.format.value == f"int{bits}":
            assert str(after[name].stored) == f"int{bits} g128 [pack-quantized]"
            assert torch.equal(read_weight(bound), read_weight(after[name])), name


def test_a_symmetric_few_bit_checkpoint_with_other_zero_points_is_not_relabelled(tmp_path):
    def shifted(matrix):
        return pack_gptq(replace(matrix, zeros=torch.ones_like(matrix.scales, dtype=torch.int8)))

    wrong = few_bits_gptq(tmp_path, 3, pack=shifted)
    with pytest.raises(MismatchError, match="other zero points"):
        build(wrong, tmp_path / "out", Recipe(lm_head=INT8))


def stored(words: int) -> dict[str, StoredTensor]:
    return {
        "weight_packed": StoredTensor("I32", (64, words)),
        "weight_scale": StoredTensor("BF16", (64, 8)),
        "weight_shape": StoredTensor("I64", (2,)),
    }


def test_the_packed_width_tells_the_bits():
    for fmt, bits in INTEGER_BITS.items():
        found, problems = identify(stored(1024 * bits // 32), 64, 1024)
        assert found is not None
        assert (found.format, found.group_size, problems) == (fmt, 128, [])


def test_ten_codes_in_a_word_and_other_widths_are_refused_in_a_sentence():
    _, problems = identify(stored(103), 64, 1024)
    assert len(problems) == 1
    assert "10 codes of 3 bits in each word, as compressed-tensors before 0.17" in problems[0]
    _, problems = identify(stored(160), 64, 1024)
    assert problems == [".weight_packed holds 5-bit codes; onebox reads integers of 2, 3, 4 and 8 bits"]
    _, problems = identify(stored(99), 64, 1024)
    assert problems == [".weight_packed has shape [64, 99] where [64, 128] is expected"]


def test_a_stock_checkpoint_is_told_what_a_gpu_holds_more_of_it(checkpoints):
    """Its projections have 3 bits too, for which there are no kernels: they are loaded as INT4."""
    report = inspect_checkpoint(checkpoints / "packed-int3")
    rows = {row.module_class: row for row in report.rows}
    delta, experts = rows[ModuleClass.DELTA], rows[ModuleClass.EXPERTS]
    values = sum(module.numel for module in modules(SPEC) if module.module_class is ModuleClass.DELTA)
    assert delta.loaded_bytes - delta.nbytes == values // 8
    assert experts.loaded_bytes == experts.nbytes
    (note,) = [problem.message for problem in report.problems if problem.kind == "widened"]
    assert "a GPU holds them as INT4" in note
    assert not any(problem.is_fatal for problem in report.problems)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["attention", "delta", "shared", "mtp"])
def test_few_bits_are_for_routed_experts(field):
    with pytest.raises(UsageError, match=f"--{field} int3: INT3 is a format of routed experts"):
        Recipe(**{field: INT3})


def test_down_differs_only_among_formats_of_one_kernel():
    with pytest.raises(UsageError, match="--experts-down int4 beside --experts fp8"):
        Recipe(experts=TargetFormat.FP8, experts_down=INT4)
    with pytest.raises(UsageError, match="--experts-down int4 beside --experts keep"):
        Recipe(experts_down=INT4)


def test_a_layer_that_the_model_does_not_have_is_refused(checkpoints):
    recipe = Recipe(experts=INT3, expert_layers=(LayerTarget((3, 4), INT4),))
    with pytest.raises(UsageError, match="names layer 4 for int4, but the model has routed experts in layers 0 to 3"):
        plan_build(recipe, BuildSources(open_source("base", checkpoints / "bf16-fused")))


def test_four_bits_are_not_rounded_to_three(checkpoints):
    with pytest.raises(UnsupportedError, match="cannot become int3: take it from a source that stores it in BF16"):
        plan_build(Recipe(experts=INT3), BuildSources(open_source("base", checkpoints / "autoround")))


def test_layers_are_ranges_or_the_most_sensitive_of_a_file(tmp_path):
    assert parse_layer_target("0-2,7=int4") == LayerTarget((0, 1, 2, 7), INT4)
    file = tmp_path / "a=b.json"
    file.write_text(json.dumps({"0": 0.2, "1": 0.5, "2": 0.5, "3": 0.1}))
    assert parse_layer_target(f"2 of {file}=int4") == LayerTarget((1, 2), INT4)
    assert parse_layer_target(f"3 of {file}=keep") == LayerTarget((0, 1, 2), TargetFormat.KEEP)
    for text in ("0-3", "0-3=int5", "=int4", "3-1=int4", "a=int4"):
        with pytest.raises(UsageError, match="--expert-layers"):
            parse_layer_target(text)
    with pytest.raises(UsageError, match=r"asks for 5 layers of .*, which has 4"):
        parse_layer_target(f"5 of {file}=int4")
    with pytest.raises(UnreadableError):
        parse_layer_target(f"5 of {tmp_path / 'none'}=int4")
    for wrong in ("[1]", "{", '{"a": 1}', '{"0": NaN}'):
        file.write_text(wrong)
        with pytest.raises(UsageError, match="no sensitivity file"):
            parse_layer_target(f"1 of {file}=int4")


def test_the_command_takes_mixed_recipes(checkpoints, tmp_path, run_cli):
    flags = ["--experts=int3", "--experts-down=int4", "--expert-layers=0=int4", "--expert-layers=1-2=int2", "--dry-run"]
    result = run_cli("build", "--base", checkpoints / "bf16-fused", "--out", tmp_path / "out", *flags)
    for form in ("int2", "int3", "int4"):
        assert f"bf16 -> {form} g128" in result.out
    assert "Stock transformers (5.23) takes one format for all routed experts" in result.out


def test_transformers_reads_mixed_experts_wrongly_which_is_said(checkpoints, tmp_path):
    out = build(checkpoints / "bf16-fused", tmp_path / "out", RECIPES["3 and 4"])
    model = open_with_transformers(out)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    original = tensors_of(checkpoints / "bf16-fused")[name].float()
    error = (model.state_dict()[name].float() - original).norm() / original.norm()
    assert error > 0.5, "it reads experts of two formats now: the sentence is to go"
    problems = inspect_checkpoint(out).problems
    assert any("takes one format for all routed experts" in problem.message for problem in problems)
