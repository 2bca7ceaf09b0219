"""The language-model head: an INT8 matrix [V, K] in fragment order, fused with the choice among its V logits.

Logits are those of `onebox.kernels.int_linear.int8_linear` with K summed in one piece, and the three operations here
agree on them bit for bit. V is the length of the scales: the last tile's rows beyond it are padding and are never
chosen. Equal logits are ordered by token id, so the choice is a function of the row alone.

    planes int8 [R, 2, K], scale float32 [R, K/128]        rows from `fixed_point`, R <= 64
    weight uint8 [K/128, ceil(V/16), 2048]                 weight_scale [V]
"""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["greedy_head", "logits_head", "top_k_head"]


def logits_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """All logits, float32 [R, V]."""
    result: Tensor = implementation(__name__, planes).logits_head(planes, scale, weight, weight_scale)
    return result


def greedy_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(token int64 [R], logit float32 [R]): the largest logit, the lowest id among equals; logits are not stored."""
    chosen = implementation(__name__, planes)
    result: tuple[Tensor, Tensor] = chosen.greedy_head(planes, scale, weight, weight_scale)
    return result


def top_k_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [R, k], logits float32 [R, k]), largest first, the lower id first among equals; k <= min(V, 64)."""
    chosen = implementation(__name__, planes)
    result: tuple[Tensor, Tensor] = chosen.top_k_head(planes, scale, weight, weight_scale, k)
    return result
