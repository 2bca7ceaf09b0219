"""Taps: copies of the residual stream behind some layers, which a block drafter reads.

A stack without taps computes and stores nothing for them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Taps", "features_of"]


class Taps:
    """Collects the stream behind the layers `layer_ids` in one pass."""

    def __init__(self, layer_ids: tuple[int, ...]) -> None:
        self._layer_ids = layer_ids
        self._wanted = frozenset(layer_ids)
        self._found: dict[int, tuple[Tensor, ...]] = {}

    def wants(self, layer_id: int) -> bool:
        return layer_id in self._wanted

    def put(self, layer_id: int, *parts: Tensor) -> None:
        """The stream behind a layer, as the sum of parts [R, H], of all layers alike. Nobody may write them later."""
        self._found[layer_id] = parts

    def parts(self) -> tuple[Tensor, ...]:
        """[R, H] each: the first part behind every layer, in the order of `layer_ids`, then the second ones."""
        found = [self._found[layer_id] for layer_id in self._layer_ids]
        return tuple(part for alike in zip(*found, strict=True) for part in alike)

    def features(self, dtype: torch.dtype) -> Tensor:
        """[R, taps * H] of `dtype`: side by side in the order of `layer_ids`."""
        return features_of(self.parts(), len(self._layer_ids), dtype)


def features_of(parts: Sequence[Tensor], num_taps: int, dtype: torch.dtype) -> Tensor:
    """[R, taps * H] of `dtype`, from the parts of so many taps as `Taps.parts` has them."""
    features = torch.cat([*parts[:num_taps]], dim=-1)
    for first in range(num_taps, len(parts), num_taps):
        features = features + torch.cat([*parts[first : first + num_taps]], dim=-1)
    return features.to(dtype)
