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
        self._found: dict[int, Tensor] = {}

    def wants(self, layer_id: int) -> bool:
        return layer_id in self._wanted

    def put(self, layer_id: int, stream: Tensor) -> None:
        """The stream behind a layer, float32 [R, H] or rounded already; it must not be written afterwards."""
        self._found[layer_id] = stream

    def features(self, dtype: torch.dtype) -> Tensor:
        """[R, taps * H] of `dtype`: side by side in the order of `layer_ids`."""
        return torch.cat([self._found[layer_id] for layer_id in self._layer_ids], dim=-1).to(dtype)
