"""The pocket model's network for training: the computation of `onebox.model.reference` on batches, with gradients.

Weights are a mapping from checkpoint names to tensors (the MTP head's experts fused, as the layers' are). If matrices
are bfloat16, matrix products are too, and everything else stays float32. The tokens of a batch are one flat dimension
N = B * T, so compiled code does not depend on the sequence length; only the two mixers separate the sequences.

Letters in shapes: B sequences, T tokens of each, N = B * T, H hidden, V vocabulary, E experts, D head size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.model import reference
from onebox.spec.model import FULL, ModelSpec
from onebox.spec.modules import fused_experts, modules
from recipes.pocket.training.delta_rule import DeltaRule
from recipes.pocket.training.vision import PREFIX, TowerFunctions, draw_vision_weights

__all__ = ["BatchLayout", "LayerFunctions", "TrainingNetwork", "Weights", "draw_weights", "token_losses"]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class BatchLayout:
    """Positions of the N flat tokens of a batch in its B sequences of T."""

    num_rows: int
    length: int
    cos: Tensor
    """[N, rotary_dim / 2], and sin likewise."""
    sin: Tensor
    has_before: Tensor
    """[N, kernel - 1], 0 or 1: whether the token 1, 2, ... positions back is in the same sequence."""

    @classmethod
    def of(cls, spec: ModelSpec, num_rows: int, length: int, device: torch.device) -> "BatchLayout":
        cos, sin = reference.rotary(spec, reference.text_positions(0, length))
        positions = torch.arange(length)
        has_before = positions[:, None] > torch.arange(spec.linear_conv_kernel_dim - 1)
        flat = (part.float().repeat(num_rows, 1).to(device) for part in (cos, sin, has_before))
        return cls(num_rows, length, *flat)

    def at(self, spec: ModelSpec, positions: Tensor) -> "BatchLayout":
        """The same layout with tokens at other positions [3, N], as pictures have them."""
        with torch.device(positions.device):  # the reference creates its frequencies on the default device
            cos, sin = reference.rotary(spec, positions)
        return replace(self, cos=cos, sin=sin)

    def sequences(self, flat: Tensor) -> Tensor:
        """[N, ...] as [B, T, ...]."""
        return flat.view(self.num_rows, self.length, *flat.shape[1:])


# Functions of single tokens. Each is compiled once and used by all layers.


def delta_inputs(spec: ModelSpec, w: Weights, x: Tensor, has_before: Tensor) -> tuple[Tensor, ...]:
    """Query, key, value, log decay, write strength and output gate of a DeltaNet layer from its stream x [N, H]."""
    normed = _norm(spec, x, w["input_layernorm.weight"], w["linear_attn.in_proj_qkv.weight"].dtype)
    qkv = F.linear(normed, w["linear_attn.in_proj_qkv.weight"])
    qkv = F.silu(_causal_conv(qkv, w["linear_attn.conv1d.weight"], has_before))
    query, key, value = qkv.tensor_split([spec.key_dim, 2 * spec.key_dim], dim=-1)
    dtype = normed.dtype
    query, key = (
        reference.l2_norm(part.reshape(-1, spec.linear_num_key_heads, spec.linear_key_head_dim)).to(dtype)
        for part in (query, key)
    )
    heads = (-1, spec.linear_num_value_heads, spec.linear_value_head_dim)
    value = value.to(dtype).reshape(heads)
    write = F.linear(normed, w["linear_attn.in_proj_b.weight"]).float().sigmoid().to(dtype)
    step = F.softplus(F.linear(normed, w["linear_attn.in_proj_a.weight"]).float() + w["linear_attn.dt_bias"])
    log_decay = -w["linear_attn.A_log"].exp() * step
    z = F.linear(normed, w["linear_attn.in_proj_z.weight"]).view(heads)
    return query, key, value, log_decay, write, z


def delta_output(spec: ModelSpec, w: Weights, x: Tensor, mixed: Tensor, z: Tensor) -> Tensor:
    """The stream x [N, H] plus the delta rule's output `mixed` [N, value heads, Dv], normed and gated by z."""
    normed = reference.root_mean_square_norm(mixed.float(), spec.rms_norm_eps) * w["linear_attn.norm.weight"]
    gated = (normed * F.silu(z.float())).to(mixed.dtype)
    return x + F.linear(gated.flatten(1), w["linear_attn.out_proj.weight"])


def attention_inputs(spec: ModelSpec, w: Weights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Query, key (both normed and rotated), value and output gate of an attention layer from its stream x [N, H]."""
    normed = _norm(spec, x, w["input_layernorm.weight"], w["self_attn.q_proj.weight"].dtype)
    query_and_gate = F.linear(normed, w["self_attn.q_proj.weight"])
    query, gate = query_and_gate.view(-1, spec.num_attention_heads, 2 * spec.head_dim).chunk(2, dim=-1)
    shape = (-1, spec.num_key_value_heads, spec.head_dim)
    key = F.linear(normed, w["self_attn.k_proj.weight"]).view(shape)
    value = F.linear(normed, w["self_attn.v_proj.weight"]).view(shape)
    query = _norm(spec, query, w["self_attn.q_norm.weight"], torch.float32)
    key = _norm(spec, key, w["self_attn.k_norm.weight"], torch.float32)
    rotation = (cos, sin)
    dtype = normed.dtype
    return reference.rotate(query, rotation).to(dtype), reference.rotate(key, rotation).to(dtype), value, gate


def attention_output(w: Weights, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
    """The stream x [N, H] plus the attention output `mixed` [N, heads, D], gated."""
    return x + F.linear((mixed * gate.sigmoid()).flatten(1), w["self_attn.o_proj.weight"])


def mixture(spec: ModelSpec, w: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """The stream x [N, H] plus its experts' output, and the layer's balance loss, which is 1 if all are used equally.

    Every token goes through all E experts, with weight 0 for those not chosen. The experts are so small that two
    matrix products over all of them are faster than sorting tokens by expert.
    """
    normed = _norm(spec, x, w["post_attention_layernorm.weight"], w["mlp.experts.down_proj"].dtype)
    shares, balance = _shares(spec, F.linear(normed.float(), w["mlp.gate.weight"]))
    gate_up = F.linear(normed, w["mlp.experts.gate_up_proj"].flatten(0, 1))
    gate, up = gate_up.view(-1, spec.num_experts, 2, spec.moe_intermediate_size).unbind(-2)
    inner = F.silu(gate) * up * shares.unsqueeze(-1).to(up.dtype)
    routed = F.linear(inner.flatten(1), w["mlp.experts.down_proj"].transpose(0, 1).flatten(1))
    names = (f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down"))
    shared = reference.swiglu(normed, *(w[name] for name in names))
    opened = F.linear(normed.float(), w["mlp.shared_expert_gate.weight"]).sigmoid()
    return x + routed + opened * shared, balance


def mtp_inputs(spec: ModelSpec, w: Weights, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The MTP layer's stream [N, H] from next tokens' embeddings and hidden states, both [N, H]."""
    dtype = w["fc.weight"].dtype
    embedded = _norm(spec, embedded, w["pre_fc_norm_embedding.weight"], dtype)
    hidden = _norm(spec, hidden, w["pre_fc_norm_hidden.weight"], dtype)
    return F.linear(torch.cat([embedded, hidden], dim=-1), w["fc.weight"]).float()


def token_losses(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Minus the log-probability [N] of `labels` [N] under the logits of hidden states [N, H] and LM head [V, H]."""
    logits = F.linear(hidden.to(head.dtype), head).float()
    # Not a gather: its gradient would be a scatter into another [N, V] tensor.
    is_label = torch.arange(head.shape[0], device=labels.device) == labels.unsqueeze(-1)
    return logits.logsumexp(-1) - torch.where(is_label, logits, 0.0).sum(-1)


def _norm(spec: ModelSpec, x: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    return reference.zero_centred_norm(x.float(), offset, spec.rms_norm_eps).to(dtype)


def _causal_conv(rows: Tensor, kernel: Tensor, has_before: Tensor) -> Tensor:
    """Depthwise convolution [N, channels] of rows with kernel [channels, 1, K]; the last tap is the token's own."""
    taps = kernel.squeeze(1).unbind(-1)
    out = rows.float() * taps[-1]
    padded = F.pad(rows, (0, 0, len(taps) - 1, 0))
    for back in range(1, len(taps)):
        shifted = padded[len(taps) - 1 - back : -back].float()
        out = out + shifted * has_before[:, back - 1 : back] * taps[-1 - back]
    return out


def _shares(spec: ModelSpec, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Routing weights [N, E], 0 for experts not chosen, and the balance loss.

    An expert's rank is the number of experts ahead of it; of equal ones the lower id is ahead. That is top-k in
    operations that fuse.
    """
    likely = logits.softmax(-1)
    ids = torch.arange(spec.num_experts, device=logits.device)
    ahead = likely.unsqueeze(-2) > likely.unsqueeze(-1)
    ahead = ahead | ((likely.unsqueeze(-2) == likely.unsqueeze(-1)) & (ids[None, :] < ids[:, None]))
    chosen = ahead.sum(-1) < spec.num_experts_per_tok
    kept = torch.where(chosen, likely, 0.0)
    used = chosen.float().mean(0) / spec.num_experts_per_tok
    return kept / kept.sum(-1, keepdim=True), spec.num_experts * (used * likely.mean(0)).sum()


@dataclass(frozen=True)
class LayerFunctions:
    """The functions above: as written, or compiled."""

    delta_inputs: Callable[..., Any] = delta_inputs
    delta_output: Callable[..., Any] = delta_output
    attention_inputs: Callable[..., Any] = attention_inputs
    attention_output: Callable[..., Any] = attention_output
    mixture: Callable[..., Any] = mixture
    mtp_inputs: Callable[..., Any] = mtp_inputs
    token_losses: Callable[..., Any] = token_losses

    @classmethod
    def compiled(cls) -> "LayerFunctions":
        # There are few shapes, so each one is compiled separately.
        plain = vars(cls())
        return cls(**{name: torch.compile(each, dynamic=False, fullgraph=True) for name, each in plain.items()})


@dataclass(frozen=True)
class TrainingNetwork:
    """The model's computation, without its weights."""

    spec: ModelSpec
    rule: DeltaRule
    functions: LayerFunctions = LayerFunctions()
    tower_functions: TowerFunctions = field(default_factory=TowerFunctions)

    def embed(self, weights: Weights, tokens: Tensor) -> Tensor:
        """[N, H]."""
        return F.embedding(tokens, weights[f"{self.spec.text_prefix}embed_tokens.weight"]).float()

    def hidden(
        self, weights: Weights, tokens: Tensor, layout: BatchLayout, taps: dict[int, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states [N, H] of tokens [N] or of embeddings [N, H], and the mean balance loss of the layers.

        `taps` receives the stream [N, H] behind each layer, by layer.
        """
        text = self.spec.text_prefix
        x = tokens if tokens.is_floating_point() else self.embed(weights, tokens)
        balances = []
        for index, kind in enumerate(self.spec.layer_types):
            x, balance = self._layer(_under(weights, f"{text}layers.{index}."), x, layout, is_full=kind == FULL)
            balances.append(balance)
            if taps is not None:
                taps[index] = x
        return _norm(self.spec, x, weights[f"{text}norm.weight"], torch.float32), torch.stack(balances).mean()

    def mtp(self, weights: Weights, next_tokens: Tensor, hidden: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """The MTP head's states [N, H] from next tokens [N] and hidden states [N, H], and its balance loss."""
        embedded = F.embedding(next_tokens, weights[f"{self.spec.text_prefix}embed_tokens.weight"])
        head = {name: weights[f"mtp.{name}"] for name in _MTP_INPUTS}
        x = self.functions.mtp_inputs(self.spec, head, embedded, hidden)
        x, balance = self._layer(_under(weights, "mtp.layers.0."), x, layout, is_full=True)
        return _norm(self.spec, x, weights["mtp.norm.weight"], torch.float32), balance

    def _layer(self, w: Weights, x: Tensor, layout: BatchLayout, *, is_full: bool) -> tuple[Tensor, Tensor]:
        x = self._attention(w, x, layout) if is_full else self._delta_net(w, x, layout)
        mixed: tuple[Tensor, Tensor] = self.functions.mixture(self.spec, _part(w, "mlp."), x)
        return mixed

    def _delta_net(self, w: Weights, x: Tensor, layout: BatchLayout) -> Tensor:
        w = _part(w, "linear_attn.")
        *inputs, z = self.functions.delta_inputs(self.spec, w, x, layout.has_before)
        mixed = self.rule(*(layout.sequences(part) for part in inputs)).flatten(0, 1)
        out: Tensor = self.functions.delta_output(self.spec, w, x, mixed, z)
        return out

    def _attention(self, w: Weights, x: Tensor, layout: BatchLayout) -> Tensor:
        w = _part(w, "self_attn.")
        query, key, value, gate = self.functions.attention_inputs(self.spec, w, x, layout.cos, layout.sin)
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        query, key, value = (layout.sequences(part).transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.functions.attention_output(w, x, mixed.transpose(1, 2).flatten(0, 1), gate)
        return out


_MTP_INPUTS = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_NORM_OF = {
    "linear_attn.": "input_layernorm.weight",
    "self_attn.": "input_layernorm.weight",
    "mlp.": "post_attention_layernorm.weight",
}


def _under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _part(w: Weights, part: str) -> dict[str, Tensor]:
    """One part of a layer and the norm before it: a compiled function must get the same names from every layer."""
    return {name: tensor for name, tensor in w.items() if name.startswith(part) or name == _NORM_OF[part]}


def draw_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Initial float32 weights, the tower's and its reader's among them.

    Matrices that write into the stream start small; decays range from fast to very slow.
    """
    generator = torch.Generator().manual_seed(seed)
    fused = list(fused_experts(spec))
    inside = tuple({f"{group.experts_name}." for group in fused})
    shapes = {module.plain_tensor: module.shape for module in modules(spec) if not module.name.startswith(inside)}
    shapes |= {group.tensor: group.shape for group in fused}
    seen = {name: shapes.pop(name) for name in list(shapes) if name.startswith(PREFIX)}
    weights = {name: _draw(spec, name, shape, generator) for name, shape in shapes.items()}
    return weights | (draw_vision_weights(spec.vision, seen, seed) if spec.vision else {})


def _draw(spec: ModelSpec, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith(".A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log()
    if name.endswith(".dt_bias"):
        step = torch.empty(shape).uniform_(-3, -1, generator=generator).mul(2.302585).exp()
        return step + (-torch.expm1(-step)).log()  # the inverse of softplus
    if name.endswith(".linear_attn.norm.weight"):
        return torch.ones(shape)
    if name.endswith("norm.weight") or ".pre_fc_norm_" in name:
        return torch.zeros(shape)
    fan_in = shape[-1]
    std = 0.5 if name.endswith(".conv1d.weight") else 0.6 * fan_in**-0.5
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
        std /= (2 * spec.num_hidden_layers) ** 0.5
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        std = 0.02
    return torch.randn(shape, generator=generator) * std
