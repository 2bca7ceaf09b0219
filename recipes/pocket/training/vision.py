"""The vision tower for training: the family's own architecture on batches of pictures, with gradients.

Weights have the checkpoint's names without `model.visual.`. Pictures of one batch are padded to the same number of
patches; a padded patch is no key of anybody's attention and no token's embedding. Batches of several sizes go through
the tower as one stream, apart in attention alone. If matrices are bfloat16, matrix products are too, and the stream
stays float32.

Letters in shapes: B pictures, P patches of each with the padding, N patches of all batches, D the tower's hidden size,
H the text model's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.spec.model import VisionSpec
from recipes.pocket.pictures.fonts import CHARACTERS

__all__ = [
    "PREFIX",
    "READER",
    "Encoded",
    "PictureBatch",
    "TowerFunctions",
    "draw_vision_weights",
    "encode_pictures",
    "place_pictures",
    "reading_loss",
    "under_prefix",
    "vision_sides",
]

Weights = Mapping[str, Tensor]
PREFIX = "model.visual."
READER = "reader."
"""A head that names the characters in each patch. It teaches the tower letters before the model can ask for them, and
is not part of the model."""
_EPSILON = 1e-6
_BLANK_WEIGHT = 0.05
"""Loss weight of slots without a character: most are."""


@dataclass(frozen=True)
class PictureBatch:
    """Pictures padded to P patches, as palette indexes."""

    patches: Tensor
    """uint8 [B, P, 256]."""
    palettes: Tensor
    """uint8 [B, 256, 3]."""
    grids: Tensor
    """[B, 2]: patches in height and width; 0 where there is no picture."""
    labels: Tensor
    """uint8 [B, P, 4]: characters by slot."""
    places: Tensor
    """[B]: the flat index of the picture's first token in its batch."""

    def to(self, device: torch.device) -> "PictureBatch":
        parts = {name: part.pin_memory() if device.type == "cuda" else part for name, part in vars(self).items()}
        return PictureBatch(**{name: part.to(device, non_blocking=True) for name, part in parts.items()})


@dataclass(frozen=True)
class PatchPlaces:
    """Where the patches of a batch stand in their pictures, [B, P]."""

    row: Tensor
    column: Tensor
    is_valid: Tensor

    @classmethod
    def of(cls, grids: Tensor, num_patches: int) -> "PatchPlaces":
        height, width = grids[:, :1].clamp(min=2), grids[:, 1:].clamp(min=2)
        patch = torch.arange(num_patches, device=grids.device)
        square, inside = patch // 4, patch % 4
        row = 2 * (square // (width // 2)) + inside // 2
        column = 2 * (square % (width // 2)) + inside % 2
        return cls(row, column, patch < height * width)


def position_embeddings(table: Tensor, grids: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """[B, P, D]: the square table [side * side, D] of learned positions, stretched over each picture to its corners."""
    side = int(table.shape[0] ** 0.5)
    steps = [
        (side - 1) / (grids[:, axis : axis + 1].clamp(min=2) - 1) * place for axis, place in enumerate((row, column))
    ]
    low = [step.floor().clamp(0, side - 1) for step in steps]
    share = [step.clamp(max=side - 1) - part for step, part in zip(steps, low, strict=True)]
    total = torch.zeros(1, device=table.device)
    for down in (0, 1):
        for right in (0, 1):
            y, x = (low[0] + down).clamp(max=side - 1), (low[1] + right).clamp(max=side - 1)
            weight = (share[0] if down else 1 - share[0]) * (share[1] if right else 1 - share[1])
            total = total + F.embedding((y * side + x).long(), table) * weight.unsqueeze(-1)
    return total


def rotation(vision: VisionSpec, places: PatchPlaces) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, P, 1, head size] of the tower's two-dimensional rotation."""
    quarter = vision.hidden_size // vision.num_heads // 4
    frequencies = 10000.0 ** -(torch.arange(quarter, device=places.row.device) / quarter)
    angles = torch.cat([part.unsqueeze(-1) * frequencies for part in (places.row.float(), places.column.float())], -1)
    angles = torch.cat([angles, angles], -1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def picture_inputs(w: Weights, patches: Tensor, palettes: Tensor) -> Tensor:
    """The embeddings [B, P, D] of patches, without their positions. A still picture is both frames of a patch."""
    num_pictures, num_patches, _ = patches.shape
    kernel = w["patch_embed.proj.weight"].sum(2).flatten(1)
    colours = (palettes.float() / 127.5 - 1).to(kernel.dtype).flatten(0, 1)
    offsets = 256 * torch.arange(num_pictures, device=patches.device)[:, None, None]
    pixels = F.embedding(patches.long() + offsets, colours).transpose(-1, -2)
    return F.linear(pixels.reshape(num_pictures, num_patches, -1), kernel).float() + w["patch_embed.proj.bias"]


def attention_inputs(w: Weights, x: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key (both rotated) and value [N, heads, head size] of a block."""
    weight = w["attn.qkv.weight"]
    normed = _norm(x, w, "norm1").to(weight.dtype)
    qkv = F.linear(normed, weight).float() + w["attn.qkv.bias"]
    query, key, value = qkv.view(len(x), 3, num_heads, -1).unbind(1)
    query, key = (part * cos + _rotate_half(part) * sin for part in (query, key))
    query, key, value = (part.to(weight.dtype) for part in (query, key, value))
    return query, key, value


def block_output(w: Weights, x: Tensor, mixed: Tensor) -> Tensor:
    """The stream plus the attention's output [N, D], plus that of the block's MLP."""
    x = x + _linear(mixed, w, "attn.proj")
    inner = F.gelu(_linear(_norm(x, w, "norm2"), w, "mlp.linear_fc1"), approximate="tanh")
    return x + _linear(inner, w, "mlp.linear_fc2")


def merge(w: Weights, x: Tensor) -> Tensor:
    """The tokens' embeddings [N / 4, H] of the stream."""
    squares = _norm(x, w, "norm").view(-1, 4 * x.shape[-1])
    return _linear(F.gelu(_linear(squares, w, "linear_fc1")), w, "linear_fc2")


def reader_losses(w: Weights, x: Tensor, labels: Tensor, is_valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the characters that the reader names in the stream, labels [N, 4]: (each slot's loss and weight [N, 4], the
    share of characters named rightly).
    """
    logits = _linear(F.layer_norm(x, x.shape[-1:]), w, "characters").view(*labels.shape, -1)
    target = labels.long()
    weight = torch.where(target > 0, 1.0, _BLANK_WEIGHT) * is_valid.unsqueeze(-1)
    losses = logits.logsumexp(-1) - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    shown = (target > 0) & is_valid.unsqueeze(-1)
    right = ((logits.argmax(-1) == target) & shown).sum() / shown.sum().clamp(min=1)
    return losses * weight, weight, right


def _linear(x: Tensor, w: Weights, name: str) -> Tensor:
    weight = w[f"{name}.weight"]
    return F.linear(x.to(weight.dtype), weight).float() + w[f"{name}.bias"]


def _norm(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], _EPSILON)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


@dataclass(frozen=True)
class TowerFunctions:
    """The functions above that are most of the time: as written, or compiled."""

    picture_inputs: Callable[..., Any] = picture_inputs
    attention_inputs: Callable[..., Any] = attention_inputs
    block_output: Callable[..., Any] = block_output
    reader_losses: Callable[..., Any] = reader_losses

    @classmethod
    def compiled(cls) -> "TowerFunctions":
        # There are few shapes, so each one is compiled separately.
        plain = vars(cls())
        return cls(**{name: torch.compile(each, dynamic=False, fullgraph=True) for name, each in plain.items()})


@dataclass(frozen=True)
class Encoded:
    """Batches of pictures behind the tower."""

    rows: tuple[Tensor, ...]
    """Of each batch the embeddings [B, P / 4, H]."""
    stream: Tensor
    """[N, D], before the merger."""
    labels: Tensor
    """uint8 [N, 4]."""
    is_valid: Tensor
    """[N]: whether there is a patch."""


def encode_pictures(
    vision: VisionSpec, weights: Weights, batches: Sequence[PictureBatch], functions: TowerFunctions
) -> Encoded:
    """All batches through the tower."""
    places = [PatchPlaces.of(batch.grids, batch.patches.shape[1]) for batch in batches]
    parts = [_embedded(weights, batch, place, functions) for batch, place in zip(batches, places, strict=True)]
    sizes = [(part.shape[0], part.shape[1]) for part in parts]
    x = torch.cat([part.flatten(0, 1) for part in parts])
    angles = [rotation(vision, place) for place in places]
    cos, sin = (torch.cat([part.flatten(0, 1) for part in each]) for each in zip(*angles, strict=True))
    masks = [place.is_valid[:, None, None, :] for place in places]
    for block in range(vision.depth):
        w = under_prefix(weights, f"blocks.{block}.")
        heads = functions.attention_inputs(w, x, cos, sin, vision.num_heads)
        x = functions.block_output(w, x, _attend(heads, sizes, masks))
    merged = merge(under_prefix(weights, "merger."), x)
    rows = torch.split(merged, [count * patches // 4 for count, patches in sizes])
    return Encoded(
        tuple(part.view(count, patches // 4, -1) for part, (count, patches) in zip(rows, sizes, strict=True)),
        x,
        torch.cat([batch.labels.flatten(0, 1) for batch in batches]),
        torch.cat([place.is_valid.flatten() for place in places]),
    )


def _embedded(weights: Weights, batch: PictureBatch, places: PatchPlaces, functions: TowerFunctions) -> Tensor:
    """The embeddings [B, P, D] of a batch's patches, with their positions."""
    patch_embed = {name: w for name, w in weights.items() if name.startswith("patch_embed.")}
    x: Tensor = functions.picture_inputs(patch_embed, batch.patches, batch.palettes)
    return x + position_embeddings(weights["pos_embed.weight"], batch.grids, places.row, places.column)


def _attend(heads: tuple[Tensor, Tensor, Tensor], sizes: Sequence[tuple[int, int]], masks: Sequence[Tensor]) -> Tensor:
    """The mixed values [N, D] of queries, keys and values [N, heads, head size], each picture apart."""
    lengths = [count * patches for count, patches in sizes]
    mixed = []
    for (count, patches), mask, *parts in zip(
        sizes, masks, *(torch.split(part, lengths) for part in heads), strict=True
    ):
        query, key, value = (part.view(count, patches, *part.shape[1:]).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(mixed)


def reading_loss(
    weights: Weights, encoded: Encoded, lengths: list[int], functions: TowerFunctions
) -> tuple[Tensor, Tensor]:
    """(mean loss of naming characters, each batch of `lengths` patches counting alike; share named rightly)."""
    losses, counts, right = functions.reader_losses(weights, encoded.stream, encoded.labels, encoded.is_valid)
    means = [
        loss.sum() / count.sum().clamp(min=1)
        for loss, count in zip(torch.split(losses, lengths), torch.split(counts, lengths), strict=True)
    ]
    return torch.stack(means).mean(), right


def under_prefix(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin so, without it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def place_pictures(embedded: Tensor, batch: PictureBatch, rows: Tensor) -> Tensor:
    """The batch's embeddings [N, H] with those of its pictures [B, P / 4, H] in the places of their tokens."""
    each = torch.arange(rows.shape[1], device=rows.device)
    counts = batch.grids.prod(1) // 4
    place = batch.places[:, None] + each
    # What is no token's goes to a row behind the last.
    place = torch.where((each < counts[:, None]) & (place < len(embedded)), place, len(embedded))
    longer = F.pad(embedded, (0, 0, 0, 1))
    return longer.index_put((place.flatten(),), rows.flatten(0, 1).to(longer.dtype))[: len(embedded)]


def vision_sides(vision: VisionSpec) -> dict[str, tuple[int, int]]:
    """As `matrix_sides`, of the tower; its query, key and value projections are three matrices of one tensor."""
    hidden, inner = vision.hidden_size, vision.intermediate_size
    sides: dict[str, tuple[int, int]] = {}
    for block in range(vision.depth):
        name = f"{PREFIX}blocks.{block}."
        sides |= {f"{name}attn.qkv.weight": (hidden, hidden), f"{name}attn.proj.weight": (hidden, hidden)}
        sides |= {f"{name}mlp.linear_fc1.weight": (inner, hidden), f"{name}mlp.linear_fc2.weight": (hidden, inner)}
    merged = hidden * vision.spatial_merge_size**2
    sides[f"{PREFIX}merger.linear_fc1.weight"] = (merged, merged)
    sides[f"{PREFIX}merger.linear_fc2.weight"] = (vision.out_hidden_size, merged)
    return sides


def draw_vision_weights(vision: VisionSpec, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Initial weights of the tower's tensors `shapes`, and those of the reader."""
    generator = torch.Generator().manual_seed(seed)
    reader = {
        f"{READER}characters.weight": (4 * len(CHARACTERS), vision.hidden_size),
        f"{READER}characters.bias": (4 * len(CHARACTERS),),
    }
    return {name: _draw(vision, name, shape, generator) for name, shape in {**shapes, **reader}.items()}


def _draw(vision: VisionSpec, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if ".norm" in name:
        return torch.ones(shape)
    if name.endswith("pos_embed.weight"):
        return torch.randn(shape, generator=generator) * 0.02
    fan_in = math.prod(shape[1:])
    std = 0.6 / math.sqrt(fan_in)
    if name.endswith(("attn.proj.weight", "mlp.linear_fc2.weight")):
        std /= math.sqrt(2 * vision.depth)
    if name.endswith("merger.linear_fc2.weight"):
        std *= 0.1  # like the embeddings of tokens
    return torch.randn(shape, generator=generator) * std
