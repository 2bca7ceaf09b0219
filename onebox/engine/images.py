"""A prompt's images and videos through the vision tower: embeddings, positions, and ids by content.

A picture's embeddings depend on its pixels alone, so those of pictures seen before are kept and not computed again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
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

__all__ = ["PictureCache", "content_tokens", "encode_images"]

_MAX_CACHE_BYTES = 256 << 20


class PictureCache:
    """Embeddings of the pictures encoded last, by their content, in host memory."""

    def __init__(self, max_bytes: int = _MAX_CACHE_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, digest: bytes) -> Tensor | None:
        rows = self._rows.get(digest)
        if rows is not None:
            self._rows.move_to_end(digest)
        return rows

    def put(self, digest: bytes, rows: Tensor) -> None:
        """Keeps `rows`; those not used for longest go until all fit."""
        if digest in self._rows or rows.nbytes > self._max_bytes:
            return
        self._rows[digest] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._rows.popitem(last=False)[1].nbytes


def encode_images(
    spec: ModelSpec, tower: Tower, prompt: tuple[int, ...], vision: Vision, device: torch.device, cache: PictureCache
) -> EncodedImages:
    """Embeddings, positions and content ids of a prompt's pad tokens; refuses pads and images that disagree."""
    cache_tokens = content_tokens(spec, tower, prompt, vision)
    token_ids = torch.tensor(prompt)
    positions = positions_for(token_ids, _grids(vision.images), _grids(vision.videos), spec)
    is_pad = torch.zeros(len(prompt), dtype=torch.bool)
    embeddings = torch.zeros(len(prompt), spec.hidden_size)
    for pad, pictures in _pictures_by_pad(spec, vision):
        places = token_ids == pad
        embeddings[places] = torch.cat([_encode(tower, each, device, cache) for each in _one_by_one(pictures)])
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


def _one_by_one(pictures: Pictures) -> Iterator[Pictures]:
    first = 0
    for grid in pictures.grids:
        count = prod(grid)
        yield Pictures(pictures.patches[first : first + count], (grid,))
        first += count


def _encode(tower: Tower, picture: Pictures, device: torch.device, cache: PictureCache) -> Tensor:
    """The embeddings of one picture, on the CPU."""
    digest = _digest(picture)
    rows = cache.get(digest)
    if rows is None:
        grids = torch.tensor(picture.grids, device=device)
        rows = tower.encode(Pixels(torch.from_numpy(picture.patches).to(device), grids)).cpu()
        cache.put(digest, rows)
    return rows


def _digest(picture: Pictures) -> bytes:
    content = np.ascontiguousarray(picture.patches).tobytes()
    return hashlib.sha256(repr(picture.grids[0]).encode() + content).digest()


def _content_ids(pictures: Pictures, merged: int) -> NDArray[np.int64]:
    """For each pad token a negative number derived from its picture's pixels; no token id is negative."""
    ids = [
        np.full(prod(each.grids[0]) // merged, -1 - int.from_bytes(_digest(each)[:7], "big"), dtype=np.int64)
        for each in _one_by_one(pictures)
    ]
    return np.concatenate(ids)
