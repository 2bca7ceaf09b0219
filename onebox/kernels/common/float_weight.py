"""A stored FP8, NVFP4 or BF16 weight as an argument of operations."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["SCALE_BLOCK", "FloatWeight"]

SCALE_BLOCK = 128
"""Rows and columns of a weight that share a scale in the block format."""


class FloatWeight(NamedTuple):
    """A weight [N, K] in one of five formats."""

    kind: str
    """"block", "row_block", "row", "nvfp4" or "bf16"."""
    codes: Tensor
    """FP8 codes uint8 [N, K], NVFP4 codes uint8 [N, K/2] (two per byte), or bfloat16 [N, K]."""
    scale: Tensor | None
    """FP8 blocks [ceil(N/128), ceil(K/128)], rows of these [N, ceil(K/128)], FP8 rows [N] or [1],
    NVFP4 scales as E4M3 codes uint8 [N, K/16]."""
    multiplier: Tensor | None = None
    """float32 [1], NVFP4 only."""
