"""A drafter's config.json becomes a DFlashSpec with its tensors and masks, or is refused by what stands in the way."""

import copy
import json

import pytest
from transformers import Qwen3Config

from onebox.spec.dflash import refuse_other_target
from onebox.spec.dflash_config import drafter_from_config, is_drafter_config, read_drafter_config
from onebox.spec.dflash_shapes import DFLASH_122B
from onebox.spec.errors import MismatchError, UnsupportedError
from onebox.spec.shapes import SHAPES, named_spec


def config_of(**changes):
    """The published config with these top-level keys changed; None removes one."""
    config = copy.deepcopy(DFLASH_122B) | changes
    return {key: value for key, value in config.items() if value is not None}


def with_inner(**changes):
    inner = DFLASH_122B["dflash_config"] | changes
    return config_of(dflash_config={key: value for key, value in inner.items() if value is not None})


# The 35B's drafter as its trainer's template has it: all layers full, its own keys at top level.
TEMPLATE_35B = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "layer_types": ["full_attention"] * 8,
    "max_position_embeddings": 262144,
    "max_window_layers": 8,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_target_layers": 40,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 248320,
}


def test_the_published_drafter_has_the_tensors_of_its_header():
    modules = {module.plain_tensor: module.shape for module in drafter_from_config(DFLASH_122B).modules()}
    assert len(modules) == 69
    assert sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in modules.values()) == 773_893_632
    assert modules["fc.weight"] == (3072, 24576)
    assert modules["layers.5.self_attn.k_proj.weight"] == (1024, 3072)
    assert modules["layers.0.self_attn.o_proj.weight"] == (3072, 4096)
    assert modules["layers.3.mlp.down_proj.weight"] == (3072, 9216)
    assert modules["layers.3.self_attn.q_norm.weight"] == (128,)


def test_its_sliding_layers_are_causal_and_its_full_layer_sees_the_whole_block():
    spec = drafter_from_config(DFLASH_122B)
    assert [(spec.causal(layer), spec.window(layer)) for layer in range(6)] == [(True, 4096)] * 5 + [(False, None)]
    assert (spec.max_drafts, spec.mask_token_id, spec.rope_theta) == (15, 248077, 1e7)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("place", ["is_causal", "inner is_causal", "causal"])
def test_is_causal_forces_all_layers_wherever_it_stands(is_causal, place):
    config = config_of(is_causal=is_causal) if place == "is_causal" else with_inner(**{place.split()[-1]: is_causal})
    spec = drafter_from_config(config)
    assert [spec.causal(layer) for layer in range(6)] == [is_causal] * 6
    assert [spec.window(layer) for layer in range(6)] == [4096] * 5 + [None]


def test_keys_count_inside_dflash_config_first_and_then_at_top_level():
    inside = drafter_from_config(DFLASH_122B)
    outside = drafter_from_config(config_of(dflash_config=None, **DFLASH_122B["dflash_config"]))
    assert outside == inside
    assert drafter_from_config(config_of(block_size=8)).block_size == 16


def test_the_template_of_the_35b_is_read_by_its_own_config():
    spec = drafter_from_config(TEMPLATE_35B)
    assert [(spec.causal(layer), spec.window(layer)) for layer in range(8)] == [(False, None)] * 8
    assert (spec.num_key_value_heads, spec.sliding_window, spec.rope_theta) == (4, None, 1e7)
    refuse_other_target(spec, named_spec("qwen3.5-35b-a3b"))


def test_the_retrain_of_the_35b_fits_it():
    taps = [1, 6, 11, 16, 22, 27, 32, 37]
    config = with_inner(target_layer_ids=taps) | {"hidden_size": 2048, "num_target_layers": 40}
    spec = drafter_from_config(config)
    assert spec.sliding_layers == (0, 1, 2, 3, 4)
    refuse_other_target(spec, named_spec("qwen3.5-35b-a3b"))


def test_the_older_revision_is_read_by_its_own_config():
    """Four layers, six taps, a window of 2,048."""
    config = with_inner(target_layer_ids=[1, 10, 19, 28, 37, 46]) | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 2048,
    }
    spec = drafter_from_config(config)
    assert spec.feature_size == 6 * 3072
    assert [spec.window(layer) for layer in range(4)] == [2048] * 3 + [None]
    refuse_other_target(spec, named_spec("qwen3.5-122b-a10b"))


def test_what_transformers_writes_back_is_read_as_the_same_drafter(tmp_path):
    config = Qwen3Config(**{key: value for key, value in DFLASH_122B.items() if key != "architectures"})
    config.architectures = ["DFlashDraftModel"]
    config.save_pretrained(tmp_path)
    assert read_drafter_config(tmp_path) == drafter_from_config(DFLASH_122B)


def test_layers_without_types_follow_transformers_rule_or_are_refused():
    untyped = config_of(layer_types=None)
    with pytest.raises(UnsupportedError, match="max_window_layers"):
        drafter_from_config(untyped)
    assert drafter_from_config(untyped | {"max_window_layers": 4}).sliding_layers == (4, 5)
    assert drafter_from_config(untyped | {"use_sliding_window": False}).sliding_layers == ()


REFUSED = {
    "no taps": (with_inner(target_layer_ids=None), "no target_layer_ids"),
    "no mask": (with_inner(mask_token_id=None), "no mask_token_id"),
    "no block": (with_inner(block_size=None), "no block_size"),
    "no theta": (config_of(rope_parameters={"rope_type": "default"}), "no rope_theta"),
    "no rope": (config_of(rope_parameters=None), "no rope_theta"),
    "two thetas": (config_of(rope_theta=1000000), "several rope_theta"),
    "yarn": (config_of(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_type 'default'"),
    "interleaved": (config_of(is_neox_style=False), "is_neox_style"),
    "partial rotation": (
        config_of(rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25}),
        "partial_rotary_factor",
    ),
    "bias": (config_of(attention_bias=True), "attention_bias"),
    "sinks": (with_inner(attention_sink_bias=True), "attention_sink_bias"),
    "no window": (config_of(sliding_window=None), "no sliding_window"),
    "contradicting window": (config_of(use_sliding_window=False), "use_sliding_window"),
    "layer kind": (config_of(layer_types=["full_attention"] * 5 + ["linear_attention"]), "linear_attention"),
    "layer count": (config_of(layer_types=["full_attention"] * 5), "one entry a layer"),
    "mask beyond": (with_inner(mask_token_id=248320), "mask_token_id"),
    "tap twice": (with_inner(target_layer_ids=[1, 1]), "different layers"),
    "causal is text": (config_of(is_causal="yes"), "is_causal"),
    "unknown key": (config_of(new_trick=3), "new_trick"),
    "unknown inner key": (with_inner(new_trick=3), r"dflash_config\.new_trick"),
    "dflash2": (config_of(architectures=["DFlash2DraftModel"]), "DFlash2"),
    "dflash2 by key": (with_inner(conv_kernel_size=2), "DFlash2.*conv_kernel_size"),
    "soft cap": (with_inner(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "dspark": (config_of(architectures=["Qwen3DSparkModel"]), "DSpark"),
    "dspark by key": (with_inner(markov_rank=256), "DSpark"),
    "eagle": (config_of(architectures=["LlamaForCausalLMEagle3"]), "LlamaForCausalLMEagle3"),
    "speculators": (config_of(speculators_model_type="dflash"), "speculators"),
    "a narrower drafter": (config_of(target_hidden_size=5120), "target_hidden_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name):
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedError, match=reason):
        drafter_from_config(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 2048}, "hidden_size is 2,048, the model's 3,072"),
        ({"vocab_size": 250000}, "vocab_size is 250,000"),
        ({"num_target_layers": 40}, "num_target_layers is 40, and the model has 48 layers"),
        ({"num_target_layers": None, "target_layer_ids": [1, 48]}, "taps layer 48"),
    ],
)
def test_a_drafter_of_another_model_is_refused_with_the_reason(changes, reason):
    taps = changes.pop("target_layer_ids", None)
    config = with_inner(**({"target_layer_ids": taps} if taps else {})) | changes
    with pytest.raises(MismatchError, match=reason):
        refuse_other_target(drafter_from_config(config), named_spec("qwen3.5-122b-a10b"))


def test_models_and_drafters_are_told_apart():
    assert is_drafter_config(json.loads(json.dumps(DFLASH_122B)))
    assert is_drafter_config({"architectures": ["DFlash2DraftModel"]})
    assert not any(is_drafter_config(config) for config in SHAPES.values())
