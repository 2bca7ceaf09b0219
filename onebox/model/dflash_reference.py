"""A DFlash block drafter in plain float32 torch, one sequence at a time: what its kernels are compared with.

Two functions are the drafter. `extend` takes the target's features of newly committed tokens into the draft context;
`draft` runs one block, [last token, masks], over that context. The block leaves nothing behind: its own keys and values
are dropped, and the tokens that the target then accepts come in through `extend`.

Letters in shapes: T new tokens, N tokens of the context, B rows of a block, H hidden, L layers, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.model.reference import Weights, WeightScope, root_mean_square_norm, rotate, swiglu
from onebox.spec.dflash import DFlashSpec

__all__ = ["DraftContext", "block_tokens", "draft", "extend", "fuse_features", "visible_keys"]


@dataclass
class DraftContext:
    """Keys (after norm and rotation) and values of all layers, [L, N, num_key_value_heads, D], and positions [N].

    All positions are kept here; a layer's mask hides those outside its window.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor

    @classmethod
    def empty(cls, spec: DFlashSpec) -> "DraftContext":
        shape = (spec.num_hidden_layers, 0, spec.num_key_value_heads, spec.head_dim)
        return cls(torch.empty(shape), torch.empty(shape), torch.empty(0, dtype=torch.long))

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


def extend(
    spec: DFlashSpec, weights: Weights, features: Tensor, context: DraftContext, positions: Tensor | None = None
) -> None:
    """Appends the tokens whose taps are `features` [T, taps * H], in the order of the spec's taps, side by side.

    `positions` [T] are the target's text positions; the default goes on after the last.
    """
    if positions is None:
        positions = _following(context, features.shape[0])
    fused = fuse_features(spec, weights, features)
    rotation = _rotation(spec, positions)
    rows = [
        _keys_values(spec, _attention_of(weights, layer), fused, rotation) for layer in range(len(spec.layer_types))
    ]
    context.keys = torch.cat([context.keys, torch.stack([keys for keys, _ in rows])], dim=1)
    context.values = torch.cat([context.values, torch.stack([values for _, values in rows])], dim=1)
    context.positions = torch.cat([context.positions, positions])


def fuse_features(spec: DFlashSpec, weights: Weights, features: Tensor) -> Tensor:
    """One state [T, H] a token of its taps [T, taps * H]; keys and values of every layer are projected from it."""
    return plain_norm(F.linear(features, weights["fc.weight"]), weights["hidden_norm.weight"], spec.rms_norm_eps)


def block_tokens(spec: DFlashSpec, last_token: int, num_drafts: int) -> Tensor:
    """Ids [1 + num_drafts] of a block: the last token, whose features do not exist yet, and masks."""
    return torch.tensor([last_token] + [spec.mask_token_id] * num_drafts)


def draft(
    spec: DFlashSpec, weights: Weights, embedded: Tensor, context: DraftContext, positions: Tensor | None = None
) -> Tensor:
    """Hidden states [B, H] of a block of embeddings [B, H] (the target's), after the final norm.

    Row j > 0 is for the target's head to predict the token at row j's own position; row 0 predicts nothing.
    """
    if positions is None:
        positions = _following(context, embedded.shape[0])
    rotation = _rotation(spec, positions)
    x = embedded
    for layer in range(spec.num_hidden_layers):
        w = WeightScope(weights, f"layers.{layer}")
        normed = plain_norm(x, w["input_layernorm.weight"], spec.rms_norm_eps)
        keys, values = _keys_values(spec, w.under("self_attn"), normed, rotation)
        visible = visible_keys(spec, layer, positions, torch.cat([context.positions, positions]))
        mixed = _attend(
            _queries(spec, w.under("self_attn"), normed, rotation),
            torch.cat([context.keys[layer], keys]),
            torch.cat([context.values[layer], values]),
            visible,
        )
        x = x + F.linear(mixed.flatten(1), w["self_attn.o_proj.weight"])
        normed = plain_norm(x, w["post_attention_layernorm.weight"], spec.rms_norm_eps)
        x = x + swiglu(normed, *(w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
    return plain_norm(x, weights["norm.weight"], spec.rms_norm_eps)


def visible_keys(spec: DFlashSpec, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys each query of a layer sees, bool [B, N], of their positions [B] and [N]."""
    distance = queries[:, None] - keys[None, :]
    visible = distance >= 0 if spec.causal(layer) else torch.ones_like(distance, dtype=torch.bool)
    window = spec.window(layer)
    return visible if window is None else visible & (distance.abs() < window)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; unlike the target's, the stored weight is the factor itself."""
    return root_mean_square_norm(x, eps) * weight


def _following(context: DraftContext, num_tokens: int) -> Tensor:
    start = int(context.positions[-1]) + 1 if context.num_tokens else 0
    return torch.arange(start, start + num_tokens)


def _attention_of(weights: Weights, layer: int) -> WeightScope:
    return WeightScope(weights, f"layers.{layer}.self_attn")


def _rotation(spec: DFlashSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D / 2]: all dimensions rotate, element i with i + D / 2."""
    half = spec.head_dim // 2
    # In float64: at position 200,000 a float32 angle is off by a hundredth.
    frequencies = spec.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.to(torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def _queries(spec: DFlashSpec, w: WeightScope, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    query = F.linear(x, w["q_proj.weight"]).view(-1, spec.num_attention_heads, spec.head_dim)
    return rotate(plain_norm(query, w["q_norm.weight"], spec.rms_norm_eps), rotation)


def _keys_values(spec: DFlashSpec, w: WeightScope, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys, normed and rotated, and values [T, KV heads, D] of x [T, H]: of fused features, or of a block's rows."""
    shape = (-1, spec.num_key_value_heads, spec.head_dim)
    keys = plain_norm(F.linear(x, w["k_proj.weight"]).view(shape), w["k_norm.weight"], spec.rms_norm_eps)
    return rotate(keys, rotation), F.linear(x, w["v_proj.weight"]).view(shape)


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Mixed values [B, heads, D] of query [B, heads, D] over keys and values [N, KV heads, D]; visible [B, N]."""
    num_rows, num_heads, head_dim = query.shape
    grouped = query.reshape(num_rows, keys.shape[1], num_heads // keys.shape[1], head_dim)
    scores = torch.einsum("tkgd,nkd->kgtn", grouped, keys) * head_dim**-0.5
    shares = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("kgtn,nkd->tkgd", shares, values).reshape(num_rows, num_heads, head_dim)
