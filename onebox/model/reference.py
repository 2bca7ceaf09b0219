"""The whole model in plain float32 torch: the executable form of MODEL.md, and what the kernels are compared with.

Read it from top to bottom: the stack, a decoder layer, its two mixers, its experts, the MTP head, the primitives.
One sequence at a time and no batch dimension, so nothing here can depend on another request. Weights are a plain
mapping from checkpoint names to float32 tensors; experts may be stored one by one or fused. Knows no files, no token
text and no scheduling.

Letters in shapes: T new tokens, N tokens so far (T included), H hidden, V vocabulary, E experts, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.spec.model import FULL, ModelSpec

__all__ = [
    "DELTA_CHUNK",
    "Cache",
    "DeltaState",
    "KVRows",
    "WeightScope",
    "Weights",
    "add_mixer",
    "chunked_delta_rule",
    "embed",
    "forward",
    "lm_head",
    "mtp_forward",
    "mtp_input",
    "recurrent_delta_rule",
    "root_mean_square_norm",
    "rotary",
    "rotate",
    "route",
    "swiglu",
    "text_positions",
    "zero_centred_norm",
]

DELTA_CHUNK = 64
"""Tokens that the chunked delta rule folds into the state at once."""

_L2_EPS = 1e-6

Weights = Mapping[str, Tensor]


@dataclass
class KVRows:
    """Keys (after norm and rotation) and values of one full-attention layer: each [N, num_key_value_heads, D]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, spec: ModelSpec) -> "KVRows":
        shape = (0, spec.num_key_value_heads, spec.head_dim)
        return cls(torch.empty(shape), torch.empty(shape))

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys = torch.cat([self.keys, keys])
        self.values = torch.cat([self.values, values])

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[0]


@dataclass
class DeltaState:
    """One DeltaNet layer's state, of constant size: its last conv inputs and one matrix per value head."""

    conv_rows: Tensor
    """[kernel - 1, conv_dim]: the projections of the latest tokens, before the convolution."""
    matrices: Tensor
    """[value heads, key head dim, value head dim]."""

    @classmethod
    def empty(cls, spec: ModelSpec) -> "DeltaState":
        rows = torch.zeros(spec.linear_conv_kernel_dim - 1, spec.conv_dim)
        heads = (spec.linear_num_value_heads, spec.linear_key_head_dim, spec.linear_value_head_dim)
        return cls(rows, torch.zeros(heads))


@dataclass
class Cache:
    """One sequence's memory: an entry per layer, KV rows or a DeltaNet state, and the number of tokens they hold."""

    layers: list[KVRows | DeltaState] = field(default_factory=list)
    num_tokens: int = 0
    next_position: int = 0
    """The next text position: one past the largest so far. Smaller than `num_tokens` after an image."""

    @classmethod
    def empty(cls, spec: ModelSpec) -> "Cache":
        return cls([KVRows.empty(spec) if kind == FULL else DeltaState.empty(spec) for kind in spec.layer_types])


class WeightScope:
    """The weights under one name: `WeightScope(weights, "a.b")["c.weight"]` is `weights["a.b.c.weight"]`."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights = weights
        self._name = name

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[f"{self._name}.{name}"]

    def __contains__(self, name: str) -> bool:
        return f"{self._name}.{name}" in self._weights

    def under(self, name: str) -> "WeightScope":
        return WeightScope(self._weights, f"{self._name}.{name}")


# The stack.


def forward(
    spec: ModelSpec,
    weights: Weights,
    tokens: Tensor,
    cache: Cache,
    positions: Tensor | None = None,
    taps: dict[int, Tensor] | None = None,
) -> Tensor:
    """Hidden states [T, H] of the new tokens, after the final norm; the cache then holds those tokens too.

    `tokens` are ids [T], or embeddings [T, H] where a prompt has images (`vision.py` makes them and their positions).
    `positions` [3, T] are (time, height, width); text, the default, continues after the largest, all three equal.
    `taps` receives the stream [T, H] behind each layer, un-normed, by layer: what a block drafter reads.
    """
    text = spec.text_prefix.removesuffix(".")
    if positions is None:
        positions = text_positions(cache.next_position, tokens.shape[0])
    rotation = rotary(spec, positions)
    x = embed(spec, weights, tokens)
    for index, memory in enumerate(cache.layers):
        x = decoder_layer(spec, WeightScope(weights, f"{text}.layers.{index}"), x, memory, rotation)
        if taps is not None:
            taps[index] = x
    cache.num_tokens += tokens.shape[0]
    cache.next_position = max(cache.next_position, int(positions.max()) + 1)
    return zero_centred_norm(x, weights[f"{text}.norm.weight"], spec.rms_norm_eps)


def embed(spec: ModelSpec, weights: Weights, tokens: Tensor) -> Tensor:
    """Embeddings [T, H] of token ids [T]; embeddings are returned unchanged."""
    if tokens.is_floating_point():
        return tokens
    return F.embedding(tokens, weights[f"{spec.text_prefix}embed_tokens.weight"])


def lm_head(spec: ModelSpec, weights: Weights, hidden: Tensor) -> Tensor:
    """Logits [T, V] of hidden states [T, H] that `forward` or `mtp_forward` returned."""
    tied = f"{spec.text_prefix}embed_tokens.weight"
    return F.linear(hidden, weights[tied if spec.tie_word_embeddings else "lm_head.weight"])


def decoder_layer(
    spec: ModelSpec, w: WeightScope, x: Tensor, memory: KVRows | DeltaState, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """The stream x [T, H] plus its mixer's output, plus its experts' output; each reads a normed copy."""
    x = add_mixer(spec, w, x, memory, rotation)
    normed = zero_centred_norm(x, w["post_attention_layernorm.weight"], spec.rms_norm_eps)
    return x + mixture_of_experts(spec, w.under("mlp"), normed)


def add_mixer(
    spec: ModelSpec, w: WeightScope, x: Tensor, memory: KVRows | DeltaState, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """The stream x [T, H] plus the output of its attention or DeltaNet: the first half of a decoder layer."""
    normed = zero_centred_norm(x, w["input_layernorm.weight"], spec.rms_norm_eps)
    if isinstance(memory, KVRows):
        return x + gated_attention(spec, w.under("self_attn"), normed, memory, rotation)
    return x + gated_delta_net(spec, w.under("linear_attn"), normed, memory)


# Mixer one: attention with an output gate.


def gated_attention(
    spec: ModelSpec, w: WeightScope, x: Tensor, rows: KVRows, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """Causal grouped-query attention over all N tokens; its output [T, H] is gated per element before `o_proj`."""
    num_tokens, head_dim, eps = x.shape[0], spec.head_dim, spec.rms_norm_eps
    # Each head's rows are its query and then its gate, head after head.
    query_and_gate = F.linear(x, w["q_proj.weight"]).view(num_tokens, spec.num_attention_heads, 2 * head_dim)
    query, gate = query_and_gate.chunk(2, dim=-1)
    key = F.linear(x, w["k_proj.weight"]).view(num_tokens, spec.num_key_value_heads, head_dim)
    value = F.linear(x, w["v_proj.weight"]).view(num_tokens, spec.num_key_value_heads, head_dim)
    query = rotate(zero_centred_norm(query, w["q_norm.weight"], eps), rotation)
    key = rotate(zero_centred_norm(key, w["k_norm.weight"], eps), rotation)
    rows.append(key, value)
    mixed = causal_attention(query, rows.keys, rows.values)
    return F.linear((mixed * gate.sigmoid()).flatten(1), w["o_proj.weight"])


def causal_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mixed values for query, both [T, heads, D]: the last T of the N rows in keys and values [N, KV heads, D]."""
    num_new, num_heads, head_dim = query.shape
    num_all, num_kv_heads, _ = keys.shape
    # Head h reads KV head h // (heads per KV head), so consecutive heads form a group.
    grouped = query.reshape(num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("tkgd,nkd->kgtn", grouped, keys) * head_dim**-0.5
    visible = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
    shares = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("kgtn,nkd->tkgd", shares, values).reshape(num_new, num_heads, head_dim)


def text_positions(start: int, num_tokens: int) -> Tensor:
    """Positions [3, T] of text: time, height and width all count tokens."""
    return torch.arange(start, start + num_tokens).expand(3, -1)


def rotary(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, rotary_dim / 2] of positions [3, T], the three axes interleaved over the frequencies.

    Frequency j belongs to axis j % 3 (time, height, width) while j < 3 * that axis' section, and to time afterwards.
    """
    num_frequencies = spec.rotary_dim // 2
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(num_frequencies) / num_frequencies)
    scale = 1.0
    if spec.yarn is not None:
        first, last = spec.yarn.mixed_pairs(spec.rope_theta, spec.rotary_dim)
        stretched = ((torch.arange(num_frequencies) - first) / (last - first)).clamp(0, 1)
        frequencies = frequencies * (1 - stretched) + frequencies / spec.yarn.factor * stretched
        scale = spec.yarn.attention_factor
    axis = torch.zeros(num_frequencies, dtype=torch.long)
    for index in (1, 2):
        axis[index : 3 * spec.mrope_section[index] : 3] = index
    angles = positions.float()[axis].T * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first rotary_dim elements of x [T, heads, D]; element i is paired with i + rotary_dim / 2."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


# Mixer two: the gated delta rule, a linear attention whose memory does not grow.


def gated_delta_net(spec: ModelSpec, w: WeightScope, x: Tensor, state: DeltaState) -> Tensor:
    """Mixes x [T, H] through the layer's state and returns [T, H]; the state then includes the T tokens."""
    num_tokens, heads = x.shape[0], spec.linear_num_value_heads
    qkv = causal_conv(F.linear(x, w["in_proj_qkv.weight"]), w["conv1d.weight"], state)
    query, key, value = qkv.tensor_split([spec.key_dim, 2 * spec.key_dim], dim=-1)
    repeats = heads // spec.linear_num_key_heads
    key_shape = (num_tokens, spec.linear_num_key_heads, spec.linear_key_head_dim)
    query = l2_norm(query.view(key_shape)).repeat_interleave(repeats, dim=1) * spec.linear_key_head_dim**-0.5
    key = l2_norm(key.view(key_shape)).repeat_interleave(repeats, dim=1)
    value = value.view(num_tokens, heads, spec.linear_value_head_dim)
    write = F.linear(x, w["in_proj_b.weight"]).sigmoid()
    log_decay = -w["A_log"].exp() * F.softplus(F.linear(x, w["in_proj_a.weight"]) + w["dt_bias"])
    rule = recurrent_delta_rule if num_tokens == 1 else chunked_delta_rule
    mixed, state.matrices = rule(query, key, value, log_decay, write, state.matrices)
    z = F.linear(x, w["in_proj_z.weight"]).view_as(mixed)
    gated = w["norm.weight"] * root_mean_square_norm(mixed, spec.rms_norm_eps) * F.silu(z)
    return F.linear(gated.flatten(1), w["out_proj.weight"])


def causal_conv(rows: Tensor, kernel: Tensor, state: DeltaState) -> Tensor:
    """Depthwise convolution over time of rows [T, conv_dim] with kernel [conv_dim, 1, K], then SiLU: [T, conv_dim].

    The kernel's last tap is for the current token; the state holds the K - 1 rows before the first one.
    """
    extended = torch.cat([state.conv_rows, rows])
    state.conv_rows = extended[rows.shape[0] :].clone()
    channels = kernel.shape[0]
    return F.silu(F.conv1d(extended.T.unsqueeze(0), kernel, groups=channels).squeeze(0).T)


def recurrent_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: outputs [T, heads, Dv] and the matrices [heads, Dk, Dv] after the last token.

    query and key [T, heads, Dk], value [T, heads, Dv], log_decay and write [T, heads]. A head's matrix maps keys to
    values: it decays, its value under the new key is read, and it is corrected by a part `write` of the error.
    """
    outputs = torch.empty_like(value)
    for t in range(value.shape[0]):
        matrices = matrices * log_decay[t].exp()[:, None, None]
        recalled = torch.einsum("hk,hkv->hv", key[t], matrices)
        correction = write[t][:, None] * (value[t] - recalled)
        matrices = matrices + key[t][:, :, None] * correction[:, None, :]
        outputs[t] = torch.einsum("hk,hkv->hv", query[t], matrices)
    return outputs, matrices


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """The same function as `recurrent_delta_rule`, DELTA_CHUNK tokens at a time, in matrix products."""
    outputs = []
    for start in range(0, value.shape[0], DELTA_CHUNK):
        at = slice(start, start + DELTA_CHUNK)
        mixed, matrices = _delta_chunk(query[at], key[at], value[at], log_decay[at], write[at], matrices)
        outputs.append(mixed)
    return torch.cat(outputs), matrices


def _delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk, in the shapes of `recurrent_delta_rule`.

    Token i's correction needs those of the tokens before it: c_i = write_i (v_i - fade_i k_i S - sum_j<i a_ij c_j),
    with a_ij = fade from j to i times k_i . k_j. That is a unit lower triangular system in all corrections at once.
    """
    query, key, value, log_decay, write = (part.transpose(0, 1) for part in (query, key, value, log_decay, write))
    total = log_decay.cumsum(dim=-1)
    fade = total.exp().unsqueeze(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).triu(1)
    # The upper half would overflow in exp, so it is masked before, not after.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    system = write.unsqueeze(-1) * (key @ key.mT) * between
    target = write.unsqueeze(-1) * (value - fade * (key @ matrices))
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    outputs = fade * (query @ matrices) + ((query @ key.mT) * between) @ corrections
    to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
    return outputs.transpose(0, 1), fade[:, -1:] * matrices + (key * to_end).mT @ corrections


# Experts.


def mixture_of_experts(spec: ModelSpec, w: WeightScope, x: Tensor) -> Tensor:
    """Sends x [T, H] through each token's top experts, weighted to sum 1, plus the gated shared expert: [T, H]."""
    shares, chosen = route(spec, w, x)
    shared = swiglu(x, *_projections(w.under("shared_expert")))
    out = F.linear(x, w["shared_expert_gate.weight"]).sigmoid() * shared
    # Ascending experts: the order of a token's sum does not depend on the other tokens.
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        routed = swiglu(x[token], *_expert(w.under("experts"), expert))
        out = out.index_add(0, token, shares[token, place, None] * routed)
    return out


def route(spec: ModelSpec, w: WeightScope, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's top experts and their shares, which sum to 1: both [T, num_experts_per_tok]."""
    shares, chosen = F.linear(x, w["gate.weight"]).softmax(dim=-1).topk(spec.num_experts_per_tok, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True), chosen


def _expert(w: WeightScope, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """One expert's gate, up and down matrices; in a fused tensor the gate's rows come before the up's."""
    if "gate_up_proj" not in w:
        return _projections(w.under(str(expert)))
    gate, up = w["gate_up_proj"][expert].chunk(2)
    return gate, up, w["down_proj"][expert]


def _projections(w: WeightScope) -> tuple[Tensor, Tensor, Tensor]:
    return w["gate_proj.weight"], w["up_proj.weight"], w["down_proj.weight"]


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down( silu(gate x) * up x ) for x [T, H]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


# The head that drafts one token further.


def mtp_forward(
    spec: ModelSpec,
    weights: Weights,
    next_tokens: Tensor,
    hidden: Tensor,
    rows: KVRows,
    positions: Tensor | None = None,
) -> Tensor:
    """Hidden states [T, H] from which `lm_head` drafts the token two places on, after the head's own norm.

    Each row combines the hidden state [T, H] at p with the token at p + 1 (ids [T] or embeddings [T, H], as in
    `forward`), is rotated by the position of p, and appends one KV row: row p of `rows` depends on tokens up to p + 1.
    To draft further, feed back the drafted token and this function's output, one position on.
    """
    w = WeightScope(weights, "mtp")
    if positions is None:
        positions = text_positions(rows.num_tokens, next_tokens.shape[0])
    x = mtp_input(spec, w, embed(spec, weights, next_tokens), hidden)
    x = decoder_layer(spec, w.under("layers.0"), x, rows, rotary(spec, positions))
    return zero_centred_norm(x, w["norm.weight"], spec.rms_norm_eps)


def mtp_input(spec: ModelSpec, w: WeightScope, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The stream [T, H] before the MTP head's layer, of the next tokens' embeddings and the hidden states, both [T, H].

    `w` holds the head's weights.
    """
    embedded = zero_centred_norm(embedded, w["pre_fc_norm_embedding.weight"], spec.rms_norm_eps)
    hidden = zero_centred_norm(hidden, w["pre_fc_norm_hidden.weight"], spec.rms_norm_eps)
    return F.linear(torch.cat([embedded, hidden], dim=-1), w["fc.weight"])


# Norms.


def root_mean_square_norm(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def zero_centred_norm(x: Tensor, offset: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; the stored weight is an offset from one."""
    return root_mean_square_norm(x, eps) * (1.0 + offset)


def l2_norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + _L2_EPS).rsqrt()
