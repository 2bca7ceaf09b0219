"""Tile sizes and the split of K of the float linears of a decode step, for the kernels and the twins."""

from typing import NamedTuple

import torch
from torch import Tensor

from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.launch import next_power_of_2

__all__ = ["PART_BLOCK", "Tile", "decode_tile", "num_parts"]

PART_BLOCK = 128
"""The columns of a part are a multiple of this."""
_WANTED_PROGRAMS = 1536


class Tile(NamedTuple):
    """Tile sizes of a launch. The first three fix the order of summation and never depend on the rows."""

    block_n: int
    block_k: int
    split: int
    block_r: int
    num_warps: int
    num_stages: int


def decode_tile(x: Tensor, n: int, kind: str) -> Tile:
    """Narrow tiles, and a split of K where the output columns alone would not saturate the GPU's memory."""
    block_n = 32  # with two warps: `mma.sync` on every GPU, the same instructions for 8 rows and for 64
    block_k = 256 if kind == "nvfp4" else 128  # 128 or 256 bytes of a weight row
    if x.dtype == torch.float32:
        block_k //= 2  # saves registers for the three terms of 64 rows
    steps, columns = -(-x.shape[1] // block_k), -(-n // block_n)
    split = max(parts for parts in range(1, steps + 1) if parts == 1 or _is_good_split(parts, steps, columns))
    block_r = min(64, max(8, next_power_of_2(x.shape[0])))
    return Tile(block_n, block_k, split, block_r, num_warps=2, num_stages=4 if block_r <= 16 else 3)


def _is_good_split(parts: int, steps: int, columns: int) -> bool:
    return steps % parts == 0 and steps // parts >= 2 and columns * parts <= 512


def num_parts(width: int, weight: FloatWeight) -> int:
    """Number of equal parts of K = `width` in `float_parts`: a constant of the weight's shape, enough to fill a GPU."""
    blocks, tiles = width // PART_BLOCK, -(-len(weight.codes) // 16)
    # A part's weights are all in registers at once and its instructions are unrolled: the more of them, the longer
    # their fetch takes. A part of fewer than two blocks is not worth a program or the addition of its partial sum.
    least, most = 2, 4 if weight.kind == "bf16" else 8
    parts = [count for count in range(1, blocks + 1) if blocks % count == 0]
    fewest = min(count for count in parts if blocks // count <= most)
    fitting = [count for count in parts if blocks // count >= least and count <= -(-_WANTED_PROGRAMS // tiles)]
    return max([fewest, *fitting])
