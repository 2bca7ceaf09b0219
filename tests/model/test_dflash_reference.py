"""The drafter's reference computes the published formulas, here written out once more, number by number in float64."""

import math

import numpy as np
import pytest
import torch

from onebox.model.dflash_reference import DraftContext, block_tokens, draft, extend, visible_keys
from onebox.model.random import TINY
from onebox.model.reference import Cache, forward
from onebox.spec.dflash_config import drafter_from_config
from tests.drafters import random_drafter_weights, small_drafter_config
from tests.model.oracle import tiny_model, token_ids

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS = {
    "both kinds": {},
    "all full": {"layer_types": [FULL] * 3, "sliding_window": None, "use_sliding_window": False},
    "all causal": {"is_causal": True},
    "none causal": {"is_causal": False},
    "full first": {"layer_types": [FULL, SLIDING, FULL]},
    "window below a block": {"sliding_window": 3},
    "one kv head": {"num_key_value_heads": 1, "head_dim": 16, "num_attention_heads": 6},
}


def spec_of(name):
    return drafter_from_config(small_drafter_config(TINY, **CONFIGS[name]))


def sees(config_name, layer, query, key):
    """The masks as the facts state them, in words of their own."""
    config = small_drafter_config(TINY, **CONFIGS[config_name])
    slides = config["layer_types"][layer] == SLIDING
    forced = config.get("is_causal")
    if slides and forced is not False:
        return query - config["sliding_window"] < key <= query
    if slides:
        return abs(query - key) < config["sliding_window"]
    return key <= query if forced else True


class Formulas:
    """The forward pass from its description, with loops over heads and keys, in numpy float64."""

    def __init__(self, name, weights):
        self.name, self.config = name, small_drafter_config(TINY, **CONFIGS[name])
        self.w = {key: tensor.double().numpy() for key, tensor in weights.items()}
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.dim = self.config["head_dim"]

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x**2) + 1e-6) * self.w[weight]

    def rotated(self, head, position):
        half, out = self.dim // 2, head.copy()
        for i in range(half):
            angle = position / self.config["rope_parameters"]["rope_theta"] ** (2 * i / self.dim)
            pair = complex(head[i], head[i + half]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = pair.real, pair.imag
        return out

    def per_head(self, x, layer, projection, norm, position):
        heads = (self.w[f"layers.{layer}.self_attn.{projection}.weight"] @ x).reshape(-1, self.dim)
        if norm is None:
            return heads
        return [self.rotated(self.norm(head, f"layers.{layer}.self_attn.{norm}.weight"), position) for head in heads]

    def key_value(self, x, layer, position):
        return self.per_head(x, layer, "k_proj", "k_norm", position), self.per_head(x, layer, "v_proj", None, position)

    def hidden(self, features, block):
        """Hidden states of a block of embeddings [B, H] behind the context of features [N, taps * H]."""
        context = [self.norm(self.w["fc.weight"] @ row, "hidden_norm.weight") for row in features]
        start, rows = len(context), [row.copy() for row in block]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = [self.norm(row, f"{name}.input_layernorm.weight") for row in rows]
            stored = [self.key_value(state, layer, place) for place, state in enumerate(context)]
            stored += [self.key_value(row, layer, start + place) for place, row in enumerate(normed)]
            for place, row in enumerate(normed):
                query = self.per_head(row, layer, "q_proj", "q_norm", start + place)
                rows[place] = rows[place] + self.w[f"{name}.self_attn.o_proj.weight"] @ np.concatenate(
                    [self.attend(layer, head, query[head], start + place, stored) for head in range(self.heads)]
                )
            for place, row in enumerate(rows):
                x = self.norm(row, f"{name}.post_attention_layernorm.weight")
                gate, up = self.w[f"{name}.mlp.gate_proj.weight"] @ x, self.w[f"{name}.mlp.up_proj.weight"] @ x
                rows[place] = row + self.w[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return np.stack([self.norm(row, "norm.weight") for row in rows])

    def attend(self, layer, head, query, position, stored):
        group = head // (self.heads // self.kv_heads)
        seen = [place for place in range(len(stored)) if sees(self.name, layer, position, place)]
        scores = np.array([query @ stored[place][0][group] for place in seen]) / math.sqrt(self.dim)
        shares = np.exp(scores - scores.max())
        return sum(share * stored[place][1][group] for share, place in zip(shares / shares.sum(), seen, strict=True))


def random_rows(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("num_context", "num_rows"), [(0, 4), (1, 1), (4, 8), (17, 5)])
def test_a_block_over_a_context_equals_the_formulas(name, num_context, num_rows):
    spec = spec_of(name)
    weights = random_drafter_weights(spec, seed=3)
    features = random_rows(num_context, spec.feature_size, seed=4)
    block = random_rows(num_rows, spec.hidden_size, seed=5)
    context = DraftContext.empty(spec)
    extend(spec, weights, features, context)
    ours = draft(spec, weights, block, context)
    theirs = Formulas(name, weights).hidden(features.double().numpy(), block.double().numpy())
    torch.testing.assert_close(ours.double(), torch.from_numpy(theirs), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_masks_are_those_of_the_facts(name):
    spec, places = spec_of(name), torch.arange(20)
    for layer in range(3):
        ours = visible_keys(spec, layer, places, places)
        theirs = [[sees(name, layer, query, key) for key in range(20)] for query in range(20)]
        assert ours.tolist() == theirs


def test_the_context_may_come_in_any_pieces():
    spec = spec_of("both kinds")
    weights, features = random_drafter_weights(spec), random_rows(30, spec.feature_size, seed=6)
    whole, pieces = DraftContext.empty(spec), DraftContext.empty(spec)
    extend(spec, weights, features, whole)
    for piece in features.split([11, 1, 2, 16]):
        extend(spec, weights, piece, pieces)
    torch.testing.assert_close(pieces.keys, whole.keys)
    torch.testing.assert_close(pieces.values, whole.values)
    assert pieces.positions.tolist() == list(range(30))


def test_masks_decide_the_result():
    """Of the same weights, causal and bidirectional sliding layers differ, and so do windows."""
    names = ["both kinds", "all full", "all causal", "none causal", "full first", "window below a block"]
    results = []
    for name in names:
        spec = spec_of(name)
        weights, context = random_drafter_weights(spec, seed=3), DraftContext.empty(spec)
        extend(spec, weights, random_rows(12, spec.feature_size, seed=4), context)
        results.append(draft(spec, weights, random_rows(8, spec.hidden_size, seed=5), context)[1:])
    for i, first in enumerate(results):
        assert all(float((first - second).abs().max()) > 1e-3 for second in results[i + 1 :])


def test_taps_are_the_stream_behind_each_layer_and_the_block_is_token_and_masks():
    spec, weights = tiny_model()
    ids, taps = token_ids(20, seed=1), {}
    hidden = forward(spec, weights, ids, Cache.empty(spec), taps=taps)
    assert sorted(taps) == list(range(spec.num_hidden_layers))
    last = taps[spec.num_hidden_layers - 1]
    scale = (last.square().mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt()
    torch.testing.assert_close(hidden, last * scale * (1 + weights[f"{spec.text_prefix}norm.weight"]))
    assert block_tokens(spec_of("both kinds"), 77, 3).tolist() == [77, 5, 5, 5]
