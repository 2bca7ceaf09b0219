"""The plain twin computes what transformers computes, however the tokens are fed to it."""

import pytest
import torch
from transformers import Qwen3_5MoeForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

from onebox.model import reference
from onebox.model.random import TINY
from onebox.model.reference import Cache, KVRows
from onebox.spec.modules import fused_experts
from tests.model.oracle import assert_close, tiny_config, tiny_model, transformers_model

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.inference_mode():
        yield


def token_ids(count, vocab_size=384, seed=0):
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def our_logits(spec, weights, ids, split=None, positions=None):
    """Logits of all tokens, fed in pieces of `split` tokens."""
    cache, pieces = Cache.empty(spec), ids.split(split or len(ids))
    hidden = torch.cat([reference.forward(spec, weights, piece, cache, positions) for piece in pieces])
    assert cache.num_tokens == len(ids)
    return reference.lm_head(spec, weights, hidden)


CONFIGS = {
    "tiny": TINY,
    "one key head per value head": tiny_config({"linear_num_key_heads": 4}),
    "wide conv, eight layers": tiny_config({"linear_conv_kernel_dim": 6, "num_hidden_layers": 8}),
    "one kv head, other widths": tiny_config({"num_key_value_heads": 1, "linear_value_head_dim": 64, "head_dim": 128}),
    "all experts": tiny_config({"num_experts": 3, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 48}),
    "tied head": tiny_config(tie_word_embeddings=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_those_of_transformers(config):
    spec, weights = tiny_model(config)
    ids = token_ids(131)
    theirs = transformers_model(config, weights)(ids[None]).logits[0]
    assert_close(our_logits(spec, weights, ids), theirs)


def test_a_text_only_config_has_shorter_names_and_the_same_math():
    config = TINY["text_config"]
    spec, weights = tiny_model(config)
    assert spec.is_text_only
    hf_config = Qwen3_5MoeTextConfig(**config)
    model = Qwen3_5MoeForCausalLM(hf_config).eval()
    model.load_state_dict({name: w for name, w in weights.items() if not name.startswith("mtp.")})
    ids = token_ids(70)
    assert_close(our_logits(spec, weights, ids), model(ids[None]).logits[0])


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


@pytest.mark.parametrize("split", [1, 2, 7, 64, 100])
def test_feeding_tokens_in_pieces_gives_the_same_logits(split):
    spec, weights = tiny_model()
    ids = token_ids(150)
    assert_close(our_logits(spec, weights, ids, split), our_logits(spec, weights, ids))


def test_decoding_with_the_cache_equals_transformers_decoding_with_its_cache():
    spec, weights = tiny_model()
    prompt, cache, theirs_cache = token_ids(67), Cache.empty(spec), None
    model = transformers_model(TINY, weights)
    ids = prompt
    for _ in range(12):
        theirs = model(ids[None], past_key_values=theirs_cache, use_cache=True)
        theirs_cache = theirs.past_key_values
        ours = reference.lm_head(spec, weights, reference.forward(spec, weights, ids, cache))
        assert_close(ours, theirs.logits[0])
        assert ours[-1].argmax() == theirs.logits[0, -1].argmax()
        ids = ours[-1:].argmax(dim=-1)


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


def transformers_mtp_layer(weights):
    """The MTP layer of transformers around its Qwen3.5 decoder layer, with the head's weights under its names."""
    config = Qwen3_5MoeTextConfig(**{**TINY["text_config"], "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    config._attn_implementation = "eager"
    layer = MtpLayer(config, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, 0).eval()
    outer = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    state = {f"{theirs}.weight": weights[f"mtp.{ours}.weight"] for ours, theirs in outer.items()}
    block = "mtp.layers.0."
    for name, tensor in weights.items():
        if name.startswith(block) and ".experts." not in name:
            state[f"mtp_block.{name.removeprefix(block)}"] = tensor
    experts = [[weights[f"{block}mlp.experts.{e}.{p}_proj.weight"] for e in range(8)] for p in ("gate", "up", "down")]
    gate, up, down = (torch.stack(matrices) for matrices in experts)
    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
    state["mtp_block.mlp.experts.down_proj"] = down
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("split", [90, 1, 33])
def test_mtp_head_equals_the_layer_of_transformers(split):
    spec, weights = tiny_model()
    ids, count = token_ids(91), 90
    hidden = reference.forward(spec, weights, ids[:count], Cache.empty(spec))
    rows = KVRows.empty(spec)
    pieces = zip(ids[1:].split(split), hidden.split(split), strict=True)
    ours = torch.cat([reference.mtp_forward(spec, weights, following, states, rows) for following, states in pieces])

    model = transformers_model(TINY, weights)
    position_ids = torch.arange(1, count + 1)[None]
    embedded = model.get_input_embeddings()(ids[None, 1:])
    causal = torch.full((count, count), float("-inf")).triu(1)[None, None]
    theirs = transformers_mtp_layer(weights)(
        inputs_embeds=embedded,
        previous_hidden_state=model.model(input_ids=ids[None, :count]).last_hidden_state,
        position_embeddings=model.model.language_model.rotary_emb(embedded, position_ids[None].expand(3, -1, -1)),
        attention_mask=causal,
        position_ids=position_ids,
        past_key_values=None,
    )
    assert_close(ours, theirs[0])
    assert_close(reference.lm_head(spec, weights, ours), model.lm_head(theirs)[0])


def test_drafting_two_tokens_feeds_the_heads_own_output_back():
    spec, weights = tiny_model()
    ids = token_ids(20)
    hidden = reference.forward(spec, weights, ids[:19], Cache.empty(spec))
    rows = KVRows.empty(spec)
    first = reference.mtp_forward(spec, weights, ids[1:], hidden, rows)[-1:]
    drafted = reference.lm_head(spec, weights, first).argmax(dim=-1)
    second = reference.mtp_forward(spec, weights, drafted, first, rows)

    whole = reference.mtp_forward(
        spec, weights, torch.cat([ids[1:], drafted]), torch.cat([hidden, first]), KVRows.empty(spec)
    )
    assert_close(second, whole[-1:])
