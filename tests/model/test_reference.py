"""The plain twin computes what transformers computes, however the tokens are fed to it."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from onebox.model import reference
from onebox.model.random import TINY
from onebox.model.reference import Cache
from onebox.spec.model import FULL, LINEAR
from onebox.spec.modules import fused_experts
from tests.model.configs import CONFIGS
from tests.model.oracle import (
    assert_close,
    clear_logits,
    loud_model,
    tiny_config,
    tiny_model,
    token_ids,
    transformers_model,
)

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.inference_mode():
        yield


def our_logits(spec, weights, ids, split=None, positions=None):
    """Logits of all tokens, fed in pieces of `split` tokens."""
    cache, pieces = Cache.empty(spec), ids.split(split or len(ids))
    hidden = torch.cat([reference.forward(spec, weights, piece, cache, positions) for piece in pieces])
    assert cache.num_tokens == len(ids)
    return reference.lm_head(spec, weights, hidden)


@cache
def case(name):
    """Our spec and weights and their model, made once for all tests of a configuration."""
    spec, weights = loud_model(CONFIGS[name])
    return spec, weights, transformers_model(CONFIGS[name], weights)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 500])
def test_logits_of_a_prompt_equal_those_of_transformers(name, num_tokens):
    spec, weights, model = case(name)
    ids = token_ids(num_tokens, seed=1000 + num_tokens)
    assert_close(our_logits(spec, weights, ids), clear_logits(model, spec, ids))


@pytest.mark.parametrize("name", CONFIGS)
def test_40_decode_steps_equal_those_of_transformers_with_and_without_its_cache(name):
    spec, weights, model = case(name)
    ids, theirs_cache, cache = token_ids(65 + 40, seed=1105), None, Cache.empty(spec)
    whole = clear_logits(model, spec, ids)
    for begin, end in [(0, 65), *((i, i + 1) for i in range(65, 105))]:
        step = ids[begin:end]
        theirs = model(step[None], past_key_values=theirs_cache, use_cache=True)
        theirs_cache = theirs.past_key_values
        ours = reference.lm_head(spec, weights, reference.forward(spec, weights, step, cache))
        assert_close(ours, theirs.logits[0])
        assert_close(ours, whole[begin:end])
        assert torch.equal(ours.argmax(dim=-1), theirs.logits[0].argmax(dim=-1))


def test_configurations_differ_in_what_the_math_depends_on():
    specs = [case(name)[0] for name in CONFIGS]
    assert len(CONFIGS) > 8
    assert {spec.linear_num_value_heads // spec.linear_num_key_heads for spec in specs} == {1, 2, 4}
    assert {spec.linear_conv_kernel_dim for spec in specs} == {2, 3, 4, 6}
    assert {spec.partial_rotary_factor for spec in specs} == {0.25, 0.5, 1.0}
    assert len({(spec.num_attention_heads, spec.num_key_value_heads) for spec in specs}) >= 4
    assert len({(spec.num_experts, spec.num_experts_per_tok) for spec in specs}) >= 4
    assert len({spec.layer_types for spec in specs}) >= 5


def test_a_text_only_config_has_shorter_names():
    spec, weights, _ = case("text only")
    assert spec.is_text_only
    assert "model.embed_tokens.weight" in weights


def test_image_positions_turn_the_frequencies_of_their_axes():
    # A small base, so that even the slowest frequency turns; sections of which time gets the rest.
    rope = {**TINY["text_config"]["rope_parameters"], "rope_theta": 50, "mrope_section": [4, 2, 2]}
    config = tiny_config({"rope_parameters": rope})
    spec, weights = tiny_model(config)
    ids = token_ids(40)
    positions = torch.randint(0, 200, (3, 40), generator=torch.Generator().manual_seed(5)).sort(dim=-1).values
    text_rows = torch.arange(40).expand(1, 40)
    hf_positions = torch.cat([text_rows, positions])[:, None]
    theirs = transformers_model(config, weights)(ids[None], position_ids=hf_positions).logits[0]
    assert_close(our_logits(spec, weights, ids, positions=positions), theirs)
    assert (our_logits(spec, weights, ids) - theirs).abs().max() > 1e-3, "the axes made no difference"


def test_logits_beyond_the_trained_length_equal_those_of_transformers():
    """The published stretch to 1,010,000 tokens, in the published rotation: 64 elements, base 10,000,000."""
    rope = {"partial_rotary_factor": 1.0, "mrope_section": [11, 11, 10], "rope_theta": 10_000_000}
    stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
    rope = {**TINY["text_config"]["rope_parameters"], **rope, **stretch}
    config = tiny_config({"layer_types": [LINEAR, FULL] * 2, "head_dim": 64, "rope_parameters": rope})
    spec, weights = loud_model(config)
    assert spec.rotary_dim == 64
    ids = token_ids(60, seed=11)
    # Text at the far end, with an image's three axes in its middle.
    places = torch.arange(1_009_940, 1_010_000)
    positions = torch.stack([places, places, places])
    positions[1, 20:30] -= 7
    positions[2, 20:30] += 5
    hf_positions = torch.cat([torch.arange(60).expand(1, 60), positions])[:, None]
    theirs = transformers_model(config, weights)(ids[None], position_ids=hf_positions).logits[0]
    assert_close(our_logits(spec, weights, ids, positions=positions), theirs)
    near = our_logits(spec, weights, ids, positions=positions - 1_009_940)
    assert (near - theirs).abs().max() < 0.5 * theirs.abs().max(), "only distances matter, up to the angles' float32"
    plain = our_logits(replace(spec, yarn=None), weights, ids, positions=positions)
    assert (plain - theirs).abs().max() > 1e-2 * theirs.abs().max(), "the stretch made no difference"


@pytest.mark.parametrize("split", [1, 2, 7, 64, 100])
def test_feeding_tokens_in_pieces_gives_the_same_logits(split):
    spec, weights = tiny_model()
    ids = token_ids(150)
    assert_close(our_logits(spec, weights, ids, split), our_logits(spec, weights, ids))


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_chunked_delta_rule_equals_the_recurrent_one(num_tokens):
    random = torch.Generator().manual_seed(num_tokens)
    heads, key_dim, value_dim = 3, 32, 48
    query, key = (reference.l2_norm(torch.randn(num_tokens, heads, key_dim, generator=random)) for _ in range(2))
    value = torch.randn(num_tokens, heads, value_dim, generator=random)
    log_decay = -torch.rand(num_tokens, heads, generator=random) * 20 ** torch.arange(heads)
    write = torch.rand(num_tokens, heads, generator=random)
    start = torch.randn(heads, key_dim, value_dim, generator=random)
    arguments = (query, key, value, log_decay, write, start)
    for chunked, recurrent in zip(
        reference.chunked_delta_rule(*arguments), reference.recurrent_delta_rule(*arguments), strict=True
    ):
        assert_close(chunked, recurrent)


def test_experts_stored_one_by_one_equal_fused_ones():
    spec, weights = tiny_model()
    ids = token_ids(50)
    unfused = dict(weights)
    for group in fused_experts(spec):
        if group.tensor in unfused:
            for expert, matrix in enumerate(unfused.pop(group.tensor)):
                for part, rows in zip(group.parts, matrix.chunk(len(group.parts)), strict=True):
                    unfused[f"{group.experts_name}.{expert}.{part}.weight"] = rows
    assert torch.equal(our_logits(spec, unfused, ids), our_logits(spec, weights, ids))
