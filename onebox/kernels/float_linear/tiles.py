"""How the float linears of a decode step divide their work, for the kernels and for the twins that cut as they do."""

from typing import NamedTuple

import torch
from torch import Tensor

from onebox.kernels.common.float_weight import FloatWeight

__all__ = ["PART_BLOCK", "Tile", "decode_tile", "num_parts"]

PART_BLOCK = 128
"""Columns that a part of K is made of."""
_WANTED_PROGRAMS = 1536


class Tile(NamedTuple):
    """How a launch divides its work. The first three fix the order of summation and never depend on the rows."""

    block_n: int
    block_k: int
    split: int
    block_r: int
    num_warps: int
    num_stages: int


def decode_tile(x: Tensor, n: int, kind: str) -> Tile:
    """Narrow tiles, and a split of K wherever the output columns alone would leave the GPU's memory idle."""
    block_n = 32  # with two warps: `mma.sync` on every GPU, the same instructions for 8 rows and for 64
    block_k = 256 if kind == "nvfp4" else 128  # 128 or 256 bytes of a weight row
    if x.dtype == torch.float32:
        block_k //= 2  # registers for the three parts of 64 rows
    steps, columns = -(-x.shape[1] // block_k), -(-n // block_n)
    split = max(parts for parts in range(1, steps + 1) if parts == 1 or _is_good_split(parts, steps, columns))
    block_r = max(8, 1 << (x.shape[0] - 1).bit_length()) if x.shape[0] else 8
    return Tile(block_n, block_k, split, block_r, num_warps=2, num_stages=4 if block_r <= 16 else 3)


def _is_good_split(parts: int, steps: int, columns: int) -> bool:
    return steps % parts == 0 and steps // parts >= 2 and columns * parts <= 512


def num_parts(width: int, weight: FloatWeight) -> int:
    """Equal parts of K = `width` for `float_parts`: a constant of the weight's shape, so many that a GPU is busy."""
    blocks, tiles = width // PART_BLOCK, -(-len(weight.codes) // 16)
    # A part's weights are in registers all at once, and its instructions are written out: the more, the longer they
    # take to fetch. A block less than two is not worth a program, nor the addition of its part.
    least, most = 2, 4 if weight.kind == "bf16" else 8
    parts = [count for count in range(1, blocks + 1) if blocks % count == 0]
    fewest = min(count for count in parts if blocks // count <= most)
    fitting = [count for count in parts if blocks // count >= least and count <= -(-_WANTED_PROGRAMS // tiles)]
    return max([fewest, *fitting])
