"""Targets of a quantization_config are matched as vLLM matches them (tests/vllm holds this against vLLM itself)."""

import pytest

from onebox.scaleout.layers import RENAMED
from onebox.scaleout.targets import QuantizationTargets

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
LAYER = "language_model.model.layers.3"


def targets(groups, ignore=()):
    described = {
        f"group_{number}": {"targets": [target], "weights": weights, "format": "pack-quantized"}
        for number, (target, weights) in enumerate(groups)
    }
    return QuantizationTargets({"config_groups": described, "ignore": list(ignore)}, RENAMED)


def bits(found, name, class_name="RowParallelLinear"):
    scheme = found.resolve(name, class_name).scheme
    return scheme and (scheme.num_bits, scheme.type)


def test_a_pattern_is_matched_from_the_beginning_of_the_name():
    found = targets([(r"re:.*self_attn\.o_proj$", INT4), (r"re:self_attn\.o_proj$", FP8)])
    assert bits(found, f"{LAYER}.self_attn.o_proj") == (4, "int")
    assert bits(targets([(r"re:self_attn\.o_proj$", INT4)]), f"{LAYER}.self_attn.o_proj") is None


def test_the_first_group_that_matches_counts():
    found = targets([(r"re:.*proj$", FP8), (r"re:.*o_proj$", INT4)])
    assert bits(found, f"{LAYER}.self_attn.o_proj") == (8, "float")


def test_a_fused_layer_matches_only_if_all_its_matrices_do():
    some = targets([(r"re:.*\.(q|k)_proj$", INT4)])
    assert bits(some, f"{LAYER}.self_attn.qkv_proj", "QKVParallelLinear") is None
    all_of_it = targets([(r"re:.*\.(q|k|v)_proj$", INT4)])
    assert bits(all_of_it, f"{LAYER}.self_attn.qkv_proj", "QKVParallelLinear") == (4, "int")


def test_a_fused_layer_takes_the_scheme_of_its_first_matrix():
    found = targets([(r"re:.*in_proj_z$", FP8), (r"re:.*in_proj_qkv$", INT4)])
    assert bits(found, f"{LAYER}.linear_attn.in_proj_qkvz", "MergedColumnParallelLinear") == (4, "int")
    assert {scheme.type for _, scheme in found.own_schemes(f"{LAYER}.linear_attn.in_proj_qkvz")} == {"int", "float"}


def test_a_fused_layer_of_which_a_part_is_ignored_is_refused():
    found = targets([("Linear", INT4)], ignore=[r"re:.*in_proj_b$"])
    assert "ignore" in found.resolve(f"{LAYER}.linear_attn.in_proj_ba", "MergedColumnParallelLinear").complaint


def test_a_name_with_a_dot_is_renamed_and_one_without_is_not():
    found = targets([("model.language_model.layers.3.self_attn.o_proj", INT4), ("lm_head", FP8)])
    assert bits(found, f"{LAYER}.self_attn.o_proj") == (4, "int")
    assert bits(found, "language_model.lm_head", "ParallelLMHead") is None
    pattern = targets([(r"re:.*lm_head$", FP8)])
    assert bits(pattern, "language_model.lm_head", "ParallelLMHead") == (8, "float")


@pytest.mark.parametrize(("class_name", "expected"), [("QKVParallelLinear", (4, "int")), ("ParallelLMHead", None)])
def test_a_class_name_matches_where_it_contains_the_target(class_name, expected):
    assert bits(targets([("Linear", INT4)]), f"{LAYER}.anything", class_name) == expected


def test_names_of_the_mtp_layer_are_dropped_in_the_main_model():
    found = QuantizationTargets({"config_groups": {}, "ignore": ["mtp.fc"]}, RENAMED)
    assert not found.resolve("mtp.fc", "ColumnParallelLinear").is_ignored
    draft = QuantizationTargets({"config_groups": {}, "ignore": ["mtp.fc"]}, {})
    assert draft.resolve("mtp.fc", "ColumnParallelLinear").is_ignored
