"""`onebox scaleout check` on builds of ours, and on builds that are broken in ways that vLLM would not notice."""

import json
import shutil

import pytest

from onebox.checkpoint.bind import bind
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.source import open_checkpoint
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.scaleout.check import CheckRequest, check_checkpoint
from onebox.scaleout.versions import VllmVersion
from tests.synthetic import tiny_config, write_checkpoint

INT4, FP8, INT8 = TargetFormat.INT4, TargetFormat.FP8, TargetFormat.INT8
HYBRID = Recipe(experts=INT4, attention=FP8, delta=FP8, shared=FP8, lm_head=INT8)
# Large enough that two ranks have whole groups and blocks, as the published models have.
WIDE = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "base", "bf16-fused", config=tiny_config(**WIDE))


@pytest.fixture(scope="module")
def hybrid(wide):
    out = wide.parent / "hybrid"
    run_build(plan_build(HYBRID, BuildSources(open_source("base", wide))), out)
    return out


def checked(directory, **request):
    opened = open_checkpoint(directory)
    return check_checkpoint(opened, bind(opened), CheckRequest(**request))


def changed(source, out, change):
    """The checkpoint with another quantization_config; its shards are the same files."""
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    change(config["quantization_config"])
    (out / "config.json").write_text(json.dumps(config))
    return out


def fatal(found):
    return " ".join(finding.text for finding in found.findings if finding.is_fatal)


def test_our_hybrid_loads_on_two_ranks_with_the_kernels_it_is_meant_for(hybrid):
    found = checked(hybrid, tp=2)
    assert found.loads, fatal(found)
    kernels = {layer.layer.name: (str(layer.resolution.scheme), layer.kernel.name) for layer in found.layers}
    start = "language_model.model.layers.0."
    assert kernels[f"{start}mlp.experts"] == ("INT4 g128", "Marlin MoE")
    assert kernels[f"{start}linear_attn.in_proj_qkvz"] == ("FP8 128x128 blocks", "CUTLASS block")
    assert kernels["language_model.model.embed_tokens"] == ("None", "lookup")
    assert kernels[f"{start}mlp.gate"] == kernels[f"{start}linear_attn.in_proj_ba"] == ("None", "cuBLAS")
    assert kernels["language_model.lm_head"] == ("INT8 per row", "Marlin")
    assert kernels["mtp.layers.0.mlp.experts"] == ("None", "Triton")


def test_every_matrix_of_the_checkpoint_is_in_one_layer(hybrid):
    found = checked(hybrid)
    names = [module.name for layer in found.layers for module in layer.layer.modules]
    matrices = {name for name, bound in bind(open_checkpoint(hybrid)).modules.items() if bound.module.is_matrix}
    assert len(names) == len(set(names))
    assert matrices <= set(names)


def test_groups_that_straddle_two_ranks_are_refused_with_their_layer(tmp_path):
    run_build(plan_build(Recipe(shared=INT4), BuildSources(open_source("base", MODEL_DIRECTORY))), tmp_path / "int4")
    assert checked(tmp_path / "int4", tp=1).loads
    text = fatal(checked(tmp_path / "int4", tp=2))
    assert "shared_expert.down_proj" in text
    assert "64 columns on a rank, which are no whole groups of 128" in text


def test_blocks_that_straddle_two_ranks_are_refused_with_their_layer(tmp_path):
    run_build(plan_build(Recipe(attention=FP8), BuildSources(open_source("base", MODEL_DIRECTORY))), tmp_path / "fp8")
    assert checked(tmp_path / "fp8", tp=1).loads
    text = fatal(checked(tmp_path / "fp8", tp=2))
    assert "qkv_proj" in text
    assert "k_proj has 64 rows on a rank" in text


def test_the_head_as_a_plain_name_is_found_out(hybrid, tmp_path):
    def plain_name(config):
        for group in config["config_groups"].values():
            group["targets"] = ["lm_head" if "lm_head" in target else target for target in group["targets"]]

    text = fatal(checked(changed(hybrid, tmp_path / "plain", plain_name)))
    assert "re:.*lm_head$" in text
    assert "language_model.lm_head: it is stored as int8 row [pack-quantized], and no target matches it" in text


def test_mtp_and_gates_that_are_not_ignored_are_found_out(hybrid, tmp_path):
    def all_linear(config):
        config["ignore"] = ["re:.*visual.*"]
        config["config_groups"]["group_0"]["targets"].append("Linear")

    text = fatal(checked(changed(hybrid, tmp_path / "linear", all_linear)))
    for name in ("mlp.gate", "linear_attn.in_proj_ba", "mtp.fc"):
        assert name in text
    assert "list it in `ignore`" in text


def test_one_scheme_for_the_parts_of_a_fused_layer(hybrid, tmp_path):
    def split(config):
        for name, group in list(config["config_groups"].items()):
            if any("linear_attn" in target for target in group["targets"]):
                group["targets"] = [target.replace("|in_proj_z", "") for target in group["targets"]]
                config["config_groups"][f"{name}_z"] = {
                    **config["config_groups"]["group_0"],
                    "targets": [r"re:.*in_proj_z$"],
                }

    text = fatal(checked(changed(hybrid, tmp_path / "split", split)))
    assert "in_proj_qkv and in_proj_z are one layer in vLLM, and they have different schemes" in text


def test_experts_of_a_layer_with_two_schemes_are_refused(wide, tmp_path):
    recipe = Recipe(experts=TargetFormat.INT3, experts_down=INT4)
    run_build(plan_build(recipe, BuildSources(open_source("base", wide))), tmp_path / "int34")
    found = checked(tmp_path / "int34")
    assert "gate, up and down of its experts have different schemes" in fatal(found)
    assert str(found.lowest_version) == "0.25.0"


def test_a_quantised_head_needs_a_version_and_an_older_one_is_refused(hybrid, wide):
    assert str(checked(wide).lowest_version) == "0.17.0"
    assert str(checked(hybrid).lowest_version) == "0.20.0"
    text = fatal(checked(hybrid, vllm=VllmVersion.parse("v0.19.1")))
    assert text == "vLLM 0.19.1 does not have a quantised LM head: it came with 0.20.0 (#37291, merged 2026-03-30)."
    assert checked(hybrid, vllm=VllmVersion.parse("0.20.0")).loads


def test_dflash_is_refused_with_pipelines_and_mtp_is_not(hybrid):
    assert "refuses drafts by dflash with pipelines" in fatal(checked(hybrid, pp=2, drafter="dflash"))
    assert checked(hybrid, pp=2, drafter="mtp").loads
    assert checked(hybrid, tp=2, drafter="dflash").loads


def test_a_draft_vocabulary_that_vllm_would_read_is_refused_with_mtp_drafts(wide, tmp_path):
    planned = plan_build(Recipe(), BuildSources(open_source("base", wide)), draft_vocab=[1, 5, 9])
    listed = tmp_path / "listed"
    run_build(planned, listed)
    assert checked(listed, drafter="mtp").loads  # its file is not in the index
    (listed / "model.safetensors.index.json").unlink()
    assert checked(listed).loads
    assert "mtp.d2t" in fatal(checked(listed, drafter="mtp"))


def test_bytes_of_two_ranks_are_those_of_the_checkpoint_and_of_what_both_hold(hybrid):
    one, two = (sum(checked(hybrid, tp=tp).rank_bytes.values()) for tp in (1, 2))
    stored = sum(bound.nbytes for bound in bind(open_checkpoint(hybrid)).modules.values())
    assert one == stored
    assert 0.5 * stored < two < 0.53 * stored


def test_context_and_states_of_a_rank_are_a_share_of_the_boxs(run_cli, hybrid):
    one, two, staged = (checked(hybrid, **request) for request in ({}, {"tp": 2}, {"pp": 2}))
    spec = one.spec
    assert one.token_bytes == 2 * 2 * spec.num_key_value_heads * spec.head_dim  # keys and values of one layer, BF16
    assert two.token_bytes * 2 == one.token_bytes
    assert two.state_bytes < 0.52 * one.state_bytes
    assert staged.state_bytes == one.state_bytes  # the one DeltaNet layer is on the first stage
    assert checked(hybrid, drafter="mtp").token_bytes == 2 * one.token_bytes
    found = json.loads(run_cli("scaleout", "check", hybrid, "--tp", 2, "--json").out)
    assert (found["token_bytes"], found["state_bytes"]) == (two.token_bytes, two.state_bytes)


def test_drafts_that_vllm_does_not_have_are_refused(hybrid):
    assert "has no drafts by mpt; it has mtp, dflash" in fatal(checked(hybrid, drafter="mpt"))
    assert checked(hybrid, drafter="mpt", vllm=VllmVersion(0, 99)).loads  # not known here
    notes = " ".join(finding.text for finding in checked(hybrid, drafter="dflash").findings)
    assert "DFlash drafters with mixed windows need vLLM 0.26.0" in notes


def test_heads_that_do_not_divide_are_refused(run_cli, hybrid):
    result = run_cli("scaleout", "check", hybrid, "--tp", 3)
    assert result.code == 2
    assert "--tp 3 does not divide the model's 4 attention heads" in result.err


def test_the_command_says_it_and_its_exit_code_does(run_cli, hybrid, tmp_path):
    result = run_cli("scaleout", "check", hybrid, "--tp", 2)
    assert result.code == 0, result.err
    assert "vLLM loads it." in result.out
    assert "Lowest vLLM: 0.20.0" in result.out
    refused = run_cli("scaleout", "check", hybrid, "--tp", 2, "--vllm", "0.18", "--json")
    assert refused.code == 1
    found = json.loads(refused.out)
    assert found["loads"] is False
    assert found["findings"][0]["is_fatal"] is True
    experts = next(layer for layer in found["layers"] if layer["name"].endswith("layers.1.mlp.experts"))
    assert experts["rank_shapes"] == [["gate_proj", 128, 256], ["up_proj", 128, 256], ["down_proj", 256, 128]]


def test_of_another_method_nothing_is_promised(run_cli, tmp_path):
    other = write_checkpoint(tmp_path / "gptq", "gptq", config=tiny_config(**WIDE))
    result = run_cli("scaleout", "check", other, "--tp", 2)
    assert result.code == 0, result.err
    assert "quant_method gptq, which this check does not follow" in " ".join(result.out.split())
    assert "vLLM loads it" not in result.out
