"""A prompt's images and videos through the vision tower: embeddings, positions, and ids by content."""

import hashlib
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.request import Pictures, Vision
from onebox.engine.step import EncodedImages
from onebox.model.vision import Pixels, Tower, positions_for
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec

__all__ = ["content_tokens", "encode_images"]


def encode_images(
    spec: ModelSpec, tower: Tower, prompt: tuple[int, ...], vision: Vision, device: torch.device
) -> EncodedImages:
    """Embeddings, positions and content ids of a prompt's pad tokens; refuses pads and images that disagree."""
    cache_tokens = content_tokens(spec, tower, prompt, vision)
    token_ids = torch.tensor(prompt)
    positions = positions_for(token_ids, _grids(vision.images), _grids(vision.videos), spec)
    is_pad = torch.zeros(len(prompt), dtype=torch.bool)
    embeddings = torch.zeros(len(prompt), spec.hidden_size)
    for pad, pictures in _pictures_by_pad(spec, vision):
        places = token_ids == pad
        rows = tower.encode(Pixels(torch.from_numpy(pictures.patches).to(device), _grid_tensor(pictures, device)))
        embeddings[places] = rows.cpu()
        is_pad |= places
    return EncodedImages(
        positions=positions.numpy(),
        next_position=int(positions.max()) + 1,
        cache_tokens=cache_tokens,
        places=is_pad.nonzero()[:, 0].numpy(),
        embeddings=embeddings[is_pad].to(device),
    )


def content_tokens(spec: ModelSpec, tower: Tower, prompt: tuple[int, ...], vision: Vision) -> tuple[int, ...]:
    """The prompt with its pad tokens replaced by ids of the image content; the tower computes nothing for it."""
    tokens = np.array(prompt, dtype=np.int64)
    for pad, pictures in _pictures_by_pad(spec, vision):
        places = tokens == pad
        ids = _content_ids(pictures, tower.spec.spatial_merge_size**2)
        if int(places.sum()) != len(ids):
            raise MismatchError(f"The prompt has {int(places.sum())} pad tokens for {len(ids)} embeddings.")
        tokens[places] = ids
    return tuple(tokens.tolist())


def _pictures_by_pad(spec: ModelSpec, vision: Vision) -> list[tuple[int, Pictures]]:
    given = ((spec.image_token_id, vision.images), (spec.video_token_id, vision.videos))
    return [(pad, pictures) for pad, pictures in given if pictures and pad is not None]


def _grids(pictures: Pictures | None) -> Tensor | None:
    return None if pictures is None else torch.tensor(pictures.grids)


def _grid_tensor(pictures: Pictures, device: torch.device) -> Tensor:
    return torch.tensor(pictures.grids, device=device)


def _content_ids(pictures: Pictures, merged: int) -> NDArray[np.int64]:
    """For each pad token a negative number derived from its picture's pixels; no token id is negative."""
    ids: list[NDArray[np.int64]] = []
    first = 0
    for grid in pictures.grids:
        count = prod(grid)
        content = np.ascontiguousarray(pictures.patches[first : first + count]).tobytes()
        digest = hashlib.sha256(repr(grid).encode() + content).digest()
        ids.append(np.full(count // merged, -1 - int.from_bytes(digest[:7], "big"), dtype=np.int64))
        first += count
    return np.concatenate(ids)
