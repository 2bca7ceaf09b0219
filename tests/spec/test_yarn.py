"""A config.json with YaRN, and `--hf-overrides`: read as transformers and vLLM read them, or refused."""

import json

import pytest
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

from onebox.spec.errors import UnsupportedError, UsageError
from onebox.spec.model import read_config, spec_from_config
from onebox.spec.shapes import SHAPES

CONFIG = SHAPES["qwen3.5-122b-a10b"]
STORED = CONFIG["text_config"]["rope_parameters"]
# As the model cards write it, for config.json and for vLLM's --hf-overrides alike.
YARN = {**STORED, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


def overridden(**text):
    return {"text_config": text}


def with_rope(**changes):
    rope = {**YARN, **changes}
    text = {**CONFIG["text_config"], "rope_parameters": {k: v for k, v in rope.items() if v != "absent"}}
    return {**CONFIG, "text_config": text}


def test_the_published_stretch_reaches_a_million_tokens():
    spec = spec_from_config(with_rope())
    assert spec.yarn.factor == 4
    assert spec.max_position_embeddings == 262_144
    assert spec.max_context_tokens == 1_048_576


def test_a_config_whose_limit_was_raised_as_well_keeps_that_limit():
    spec = spec_from_config(CONFIG, overridden(rope_parameters=YARN, max_position_embeddings=1_010_000))
    assert spec.max_context_tokens == 1_010_000
    spec = spec_from_config(
        CONFIG, overridden(rope_parameters={**YARN, "factor": 2.0}, max_position_embeddings=1 << 20)
    )
    assert spec.max_context_tokens == 524_288, "YaRN by 2 does not reach as far"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 2},
        {"factor": 1.0},
        {"attention_factor": 0.7},
        {"mscale": 0.8, "mscale_all_dim": 1.3},
        {"mscale": 0.8},
        {"attention_factor": None, "beta_fast": None},
    ],
)
def test_the_attention_factor_is_transformers(changes):
    config = Qwen3_5MoeConfig(**json.loads(json.dumps(with_rope(**changes))))
    theirs = Qwen3_5MoeTextRotaryEmbedding(config.text_config)
    assert spec_from_config(with_rope(**changes)).yarn.attention_factor == pytest.approx(
        theirs.attention_scaling, rel=1e-15
    )


def test_what_transformers_writes_back_is_read_as_the_same_model(tmp_path):
    config = Qwen3_5MoeConfig(**json.loads(json.dumps(with_rope())))
    config.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert read_config(tmp_path).yarn == spec_from_config(with_rope()).yarn


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": "absent"}, r"rope_parameters\.factor is None; YaRN needs a number of at least 1"),
        ({"factor": 0.5}, r"factor is 0\.5; YaRN needs a number of at least 1"),
        ({"factor": "four"}, "factor is 'four'"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"factor": 100}, r"stretches 262,144 tokens to 26,214,400; onebox computes positions below 16,777,216"),
        ({"original_max_position_embeddings": "absent"}, "YaRN needs the length that the model was trained on"),
        ({"original_max_position_embeddings": True}, "original_max_position_embeddings is True"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast 1 must be above beta_slow 2"),
        ({"attention_factor": -1.0}, r"attention_factor is -1\.0"),
        ({"truncate": "yes"}, "truncate is 'yes'"),
        ({"low_freq_factor": 1}, r"rope_parameters\.low_freq_factor, which onebox does not know"),
        ({"rope_type": "longrope"}, "rope_type is 'longrope'; onebox supports 'default' and 'yarn'"),
        ({"rope_type": "default"}, r"rope_parameters\.factor, which onebox does not know"),
    ],
)
def test_a_stretch_that_cannot_be_computed_is_refused_by_its_key(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        spec_from_config(with_rope(**changes))


def test_overrides_give_the_spec_that_the_same_config_gives():
    assert spec_from_config(CONFIG, overridden(rope_parameters=YARN)) == spec_from_config(with_rope())
    assert spec_from_config(CONFIG, {}) == spec_from_config(CONFIG)
    text_only = {**CONFIG["text_config"], "rope_parameters": STORED}
    assert spec_from_config(text_only, {"rope_parameters": YARN}).yarn is not None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_parameters": YARN}, "rope_parameters at its top; in this model it belongs under text_config"),
        ({"num_experts": 4}, "has num_experts, which onebox cannot replace; it takes text_config.rope_parameters"),
        (overridden(num_experts=4), r"has text_config\.num_experts, which onebox cannot replace"),
        (overridden(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "leaves out rope_theta: add rope_theta 1"),
        (overridden(rope_parameters=4.0), r"sets text_config\.rope_parameters to 4\.0; it must be an object"),
        ({"text_config": []}, r"sets text_config to \[\]; it must be an object"),
        (overridden(rope_parameters={**YARN, "factor": 0}), "With --hf-overrides, config.json: .*factor is 0"),
        (overridden(max_position_embeddings=1 << 25), "With --hf-overrides, .*positions below 16,777,216"),
    ],
)
def test_an_override_without_effect_is_refused_with_a_sentence(overrides, words):
    with pytest.raises(UsageError, match=words):
        spec_from_config(CONFIG, overrides)
