"""The MTP head against two others: the formulas of MODEL.md written out here in float64, and transformers' layer.

The formulas share no function with `reference.py`: no cache, every expert computed for every token, rotation by complex
numbers, one head at a time. They draft by starting over with a longer sequence each time.
"""

import math
from functools import cache

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

from onebox.model import reference
from onebox.model.reference import Cache, KVRows
from tests.model.configs import CONFIGS
from tests.model.oracle import assert_close, loud_model, token_ids, transformers_model

pytestmark = pytest.mark.usefixtures("no_gradients")
NAMES = ["family pattern", "alternating", "full first", "half rotates", "all rotates", "yarn", "tied head, one expert"]
EPS = 1e-6


@pytest.fixture
def no_gradients():
    with torch.inference_mode():
        yield


@cache
def case(name):
    spec, weights = loud_model(CONFIGS[name])
    return spec, weights, transformers_model(CONFIGS[name], weights)


class Formulas:
    """The head of one model, from its config and tensors alone."""

    def __init__(self, config, weights):
        self.text = config["text_config"]
        self.rope = self.text["rope_parameters"]
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        head = "model.language_model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        self.lm_head = self.w[f"{head}.weight"]
        self.embedding = self.w["model.language_model.embed_tokens.weight"]

    def outputs(self, embedded, hidden, positions):
        """Rows r = norm(layer(fc[norm(e), norm(h)])): embedded and hidden [R, H], positions [3, R]."""
        both = torch.cat([self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")], 1)
        x = torch.einsum("hc,rc->rh", self.w["mtp.fc.weight"], both)
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"), positions)
        x = x + self.experts(self.norm(x, "layers.0.post_attention_layernorm"))
        return self.norm(x, "norm")

    def norm(self, x, name):
        size = torch.sqrt(torch.einsum("...i,...i->...", x, x) / x.shape[-1] + EPS)
        return x / size[..., None] * (1 + self.w[f"mtp.{name}.weight"])

    def attention(self, x, positions):
        heads, kv_heads, size = (self.text[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        name = "mtp.layers.0.self_attn"
        query_gate = self.w[f"{name}.q_proj.weight"].reshape(heads, 2, size, -1)
        keys, values = (self.w[f"{name}.{p}_proj.weight"].reshape(kv_heads, size, -1) for p in "kv")
        mixed = []
        for head in range(heads):
            kv = head * kv_heads // heads
            q = self.turn(self.norm(x @ query_gate[head, 0].T, "layers.0.self_attn.q_norm"), positions)
            k = self.turn(self.norm(x @ keys[kv].T, "layers.0.self_attn.k_norm"), positions)
            likeness = torch.exp(torch.einsum("qd,kd->qk", q, k) / size**0.5).tril()
            shares = likeness / likeness.sum(dim=1, keepdim=True)
            mixed.append(shares @ (x @ values[kv].T) / (1 + torch.exp(-x @ query_gate[head, 1].T)))
        return torch.cat(mixed, dim=1) @ self.w[f"{name}.o_proj.weight"].T

    def turn(self, x, positions):
        """Elements i and i + n/2 of the first n are one complex number, turned by position * theta^(-2i/n)."""
        n = int(x.shape[1] * self.rope["partial_rotary_factor"])
        _, height, width = self.rope["mrope_section"]
        turned = x.clone()
        for i in range(n // 2):
            axis = 1 if i % 3 == 1 and i < 3 * height else 2 if i % 3 == 2 and i < 3 * width else 0
            angle = positions[axis].double() * self.frequency(i, n)
            number = torch.complex(x[:, i], x[:, i + n // 2]) * torch.polar(torch.ones_like(angle), angle)
            number *= 1 + 0.1 * math.log(self.rope.get("factor", 1))
            turned[:, i], turned[:, i + n // 2] = number.real, number.imag
        return turned

    def frequency(self, i, n):
        """Of pair i; with YaRN mixed by how often it turns in the trained length: 32 times or more, once or less."""
        theta, frequency = self.rope["rope_theta"], self.rope["rope_theta"] ** (-2 * i / n)
        if self.rope["rope_type"] != "yarn":
            return frequency
        length = self.rope["original_max_position_embeddings"] / (2 * math.pi)
        first, last = (n / 2 * math.log(length / turns) / math.log(theta) for turns in (32, 1))
        first, last = max(math.floor(first), 0), min(math.ceil(last), n - 1)
        stretched = min(max((i - first) / (last - first), 0), 1)
        return frequency * (1 - stretched) + frequency / self.rope["factor"] * stretched

    def experts(self, x):
        name = "mtp.layers.0.mlp"
        odds = torch.exp(x @ self.w[f"{name}.gate.weight"].T)
        odds = odds / odds.sum(dim=1, keepdim=True)
        least = odds.sort(dim=1, descending=True).values[:, self.text["num_experts_per_tok"] - 1]
        odds = torch.where(odds >= least[:, None], odds, 0.0)
        odds = odds / odds.sum(dim=1, keepdim=True)
        out = self.expert(x, f"{name}.shared_expert") / (
            1 + torch.exp(-x @ self.w[f"{name}.shared_expert_gate.weight"].T)
        )
        for expert in range(self.text["num_experts"]):
            out = out + odds[:, expert, None] * self.expert(x, f"{name}.experts.{expert}")
        return out

    def expert(self, x, name):
        gate, up, down = (self.w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (x @ gate.T / (1 + torch.exp(-x @ gate.T)) * (x @ up.T)) @ down.T


def draft_by_formulas(config, weights, ids, hidden, depth):
    """Logits [depth, V] of the drafts after ids [n + 1] with hidden states [n, H], and the drafts themselves."""
    head = Formulas(config, weights)
    tokens, states, logits = ids[1:].tolist(), hidden.double(), []
    for _ in range(depth):
        out = head.outputs(head.embedding[tokens], states, torch.arange(len(tokens)).expand(3, -1))
        logits.append(head.lm_head @ out[-1])
        tokens.append(int(logits[-1].argmax()))
        states = torch.cat([states, out[-1:]])
    return torch.stack(logits), tokens[len(ids) - 1 :]


def draft(spec, weights, ids, hidden, depth):
    """The same by `reference.py`: one pass over the prompt, then one row at a time against the head's KV rows."""
    rows, following, logits, drafts = KVRows.empty(spec), ids[1:], [], []
    for _ in range(depth):
        hidden = reference.mtp_forward(spec, weights, following, hidden, rows)[-1:]
        logits.append(reference.lm_head(spec, weights, hidden)[0])
        following = logits[-1].argmax()[None]
        drafts.append(int(following))
    assert rows.num_tokens == len(ids) - 1 + depth - 1
    return torch.stack(logits), drafts


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_chained_drafts_equal_the_formulas(name, depth):
    spec, weights, model = case(name)
    ids = token_ids(30, seed=9)
    theirs = model.model(input_ids=ids[None, :-1]).last_hidden_state[0]
    expected, expected_drafts = draft_by_formulas(CONFIGS[name], weights, ids, theirs, depth)
    hidden = reference.forward(spec, weights, ids[:-1], Cache.empty(spec))
    logits, drafts = draft(spec, weights, ids, hidden, depth)
    assert_close(logits.double(), expected)
    assert drafts == expected_drafts


def test_rows_over_an_image_take_its_embeddings_and_the_position_of_their_hidden_state():
    spec, weights = loud_model(CONFIGS["images"])
    random = torch.Generator().manual_seed(4)
    embedded, hidden = (torch.randn(24, spec.hidden_size, generator=random) for _ in range(2))
    positions = torch.randint(0, 60, (3, 24), generator=random).sort(dim=-1).values
    ours = reference.mtp_forward(spec, weights, embedded, hidden, KVRows.empty(spec), positions)
    expected = Formulas(CONFIGS["images"], weights).outputs(embedded.double(), hidden.double(), positions)
    assert_close(ours.double(), expected)


def test_counting_positions_from_the_next_token_gives_the_same_numbers_for_text():
    spec, weights, _ = case("half rotates")
    ids = token_ids(20)
    hidden = reference.forward(spec, weights, ids[:-1], Cache.empty(spec))
    shifted = torch.arange(1, 20).expand(3, -1)
    first, second = (
        reference.mtp_forward(spec, weights, ids[1:], hidden, KVRows.empty(spec), positions)
        for positions in (None, shifted)
    )
    assert_close(first, second)


def transformers_mtp_layer(config, weights):
    """The MTP layer of transformers around its Qwen3.5 decoder layer, with the head's weights under its names."""
    text = {**config["text_config"], "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    hf_config = Qwen3_5MoeTextConfig(**text)
    hf_config._attn_implementation = "eager"
    layer = MtpLayer(hf_config, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, 0).eval()
    outer = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    state = {f"{theirs}.weight": weights[f"mtp.{ours}.weight"] for ours, theirs in outer.items()}
    block = "mtp.layers.0."
    for name, tensor in weights.items():
        if name.startswith(block) and ".experts." not in name:
            state[f"mtp_block.{name.removeprefix(block)}"] = tensor
    gate, up, down = (
        torch.stack([weights[f"{block}mlp.experts.{e}.{part}_proj.weight"] for e in range(text["num_experts"])])
        for part in ("gate", "up", "down")
    )
    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
    state["mtp_block.mlp.experts.down_proj"] = down
    layer.load_state_dict(state)
    return layer


def their_step(model, layer, following, hidden, start, past=None):
    """Their layer's outputs [1, R, H] of R rows that start at position `start`."""
    count = following.shape[0]
    embedded = model.get_input_embeddings()(following[None])
    position_ids = torch.arange(start, start + count)[None]
    return layer(
        inputs_embeds=embedded,
        previous_hidden_state=hidden,
        position_embeddings=model.model.language_model.rotary_emb(embedded, position_ids[None].expand(3, -1, -1)),
        attention_mask=torch.full((count, count), float("-inf")).triu(1)[None, None] if count > 1 else None,
        position_ids=position_ids,
        past_key_values=past,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", [90, 1, 33])
def test_outputs_equal_those_of_the_layer_of_transformers(name, split):
    spec, weights, model = case(name)
    ids, count = token_ids(91, seed=7), 90
    hidden = reference.forward(spec, weights, ids[:count], Cache.empty(spec))
    rows = KVRows.empty(spec)
    pieces = zip(ids[1:].split(split), hidden.split(split), strict=True)
    ours = torch.cat([reference.mtp_forward(spec, weights, following, states, rows) for following, states in pieces])

    states = model.model(input_ids=ids[None, :count]).last_hidden_state
    theirs = their_step(model, transformers_mtp_layer(CONFIGS[name], weights), ids[1:], states, start=1)
    assert_close(ours, theirs[0])
    assert_close(reference.lm_head(spec, weights, ours), model.lm_head(theirs)[0])


@pytest.mark.parametrize("name", NAMES)
def test_four_chained_drafts_equal_the_layer_of_transformers_with_its_cache(name):
    spec, weights, model = case(name)
    ids = token_ids(30, seed=9)
    hidden = reference.forward(spec, weights, ids[:-1], Cache.empty(spec))
    logits, drafts = draft(spec, weights, ids, hidden, depth=4)

    layer = transformers_mtp_layer(CONFIGS[name], weights)
    past, following, start = DynamicCache(config=layer.config), ids[1:], 0
    states = model.model(input_ids=ids[None, :-1]).last_hidden_state
    for ours, drafted in zip(logits, drafts, strict=True):
        states = their_step(model, layer, following, states, start, past)[:, -1:]
        theirs = model.lm_head(states)[0, 0]
        assert_close(ours, theirs)
        assert drafted == int(theirs.argmax())
        start, following = past.get_seq_length(), theirs.argmax()[None]
