"""Stock transformers + compressed-tensors open what `onebox build` wrote, and read the same numbers as we do."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.formats import dequantize, dequantize_fp8_block, unpack_gptq, unpack_quantized
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass, modules
from tests.stock_model import open_with_transformers
from tests.synthetic import Tensors, fuse, gptq_int4_asymmetric, random_weights, tiny_config, write_checkpoint

SPEC = spec_from_config(tiny_config())
RECIPES = {
    "albond": ("autoround", "fp8", Recipe(shared=TargetFormat.FP8, lm_head=TargetFormat.INT8)),
    "fp8 dense": (
        "autoround",
        "fp8",
        Recipe(
            shared=TargetFormat.FP8,
            attention=TargetFormat.FP8,
            delta=TargetFormat.FP8,
            lm_head=TargetFormat.INT8,
            mtp=TargetFormat.INT4,
        ),
    ),
    "gptq": ("gptq", None, Recipe(lm_head=TargetFormat.INT8, shared=TargetFormat.FP8, mtp=TargetFormat.FP8)),
    "3 bits": (
        "bf16-fused",
        None,
        Recipe(experts=TargetFormat.INT3, shared=TargetFormat.FP8, lm_head=TargetFormat.INT8),
    ),
    "all rounded by us": (
        "bf16-fused",
        None,
        Recipe(
            TargetFormat.INT4,
            TargetFormat.FP8,
            TargetFormat.INT8,
            TargetFormat.FP8,
            TargetFormat.INT4,
            TargetFormat.INT8,
        ),
    ),
}


@pytest.fixture(scope="module", params=RECIPES)
def hybrid(request, checkpoints, tmp_path_factory) -> Path:
    base, fp8, recipe = RECIPES[request.param]
    sources = BuildSources(
        open_source("base", checkpoints / base), open_source("fp8", checkpoints / fp8) if fp8 else None
    )
    out = tmp_path_factory.mktemp("hybrid") / "out"
    run_build(plan_build(recipe, sources, 1 << 20), out)
    return out


def all_tensors(directory: Path) -> Tensors:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def our_reading(made: Tensors) -> Tensors:
    """Every module's numbers, float32, by our own reading of a built checkpoint."""
    result: Tensors = {}
    for module in modules(SPEC):
        parts = {
            suffix: made.get(f"{module.name}.{suffix}") for suffix in ("weight_packed", "weight_scale", "weight_shape")
        }
        if parts["weight_packed"] is not None:
            bits = 32 * parts["weight_packed"].shape[1] // module.shape[1]
            result[module.plain_tensor] = dequantize(unpack_quantized(**parts, bits=bits))
        elif parts["weight_scale"] is not None:
            result[module.plain_tensor] = dequantize_fp8_block(made[f"{module.name}.weight"], parts["weight_scale"])
        elif module.plain_tensor in made:
            result[module.plain_tensor] = made[module.plain_tensor].to(torch.float32)
    return result


def test_int4_numbers_are_those_of_the_original_checkpoint(checkpoints, hybrid, request):
    """Read from the original's GPTQ tensors and from the built ones: the same float32 numbers."""
    base = RECIPES[request.node.callspec.params["hybrid"]][0]
    original = all_tensors(checkpoints / base)
    ours = our_reading(all_tensors(hybrid))
    names = [name.removesuffix(".qweight") for name in original if name.endswith(".qweight")]
    kept = [name for name in names if f"{name}.weight_packed" in all_tensors(hybrid)]
    for name in kept:
        before = unpack_gptq(*(original[f"{name}.{suffix}"] for suffix in ("qweight", "qzeros", "scales")))
        assert torch.equal(dequantize(before), ours[f"{name}.weight"]), name
    assert bool(kept) == (base in ("autoround", "gptq"))


def test_transformers_opens_the_hybrid_and_reads_the_same_numbers(hybrid):
    """Every tensor, bit for bit, loaded in float32; transformers reads experts in their scales' dtype."""
    read = open_with_transformers(hybrid).state_dict()
    ours = our_reading(all_tensors(hybrid))
    # The head is unknown to transformers, which stacks experts; whether ours are stacked is a matter of layout only.
    stacked = fuse(SPEC, {**random_weights(SPEC), **ours}, only_main=True)
    for name, tensor in stacked.items():
        if not name.startswith("mtp."):
            assert torch.equal(read[name], tensor.to(read[name].dtype).reshape(read[name].shape)), name


def test_compressed_tensors_reads_every_quantised_module_the_mtp_head_too(hybrid):
    """The scheme is looked up by name in our quantization_config, as a loader does."""
    description = json.loads((hybrid / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(description)
    made = all_tensors(hybrid)
    ours = our_reading(made)
    compared: set[ModuleClass] = set()
    for module in modules(SPEC):
        if not module.is_matrix or module.module_class is ModuleClass.EMBEDDING:
            continue
        schemes = [
            scheme
            for scheme in config.config_groups.values()
            if any(match_name(module.name, target) for target in scheme.targets)
        ]
        is_ignored = any(match_name(module.name, target) for target in config.ignore or [])
        if f"{module.name}.weight_scale" not in made:
            assert is_ignored
            assert not schemes, module.name
            continue
        assert not is_ignored, module.name
        assert len(schemes) == 1, module.name
        parts = {name.rpartition(".")[2]: t for name, t in made.items() if name.rpartition(".")[0] == module.name}
        compressor = BaseCompressor.get_value_from_registry(schemes[0].format)
        theirs = compressor.decompress(parts, schemes[0])["weight"]
        assert torch.equal(theirs, ours[module.plain_tensor].to(theirs.dtype)), module.name
        compared.add(module.module_class)
    assert {ModuleClass.EXPERTS, ModuleClass.SHARED, ModuleClass.LM_HEAD} <= compared


# --- what stock transformers cannot open ---------------------------------------------------------------------------

FP8, INT8, NVFP4 = TargetFormat.FP8, TargetFormat.INT8, TargetFormat.NVFP4
STOPPED = {
    "fp8 experts": ("bf16-fused", Recipe(experts=FP8, lm_head=INT8), "cannot open FP8 experts"),
    "fp8 alone": ("bf16-fused", Recipe(*[FP8] * 5), "cannot open FP8 experts"),
    "asymmetric experts": ("asymmetric", Recipe(lm_head=INT8), "cannot open asymmetric INT4"),
}


def limits(directory: Path) -> str:
    kinds = [problem for problem in inspect_checkpoint(directory).problems if problem.kind == "other tools"]
    return " ".join(problem.message for problem in kinds)


def asymmetric(root: Path, *parts: str) -> Path:
    """An AutoRound checkpoint whose modules with one of `parts` in their names have zero points."""

    def change(tensors: Tensors) -> None:
        for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
            if any(part in name for part in parts):
                words, rows = tensors[f"{name}.qweight"].shape
                made = gptq_int4_asymmetric(torch.randn(rows, 8 * words) * 0.03)
                tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in made.items()})

    base = write_checkpoint(root / "asymmetric", "autoround", change=change)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["sym"] = False
    (base / "config.json").write_text(json.dumps(config))
    return base


@pytest.mark.parametrize("case", STOPPED)
def test_what_transformers_stops_at_is_said(checkpoints, tmp_path, case, run_cli):
    """If this fails because transformers opens one of them, the sentence is to go."""
    kind, recipe, words = STOPPED[case]
    base = asymmetric(tmp_path, ".experts.") if kind == "asymmetric" else checkpoints / kind
    out = tmp_path / "out"
    run_build(plan_build(recipe, BuildSources(open_source("base", base))), out)
    with pytest.raises(RuntimeError):
        open_with_transformers(out)
    assert words in limits(out)
    flags = [f"--{name.replace('_', '-')}={target}" for name, target in recipe.targets.items()]
    assert words in run_cli("build", "--base", base, "--out", out, *flags, "--dry-run").out


def test_nvfp4_experts_are_opened_with_wrong_numbers_which_is_said(checkpoints, tmp_path):
    out = tmp_path / "out"
    run_build(plan_build(Recipe(experts=NVFP4), BuildSources(open_source("base", checkpoints / "bf16-fused"))), out)
    model = open_with_transformers(out)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    original = all_tensors(checkpoints / "bf16-fused")[name].float()
    error = (model.state_dict()[name].float() - original).norm() / original.norm()
    assert error > 1, "it reads their global scales now: the sentence is to go"
    assert "ignores their global scales" in limits(out)


def test_nothing_is_said_of_what_transformers_opens(checkpoints, hybrid):
    """The builds of the tests above, and official FP8 as it is described by its own config."""
    assert limits(hybrid) == ""
    assert limits(checkpoints / "fp8") == ""
