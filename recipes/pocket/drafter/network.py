"""The drafter for training: the computation of `onebox.model.dflash_reference` for many blocks of many rows at once.

A block starts at an anchor, a position whose token is known and whose features are not: it reads the features of the
positions before. All blocks of a row share the keys and values of its context. Matrices may be bfloat16.

Letters in shapes: B rows, T tokens of a row, A anchors of a row, R rows of a block, H hidden, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.model.dflash_reference import plain_norm
from onebox.model.reference import rotate
from onebox.spec.dflash import DFlashSpec

__all__ = ["DrafterNetwork", "draw_drafter"]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Places:
    """Positions and masks of a batch's blocks."""

    block: Tensor
    """[B, A * R]."""
    anchor: Tensor
    """[B, A * R]: the position of each row's anchor."""
    number: Tensor
    """[A * R]: the number of each row's block."""

    @classmethod
    def of(cls, anchors: Tensor, num_rows: int) -> "_Places":
        num_anchors = anchors.shape[1]
        block = anchors[:, :, None] + torch.arange(num_rows, device=anchors.device)
        number = torch.arange(num_anchors, device=anchors.device).repeat_interleave(num_rows)
        return cls(block.flatten(1), anchors.repeat_interleave(num_rows, dim=1), number)

    def visible(self, spec: DFlashSpec, layer: int, length: int) -> Tensor:
        """Which of the T context keys and the A * R block keys each block row sees, bool [B, 1, A * R, T + A * R]."""
        context = torch.arange(length, device=self.block.device)
        before = context < self.anchor[:, :, None]
        own = (self.number[:, None] == self.number).expand(len(self.block), -1, -1)
        window = spec.window(layer)
        if window is not None:
            before = before & (self.block[:, :, None] - context < window)
            own = own & ((self.block[:, :, None] - self.block[:, None, :]).abs() < window)
        if spec.causal(layer):
            own = own & (self.block[:, None, :] <= self.block[:, :, None])
        return torch.cat([before, own], dim=-1).unsqueeze(1)


@dataclass(frozen=True)
class DrafterNetwork:
    """The drafter's computation, without its weights."""

    spec: DFlashSpec

    def hidden(self, weights: Weights, features: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, A, R, H] of blocks: features [B, T, taps * H], embeddings [B, A, R, H], anchors [B, A]."""
        spec, (num_rows, num_anchors, size, width) = self.spec, embedded.shape
        length = features.shape[1]
        places = _Places.of(anchors, size)
        dtype = weights["fc.weight"].dtype
        fused = F.linear(features.to(dtype), weights["fc.weight"])
        fused = self._norm(fused, weights["hidden_norm.weight"], dtype)
        context = torch.arange(length, device=features.device).expand(num_rows, -1)
        rotations = self._rotation(context), self._rotation(places.block)
        kinds = dict(zip(reversed(spec.layer_types), reversed(range(spec.num_hidden_layers)), strict=True))
        masks = {kind: places.visible(spec, layer, length) for kind, layer in kinds.items()}
        x = embedded.reshape(num_rows, num_anchors * size, width).float()
        for layer in range(spec.num_hidden_layers):
            x = self._layer(weights, layer, x, fused, rotations, masks[spec.layer_types[layer]])
        return self._norm(x, weights["norm.weight"], torch.float32).view(num_rows, num_anchors, size, width)

    def _layer(
        self,
        weights: Weights,
        layer: int,
        x: Tensor,
        fused: Tensor,
        rotations: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        visible: Tensor,
    ) -> Tensor:
        name = f"layers.{layer}"
        w = {key.removeprefix(f"{name}."): tensor for key, tensor in weights.items() if key.startswith(f"{name}.")}
        dtype = w["mlp.up_proj.weight"].dtype
        normed = self._norm(x, w["input_layernorm.weight"], dtype)
        query = self._heads(w, "q", normed, rotations[1])
        keys = torch.cat([self._heads(w, "k", fused, rotations[0]), self._heads(w, "k", normed, rotations[1])], dim=2)
        values = torch.cat([self._heads(w, "v", fused, None), self._heads(w, "v", normed, None)], dim=2)
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"])
        normed = self._norm(x, w["post_attention_layernorm.weight"], dtype)
        inner = F.silu(F.linear(normed, w["mlp.gate_proj.weight"])) * F.linear(normed, w["mlp.up_proj.weight"])
        return x + F.linear(inner, w["mlp.down_proj.weight"])

    def _heads(self, w: Weights, part: str, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, heads, rows, D] of x [B, rows, H]; queries and keys are normed and rotated."""
        heads: Tensor = F.linear(x, w[f"self_attn.{part}_proj.weight"]).view(*x.shape[:-1], -1, self.spec.head_dim)
        if rotation is not None:
            normed = self._norm(heads, w[f"self_attn.{part}_norm.weight"], torch.float32)
            flat = rotate(normed.flatten(0, 1), tuple(angle.flatten(0, 1) for angle in rotation))  # type: ignore[arg-type]
            heads = flat.view_as(normed).to(x.dtype)
        return heads.transpose(1, 2)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.spec.head_dim // 2
        steps = torch.arange(half, dtype=torch.float64, device=positions.device) / half
        angles = positions.double().unsqueeze(-1) * self.spec.rope_theta**-steps
        return angles.cos().float(), angles.sin().float()

    def _norm(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return plain_norm(x.float(), weight, self.spec.rms_norm_eps).to(dtype)


def draw_drafter(spec: DFlashSpec, seed: int = 0) -> dict[str, Tensor]:
    """Initial float32 weights; matrices that write into the stream start small."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for module in spec.modules():
        if not module.is_matrix:
            weights[module.plain_tensor] = torch.ones(module.shape)
            continue
        std = 0.6 * module.shape[1] ** -0.5
        if module.name.endswith(("o_proj", "down_proj")):
            std /= (2 * spec.num_hidden_layers) ** 0.5
        weights[module.plain_tensor] = torch.randn(module.shape, generator=random) * std
    return weights
