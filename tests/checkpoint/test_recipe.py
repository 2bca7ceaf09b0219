"""Recipes: every class of modules, and the MTP head as a whole, comes from one source."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, classes_used, open_source
from onebox.formats import quantize_fp8_block
from onebox.spec.errors import MismatchError
from onebox.spec.modules import ModuleClass
from tests.synthetic import Tensors, write_checkpoint

HEAD = {kind for kind in ModuleClass if kind.in_mtp}
TO_FP8 = Recipe(mtp=TargetFormat.FP8, shared=TargetFormat.FP8)


def tuned_head(tensors: Tensors) -> None:
    """A head trained further: its matrices differ, its norms do not."""
    for name, tensor in tensors.items():
        if name.startswith("mtp.") and tensor.dim() == 2:
            tensors[name] = (tensor.float() * 1.5).to(tensor.dtype)


def origins(plan) -> dict[ModuleClass, set[str]]:
    found: dict[ModuleClass, set[str]] = {}
    for choice in plan.choices:
        found.setdefault(choice.module.module_class, set()).add(choice.source.role)
    return found


def all_tensors(directory: Path) -> Tensors:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_head_that_is_named_comes_whole_from_there_and_is_rounded(checkpoints, tmp_path):
    """The FP8 checkpoint beside it has another head in the wanted format: none of that one is taken."""
    tuned = write_checkpoint(tmp_path / "tuned", "bf16-per-expert", change=tuned_head)
    sources = BuildSources(
        open_source("base", checkpoints / "nvfp4-modelopt"),
        open_source("fp8", checkpoints / "fp8"),
        open_source("mtp", tuned),
    )
    plan = plan_build(TO_FP8, sources)
    assert {role for kind in HEAD for role in origins(plan)[kind]} == {"mtp"}
    assert origins(plan)[ModuleClass.SHARED] == {"fp8"}
    run_build(plan, tmp_path / "out")
    made, theirs = all_tensors(tmp_path / "out"), all_tensors(tuned)
    assert torch.equal(made["mtp.fc.weight"], theirs["mtp.fc.weight"])
    query = "mtp.layers.0.self_attn.q_proj"
    codes, scale = quantize_fp8_block(theirs[f"{query}.weight"], 128, torch.bfloat16)
    assert torch.equal(made[f"{query}.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(made[f"{query}.weight_scale"], scale)


def test_without_a_named_head_the_fp8_checkpoint_gives_all_of_it_or_nothing(checkpoints, tmp_path):
    """Its fc and router too, although they are not FP8."""
    base = write_checkpoint(tmp_path / "base", "autoround", change=tuned_head)
    sources = BuildSources(open_source("base", base), open_source("fp8", checkpoints / "fp8"))
    plan = plan_build(TO_FP8, sources)
    assert {role for kind in HEAD for role in origins(plan)[kind]} == {"fp8"}
    run_build(plan, tmp_path / "out")
    made, official = all_tensors(tmp_path / "out"), all_tensors(checkpoints / "fp8")
    for name in ("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"):
        assert torch.equal(made[name], official[name]), name
    kept = plan_build(Recipe(shared=TargetFormat.FP8), sources)
    assert {role for kind in HEAD for role in origins(kept)[kind]} == {"base"}


def test_a_class_that_the_fp8_checkpoint_holds_partly_is_rounded_from_there(checkpoints, tmp_path):
    """One shared expert of the FP8 checkpoint is BF16: the class still has one source."""
    name = "model.language_model.layers.2.mlp.shared_expert.up_proj"

    def one_in_bf16(tensors: Tensors) -> None:
        tensors.pop(f"{name}.weight_scale_inv")
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.bfloat16)

    fp8 = write_checkpoint(tmp_path / "fp8", "fp8", change=one_in_bf16)
    plan = plan_build(
        Recipe(shared=TargetFormat.FP8),
        BuildSources(open_source("base", checkpoints / "autoround"), open_source("fp8", fp8)),
    )
    assert origins(plan)[ModuleClass.SHARED] == {"fp8"}
    actions = {choice.module.name: choice.action.value for choice in plan.choices}
    assert actions[name] == "quantised"
    assert actions[name.replace("layers.2", "layers.1")] == "moved"


def test_a_class_that_would_need_two_sources_is_refused_with_both_names(checkpoints):
    """A partial FP8 checkpoint: the shared experts of one layer are not there."""
    base, fp8 = open_source("base", checkpoints / "autoround"), open_source("fp8", checkpoints / "fp8")
    gone = "model.language_model.layers.2.mlp.shared_expert.up_proj"
    fp8.binding.modules.pop(gone)
    with pytest.raises(MismatchError, match=f"--shared fp8 would mix the base .*autoround and .*fp8.* no {gone}"):
        plan_build(Recipe(shared=TargetFormat.FP8), BuildSources(base, fp8))


def test_a_base_that_is_fp8_already_keeps_its_own(checkpoints):
    sources = BuildSources(open_source("base", checkpoints / "fp8"), open_source("fp8", checkpoints / "fp8"))
    assert set().union(*origins(plan_build(TO_FP8, sources)).values()) == {"base"}


def other_norm(name: str):
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name] + 1

    return change


def test_sources_are_compared_with_each_other_not_only_with_the_base(checkpoints, tmp_path):
    """The base has no head, so only the two others can contradict each other."""
    tuned = write_checkpoint(tmp_path / "tuned", "bf16-per-expert", change=other_norm("mtp.norm.weight"))
    base = open_source("base", checkpoints / "nvfp4-modelopt")
    both = BuildSources(base, open_source("fp8", checkpoints / "fp8"), open_source("mtp", tuned))
    sentence = r"mtp\.norm differs between the fp8 checkpoint .*/fp8 and the mtp checkpoint .*/tuned"
    with pytest.raises(MismatchError, match=sentence):
        plan_build(TO_FP8, both)
    plan_build(Recipe(), BuildSources(base, mtp=open_source("mtp", tuned)))


def test_numbers_of_the_architecture_are_compared_between_all_sources(checkpoints, tmp_path):
    """rope_theta has no tensor: two checkpoints of equal weights can still disagree."""
    tuned = write_checkpoint(tmp_path / "tuned", "bf16-per-expert")
    config = json.loads((tuned / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] = 123
    (tuned / "config.json").write_text(json.dumps(config))
    sources = BuildSources(open_source("base", checkpoints / "autoround"), mtp=open_source("mtp", tuned))
    with pytest.raises(MismatchError, match=r"base checkpoint .* mtp checkpoint .* rope_theta 10000.0 and 123.0"):
        plan_build(Recipe(), sources)


def test_the_command_names_a_source_that_gives_nothing(checkpoints, tmp_path, run_cli):
    arguments = ["--base", checkpoints / "autoround", "--fp8", checkpoints / "fp8", "--shared", "keep"]
    result = run_cli("build", *arguments, "--out", tmp_path / "out", "--dry-run")
    assert result.code == 0
    assert f"The fp8 checkpoint {checkpoints / 'fp8'} gives no module of this build." in result.out


def test_what_is_fetched_of_an_fp8_checkpoint_is_what_a_build_takes_from_it():
    assert classes_used(TO_FP8, "fp8", has_mtp_source=False) == {*HEAD, ModuleClass.SHARED}
    assert classes_used(TO_FP8, "fp8", has_mtp_source=True) == {ModuleClass.SHARED}
    assert classes_used(TO_FP8, "mtp", has_mtp_source=True) == HEAD


DEFAULT = Recipe.completed({}, has_fp8=False)


def head_formats(plan) -> dict[ModuleClass, set[str]]:
    found: dict[ModuleClass, set[str]] = {}
    for choice in plan.choices:
        if choice.module.module_class.in_mtp:
            found.setdefault(choice.module.module_class, set()).add(choice.target.format.value)
    return found


def with_head(kind: str, checkpoints: Path) -> BuildSources:
    """Checkpoints of this kind as a base; those that have no head take it from the BF16 checkpoint."""
    head = open_source("mtp", checkpoints / "bf16-per-expert") if kind == "nvfp4-modelopt" else None
    return BuildSources(open_source("base", checkpoints / kind), mtp=head)


@pytest.mark.parametrize(
    ("kind", "experts", "attention", "shared"),
    [
        ("autoround", "int4", "int4", "fp8"),
        ("gptq", "int4", "fp8", "fp8"),
        ("nvfp4-modelopt", "nvfp4", "fp8", "fp8"),
        ("nvfp4-llmc", "nvfp4", "fp8", "fp8"),
        ("fp8", "fp8", "fp8", "fp8"),
        ("bf16-fused", "bf16", "bf16", "bf16"),
    ],
)
def test_without_a_word_the_head_is_quantised_as_the_body_is(checkpoints, kind, experts, attention, shared):
    """Its fc, router and norms are not: they decide every draft and are small."""
    found = head_formats(plan_build(DEFAULT, with_head(kind, checkpoints)))
    assert found == {
        ModuleClass.MTP_EXPERTS: {experts},
        ModuleClass.MTP_ATTENTION: {attention},
        ModuleClass.MTP_SHARED: {shared},
        ModuleClass.MTP_FC: {"bf16"},
        ModuleClass.MTP_SMALL: {"bf16"},
    }


def test_the_head_follows_what_the_recipe_makes_of_the_body(checkpoints):
    def made(**given: TargetFormat) -> list[set[str]]:
        recipe = Recipe.completed(given, has_fp8=False)
        found = head_formats(plan_build(recipe, BuildSources(open_source("base", checkpoints / "bf16-fused"))))
        return [found[kind] for kind in (ModuleClass.MTP_EXPERTS, ModuleClass.MTP_ATTENTION, ModuleClass.MTP_SHARED)]

    int4, nvfp4, int8 = TargetFormat.INT4, TargetFormat.NVFP4, TargetFormat.INT8
    assert made(experts=int4, shared=int4) == [{"int4"}, {"fp8"}, {"int4"}]
    assert made(experts=nvfp4, attention=nvfp4, shared=nvfp4) == [{"nvfp4"}] * 3
    assert made(experts=int4, attention=int8) == [{"int4"}, {"fp8"}, {"fp8"}]
    assert made(attention=int4) == [{"bf16"}] * 3, "experts decide whether a body is quantised"


def test_a_head_stays_as_it_is_if_asked_for(checkpoints, tmp_path, run_cli):
    kept = Recipe.completed({"mtp": TargetFormat.KEEP}, has_fp8=False)
    assert set().union(*head_formats(plan_build(kept, with_head("autoround", checkpoints))).values()) == {"bf16"}
    out = tmp_path / "out"
    assert run_cli("build", "--base", checkpoints / "autoround", "--mtp", "keep", "--out", out).code == 0
    made, theirs = all_tensors(out), all_tensors(checkpoints / "autoround")
    head = [name for name in theirs if name.startswith("mtp.")]
    assert head
    assert all(torch.equal(made[name], theirs[name]) for name in head)
    wrong = run_cli("build", "--base", checkpoints / "autoround", "--experts", "auto", "--out", tmp_path / "no")
    assert wrong.code == 2
    assert "auto" in wrong.err
    assert "is not one of keep, bf16" in " ".join(wrong.err.split())


def test_a_body_without_a_head_is_built_without_one(checkpoints):
    assert head_formats(plan_build(DEFAULT, BuildSources(open_source("base", checkpoints / "nvfp4-modelopt")))) == {}
