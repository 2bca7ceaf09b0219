"""config.json becomes a ModelSpec, or is refused by the key that stands in the way."""

import json
from collections import Counter

import pytest
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import read_config, spec_from_config
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.shapes import SHAPES, named_spec
from onebox.spec.states import StateDtype


def with_text(**changes):
    config = SHAPES["qwen3.5-122b-a10b"]
    return {**config, "text_config": {**config["text_config"], **changes}}


def test_sizes_of_the_122b_are_those_of_the_published_config():
    spec = named_spec("Qwen/Qwen3.5-122B-A10B")
    assert spec.full_layers == tuple(range(3, 48, 4))
    assert len(spec.linear_layers) == 36
    assert (spec.key_dim, spec.value_dim, spec.conv_dim) == (2048, 8192, 12288)
    assert spec.rotary_dim == 64
    assert spec.state_bytes_per_sequence(StateDtype.FLOAT32) == 36 * (4_194_304 + 73_728)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("qwen3.5-397b-a17b", 397, 17), ("qwen3.5-122b-a10b", 122, 10), ("qwen3.5-35b-a3b", 35, 3)],
)
def test_the_parameters_come_to_what_the_name_says(name, total, active):
    """In billions, without the tower and the MTP head; active: the experts of one token and all the rest."""
    spec = named_spec(name)
    counts = Counter()
    for module in modules(spec):
        counts[module.module_class] += module.numel
    counted = sum(count for kind, count in counts.items() if not kind.in_mtp and kind is not ModuleClass.VISION)
    idle = counts[ModuleClass.EXPERTS] * (1 - spec.num_experts_per_tok / spec.num_experts)
    assert counted / 1e9 == pytest.approx(total, abs=0.7)
    assert (counted - idle) / 1e9 == pytest.approx(active, abs=0.5)


@pytest.mark.parametrize("name", SHAPES)
def test_what_transformers_writes_back_is_read_as_the_same_model(tmp_path, name):
    """Its own config class adds defaults and renames; none of it may be unknown to us or change a size."""
    config = Qwen3_5MoeConfig(**json.loads(json.dumps(SHAPES[name])))
    config.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    written, ours = read_config(tmp_path), named_spec(name)
    assert {**vars(written), "eos_token_id": None} == {**vars(ours), "eos_token_id": None}


def test_a_bare_text_config_is_a_text_only_model(tmp_path):
    Qwen3_5MoeTextConfig(**SHAPES["qwen3.5-35b-a3b"]["text_config"]).save_pretrained(tmp_path)
    spec = read_config(tmp_path)
    assert spec.is_text_only
    assert spec.vision is None
    assert spec.text_prefix == "model."
    assert spec.hidden_size == 2048


def test_layer_types_follow_from_the_interval_when_absent():
    text = {key: value for key, value in with_text()["text_config"].items() if key != "layer_types"}
    spec = spec_from_config({**with_text(), "text_config": {**text, "full_attention_interval": 2}})
    assert spec.full_layers == tuple(range(1, 48, 2))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_5"}, "onebox runs 'qwen3_5_moe'"),
        ({"model_type": "qwen3_5_moe"}, "no text_config"),
        (with_text(surprise=1), r"text_config\.surprise, which onebox does not know"),
        (with_text(hidden_size="3072"), r"text_config\.hidden_size is '3072'"),
        (with_text(num_experts=True), r"text_config\.num_experts is True"),
        (with_text(hidden_act="gelu"), r"text_config\.hidden_act is 'gelu'"),
        (with_text(mtp_num_hidden_layers=2), "heads of one layer"),
        (with_text(layer_types=["full_attention"]), "1 entries for 48 layers"),
        (with_text(layer_types=["mamba"] * 48), "layer_types holds 'mamba'"),
        (with_text(rope_parameters=None), "no text_config.rope_parameters"),
        (with_text(rope_parameters={"rope_type": "dynamic"}), "rope_type is 'dynamic'"),
        ({**SHAPES["qwen3.5-35b-a3b"], "extra": {}}, "the key extra"),
        ({**SHAPES["qwen3.5-35b-a3b"], "vision_config": {"depth": 1, "fancy": 2}}, r"vision_config\.fancy"),
    ],
)
def test_a_config_outside_the_family_is_refused_by_its_key(config, words):
    with pytest.raises(UnsupportedError, match=words):
        spec_from_config(config)


def test_a_missing_config_and_an_unknown_name_are_sentences(tmp_path):
    with pytest.raises(UnreadableError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    with pytest.raises(UsageError, match=r"neither a directory nor a known model.*qwen3\.5-122b-a10b"):
        named_spec("llama")
