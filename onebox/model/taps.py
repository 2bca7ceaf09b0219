"""Taps: copies of the residual stream behind some layers, which a block drafter reads.

A stack without taps computes and stores nothing for them.
"""

import torch
from torch import Tensor

__all__ = ["Taps"]


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

    def features(self, dtype: torch.dtype) -> Tensor:
        """[R, taps * H] of `dtype`: side by side in the order of `layer_ids`."""
        first, *others = zip(*(self._found[layer_id] for layer_id in self._layer_ids), strict=True)
        features = torch.cat(first, dim=-1)
        for parts in others:
            features = features + torch.cat(parts, dim=-1)
        return features.to(dtype)
