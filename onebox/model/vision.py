"""Images and videos in a prompt: patches to embeddings, and the three-row positions that go with them.

The tower is transformers' own, imported when first needed; the strict loading, the placement in the prompt and the
positions are ours. Patches come from `onebox/text/patches.py`. The results, embeddings [T, H] and positions [3, T], are
what `reference.forward` takes. Knows no chat template: a prompt has one pad token per embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.checkpoint.bind import bind
from onebox.checkpoint.source import open_checkpoint
from onebox.checkpoint.weights import read_weight
from onebox.model.load import raise_first
from onebox.model.reference import Weights, embed
from onebox.spec.errors import MismatchError, UnsupportedError
from onebox.spec.model import ModelSpec, VisionSpec
from onebox.spec.modules import ModuleClass

__all__ = ["Pixels", "Tower", "embeddings_for", "load_tower", "positions_for"]

_ROOT = "model.visual"
_PIECE_PATCHES = 16_384
"""Patches of a video that the tower computes at once; a frame is not divided."""


@dataclass(frozen=True)
class Pixels:
    """All images, or all videos, of one prompt, cut into patches.

    `patches` [P, in_channels * temporal_patch_size * patch_size²] holds one after the other; `grids` [n, 3] says how
    many each has in time, height and width, so P is the sum of their products.
    """

    patches: Tensor
    grids: Tensor


# The tower.


@dataclass(frozen=True)
class Tower:
    """The vision tower of transformers with a checkpoint's weights."""

    spec: VisionSpec
    model: Any

    def encode(self, pixels: Pixels) -> Tensor:
        """Embeddings [P / spatial_merge_size², H], float32: one for each square of merged patches, in their order."""
        merge = self.spec.spatial_merge_size
        expected = sum(t * height * width for t, height, width in pixels.grids.tolist())
        if len(pixels.patches) != expected:
            raise MismatchError(f"{len(pixels.patches)} patches came for grids of {expected}: give those of one call.")
        if pixels.grids[:, 1:].remainder(merge).any():
            raise MismatchError(f"A grid is not made of {merge} x {merge} squares: the processor's merge_size is off.")
        with torch.no_grad():
            return torch.cat([self._encode(piece) for piece in _pieces(pixels)])

    def _encode(self, pixels: Pixels) -> Tensor:
        out = self.model(pixels.patches.to(self.model.dtype), grid_thw=pixels.grids)
        merged: Tensor = out.pooler_output.to(torch.float32)
        return merged


def _pieces(pixels: Pixels) -> Iterator[Pixels]:
    """Each picture by itself, a long video by some of its frames, which do not attend to each other.

    So the memory does not grow with their number, and an image's embeddings do not depend on the others of its prompt.
    """
    first = 0
    for time, height, width in pixels.grids.tolist():
        most = max(1, _PIECE_PATCHES // (height * width))
        for start in range(0, time, most):
            count = min(most, time - start)
            end = first + count * height * width
            yield Pixels(pixels.patches[first:end], pixels.grids.new_tensor([[count, height, width]]))
            first = end


def load_tower(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - constant
) -> Tower:
    """The tower from the `model.visual.*` tensors in `directory`: all that config.json asks for and no other."""
    checkpoint = open_checkpoint(directory)
    vision = _vision(checkpoint.spec)
    if vision.out_hidden_size != checkpoint.spec.hidden_size:
        raise MismatchError(
            f"config.json: vision_config.out_hidden_size is {vision.out_hidden_size} and text_config.hidden_size is "
            f"{checkpoint.spec.hidden_size}; a tower writes into the text model's embeddings, so they must be equal."
        )
    binding = bind(checkpoint)
    # Text does without the tower, so the binding does not call its absence fatal; here it is.
    ours = [problem for problem in binding.problems if problem.tensor.startswith(_ROOT)]
    raise_first(directory, [problem.message for problem in ours if problem.is_fatal or problem.tensor == _ROOT])
    tensors = {
        bound.module.plain_tensor.removeprefix(f"{_ROOT}."): read_weight(bound).to(dtype)
        for bound in binding.of_class(ModuleClass.VISION)
    }
    return Tower(vision, _tower_model(vision, tensors).to(device))


def _tower_model(vision: VisionSpec, tensors: dict[str, Tensor]) -> Any:
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    config = Qwen3_5MoeVisionConfig(**vars(vision))
    with torch.device("meta"):
        model = Qwen3_5MoeVisionModel(config)
    try:
        model.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise MismatchError(f"The installed transformers has another vision tower than Qwen3.5's ({error}).") from None
    # Its frequencies are computed, not stored, so the meta device left them empty.
    model.rotary_pos_emb = type(model.rotary_pos_emb)(config)
    return model.eval()


# Placement in the prompt.


def embeddings_for(
    spec: ModelSpec, weights: Weights, token_ids: Tensor, images: Tensor | None = None, videos: Tensor | None = None
) -> Tensor:
    """Embeddings [T, H] of a prompt [T]: its pad tokens take the rows of `images` and `videos` (`encode`), in order."""
    embedded = embed(spec, weights, token_ids).clone()
    for name, pad, rows in (("image", spec.image_token_id, images), ("video", spec.video_token_id, videos)):
        places = token_ids == pad if pad is not None else torch.zeros_like(token_ids, dtype=torch.bool)
        num_places, num_rows = int(places.sum()), 0 if rows is None else len(rows)
        if num_places != num_rows:
            raise MismatchError(f"The prompt has {num_places} {name} pad tokens for {num_rows} {name} embeddings.")
        if rows is not None:
            embedded[places] = rows.to(embedded.dtype)
    return embedded


def positions_for(token_ids: Tensor, image_grids: Tensor | None, video_grids: Tensor | None, spec: ModelSpec) -> Tensor:
    """Positions [3, T] (time, height, width) of a prompt [T] whose pad tokens stand for grids [n, 3] of patches.

    Text counts on in all three rows. An image's token at (t, h, w) of its merged grid has the position of the image's
    start plus (t, h, w); what follows starts at the image's start plus the larger of height and width. A video is a
    row of images, one for each step in time, because its prompt writes a timestamp before each.
    """
    waiting = _grids_by_pad(image_grids, video_grids, spec)
    ids: list[int] = token_ids.tolist()
    pieces, start, index = [], 0, 0
    while index < len(ids):
        if ids[index] in waiting:
            time, height, width = _next_grid(waiting[ids[index]], ids, index)
            axes = torch.meshgrid(*(torch.arange(size) for size in (time, height, width)), indexing="ij")
            piece, step = torch.stack(axes).flatten(1), max(height, width)
        else:
            step = next((i for i, token in enumerate(ids[index:]) if token in waiting), len(ids) - index)
            piece = torch.arange(step).expand(3, -1)
        pieces.append(piece + start)
        start, index = start + step, index + piece.shape[1]
    if any(next(grids, None) for grids in waiting.values()):
        raise MismatchError("There are more images or videos than the prompt has places for.")
    return torch.cat(pieces, dim=1)


_Grid = tuple[int, int, int]


def _grids_by_pad(
    image_grids: Tensor | None, video_grids: Tensor | None, spec: ModelSpec
) -> dict[int | None, Iterator[_Grid]]:
    """For each pad token, the merged grids that its runs stand for, in order; a model without a tower has no pads."""
    if image_grids is None and video_grids is None and spec.vision is None:
        return {}
    merge = _vision(spec).spatial_merge_size
    images: list[list[int]] = [] if image_grids is None else image_grids.tolist()
    videos: list[list[int]] = [] if video_grids is None else video_grids.tolist()
    frames = [[1, height, width] for time, height, width in videos for _ in range(time)]
    return {
        pad: iter([(time, height // merge, width // merge) for time, height, width in grids])
        for pad, grids in ((spec.image_token_id, images), (spec.video_token_id, frames))
    }


def _next_grid(grids: Iterator[_Grid], ids: list[int], index: int) -> _Grid:
    grid = next(grids, None)
    if grid is None:
        raise MismatchError(f"The pad token at place {index} of the prompt belongs to no image or video that came.")
    count = grid[0] * grid[1] * grid[2]
    if ids[index : index + count] != [ids[index]] * count:
        raise MismatchError(f"The prompt has fewer than {count} pad tokens at place {index} for a grid of that many.")
    return grid


def _vision(spec: ModelSpec) -> VisionSpec:
    if spec.vision is None:
        raise UnsupportedError("config.json has no vision_config: this model reads text only; send no images.")
    return spec.vision
