"""The pocket model as the drafter's target: it answers many prompts at once, and its features are kept.

A row is a stream of prompts and answers with <|endoftext|> between them; as in the target's own training its state is
not reset there. All rows advance by one token a step, whether a prompt gives it or the model says it: prompts of any
lengths share a batch without padding, and the features are those of decode steps.

Letters in shapes: B rows, T tokens of a row, H hidden, K taps, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from numpy.typing import NDArray
from torch import Tensor

from onebox.model import reference
from onebox.model.reference_weights import load_weights
from onebox.spec.model import FULL, ModelSpec
from onebox.spec.modules import fused_experts
from recipes.pocket.training.delta_rule import plain_delta_rule
from recipes.pocket.training.network import (
    BatchLayout,
    TrainingNetwork,
    attention_inputs,
    attention_output,
    delta_output,
    mixture,
)

__all__ = ["AnsweredRows", "Target", "write_scripts"]

Script = NDArray[np.int32]


@dataclass
class AnsweredRows:
    """Rows of tokens with what a drafter is trained on."""

    tokens: Tensor
    """[B, T]."""
    is_answer: Tensor
    """[B, T]: whether the model said this token."""
    predicted: Tensor
    """[B, T]: the model's most likely token at this position, after the tokens before it; the same where it spoke."""
    features: Tensor
    """[B, T, K * H], bfloat16: the taps behind each token."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def take(self, rows: Tensor) -> "AnsweredRows":
        return AnsweredRows(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def join(cls, parts: "Sequence[AnsweredRows]") -> "AnsweredRows":
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def write_scripts(prompts: Sequence[Sequence[tuple[NDArray[np.uint16], int]]], length: int, end_token: int) -> Script:
    """What each row reads: its prompts, each with the limit of its answer's tokens, int32 [B, length].

    A negative number stands for an answer: the model speaks until it ends its message, or for so many tokens.
    """
    scripts = np.full((len(prompts), length), end_token, dtype=np.int32)
    for script, row in zip(scripts, prompts, strict=True):
        parts = [np.concatenate([ids.astype(np.int32), [-limit, end_token]]) for ids, limit in row]
        whole = np.concatenate(parts)[:length]
        script[: len(whole)] = whole
    return scripts


class Target:
    """A build of the pocket model on a device: matrices in bfloat16 on a GPU, float32 on a CPU."""

    def __init__(self, directory: Path, taps: Sequence[int], device: torch.device) -> None:
        loaded = load_weights(directory)
        self.spec, self.device, self._taps = loaded.spec, device, tuple(taps)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        weights = _fused(loaded.spec, loaded.weights)
        self._weights = {
            name: tensor.to(device, dtype if _is_matrix(name, tensor) else None) for name, tensor in weights.items()
        }
        text = self.spec.text_prefix
        self.embedding = self._weights[f"{text}embed_tokens.weight"]
        self.head = self._weights["lm_head.weight"]
        self._layers = [
            {name.removeprefix(prefix): tensor for name, tensor in self._weights.items() if name.startswith(prefix)}
            for prefix in (f"{text}layers.{index}." for index in range(self.spec.num_hidden_layers))
        ]
        self._network = TrainingNetwork(self.spec, plain_delta_rule)

    @torch.no_grad()
    def answer(self, scripts: Script, message_end: int) -> AnsweredRows:
        """Rows as long as their scripts, which the model continues where they ask it to."""
        script = torch.from_numpy(scripts).long().to(self.device)
        num_rows, length = script.shape
        memory = _RowMemory(self.spec, num_rows, length, self.device, self.head.dtype)
        cos, sin = (part.to(self.device) for part in reference.rotary(self.spec, reference.text_positions(0, length)))
        tokens, predicted, is_answer = (torch.zeros_like(script) for _ in range(3))
        features = torch.empty(
            num_rows, length, len(self._taps) * self.spec.hidden_size, dtype=torch.bfloat16, device=self.device
        )
        place, said = (torch.zeros(num_rows, 1, dtype=torch.long, device=self.device) for _ in range(2))
        likely = torch.zeros(num_rows, dtype=torch.long, device=self.device)
        for step in range(length):
            written = script.gather(1, place.clamp(max=length - 1))
            speaks = written < 0
            token = torch.where(speaks, likely[:, None], written)
            said = torch.where(speaks, said + 1, 0)
            ends = speaks & ((token == message_end) | (said >= -written))
            place = place + (~speaks | ends)
            said = torch.where(ends, 0, said)
            tokens[:, step], predicted[:, step], is_answer[:, step] = token[:, 0], likely, speaks[:, 0]
            likely, features[:, step] = self._step(
                token[:, 0], step, memory, cos[step : step + 1], sin[step : step + 1]
            )
        return AnsweredRows(tokens, is_answer.bool(), predicted, features)

    @torch.no_grad()
    def read(self, tokens: Tensor, is_answer: Tensor) -> AnsweredRows:
        """The same for rows [B, T] whose tokens are all given, as a prefill computes them."""
        num_rows, length = tokens.shape
        layout = BatchLayout.of(self.spec, num_rows, length, self.device)
        taps: dict[int, Tensor] = {}
        hidden, _ = self._network.hidden(self._weights, tokens.flatten(), layout, taps)
        features = torch.cat([taps[tap] for tap in self._taps], dim=-1).to(torch.bfloat16)
        likely = torch.cat([self._most_likely(part) for part in torch.split(hidden, 8192)]).view(num_rows, length)
        predicted = torch.cat([torch.zeros_like(likely[:, :1]), likely[:, :-1]], dim=1)
        return AnsweredRows(tokens, is_answer, predicted, features.view(num_rows, length, -1))

    def _step(self, token: Tensor, step: int, memory: "_RowMemory", cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely next tokens [B] after tokens [B], and their features [B, K * H]."""
        x = F.embedding(token, self.embedding).float()
        taps = []
        for index, (kind, w) in enumerate(zip(self.spec.layer_types, self._layers, strict=True)):
            if kind == FULL:
                query, key, value, gate = attention_inputs(self.spec, w, x, cos, sin)
                mixed = memory.attend(index, step, query, key, value)
                x = attention_output(w, x, mixed, gate)
            else:
                x = memory.delta(index, w, x)
            x, _ = mixture(self.spec, w, x)
            if index in self._taps:
                taps.append(x.to(torch.bfloat16))
        norm = self._weights[f"{self.spec.text_prefix}norm.weight"]
        return self._most_likely(reference.zero_centred_norm(x, norm, self.spec.rms_norm_eps)), torch.cat(taps, dim=-1)

    def _most_likely(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.head.dtype), self.head).argmax(-1)


class _RowMemory:
    """The KV cache and the DeltaNet states of B rows."""

    def __init__(self, spec: ModelSpec, num_rows: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        kv = (2, num_rows, spec.num_key_value_heads, length, spec.head_dim)
        self._kv = {index: torch.zeros(kv, device=device, dtype=dtype) for index in spec.full_layers}
        conv = (num_rows, spec.linear_conv_kernel_dim - 1, spec.conv_dim)
        self._conv = {index: torch.zeros(conv, device=device) for index in spec.linear_layers}
        heads = (num_rows * spec.linear_num_value_heads, spec.linear_key_head_dim, spec.linear_value_head_dim)
        self._states = {index: torch.zeros(heads, device=device) for index in spec.linear_layers}

    def attend(self, index: int, step: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mixed values [B, heads, D] of a layer's new token."""
        keys, values = self._kv[index]
        keys[:, :, step], values[:, :, step] = key, value
        keys, values = keys[:, :, : step + 1], values[:, :, : step + 1]
        return F.scaled_dot_product_attention(query.unsqueeze(2), keys, values, enable_gqa=True).squeeze(2)

    def delta(self, index: int, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The stream x [B, H] plus the output of a DeltaNet layer, one step of the recurrent rule."""
        spec, dtype = self._spec, w["linear_attn.in_proj_qkv.weight"].dtype
        normed = reference.zero_centred_norm(x, w["input_layernorm.weight"], spec.rms_norm_eps).to(dtype)
        qkv = F.linear(normed, w["linear_attn.in_proj_qkv.weight"]).float()
        window = torch.cat([self._conv[index], qkv[:, None]], dim=1)
        self._conv[index] = window[:, 1:]
        mixed_qkv = F.silu((window * w["linear_attn.conv1d.weight"].squeeze(1).T).sum(1))
        query, key, value = mixed_qkv.tensor_split([spec.key_dim, 2 * spec.key_dim], dim=-1)
        query, key = (self._key_heads(part) for part in (query, key))
        value = value.reshape(-1, 1, spec.linear_value_head_dim)
        write = F.linear(normed, w["linear_attn.in_proj_b.weight"]).float().sigmoid().view(-1, 1, 1)
        gate = F.softplus(F.linear(normed, w["linear_attn.in_proj_a.weight"]).float() + w["linear_attn.dt_bias"])
        decay = (-w["linear_attn.A_log"].exp() * gate).exp().view(-1, 1, 1)
        state = self._states[index].mul_(decay)
        correction = write * (value - key.mT @ state)
        state.baddbmm_(key, correction)
        heads = (-1, spec.linear_num_value_heads, spec.linear_value_head_dim)
        mixed = (query.mT @ state).view(heads) * spec.linear_key_head_dim**-0.5
        z = F.linear(normed, w["linear_attn.in_proj_z.weight"]).view(heads)
        return delta_output(spec, w, x, mixed.to(dtype), z)

    def _key_heads(self, flat: Tensor) -> Tensor:
        """[B * value heads, Dk, 1]: each key head, of norm 1, for all of its value heads."""
        spec = self._spec
        heads = reference.l2_norm(flat.view(-1, spec.linear_num_key_heads, spec.linear_key_head_dim))
        repeated = heads.repeat_interleave(spec.linear_num_value_heads // spec.linear_num_key_heads, dim=1)
        return repeated.reshape(-1, spec.linear_key_head_dim, 1)


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() >= 2 and not name.endswith((".conv1d.weight", ".gate.weight", ".shared_expert_gate.weight"))


def _fused(spec: ModelSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with each layer's experts in one tensor, as the training's network reads them."""
    out = dict(weights)
    for group in fused_experts(spec):
        if group.tensor in out:
            continue
        experts = [
            torch.cat([out.pop(f"{group.experts_name}.{expert}.{part}.weight") for part in group.parts])
            for expert in range(spec.num_experts)
        ]
        out[group.tensor] = torch.stack(experts)
    return out
