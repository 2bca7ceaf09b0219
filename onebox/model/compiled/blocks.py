"""Matrices in the layout that compiled products read.

A block of columns is summed in registers along K, so it lies in memory as it is read, from its first byte to its last,
which a CPU fetches ahead best:

    [K, N]    block 0: k 0: columns 0..31, k 1: columns 0..31, ...    block 1: k 0: columns 32..63, k 1: ...    ...

The last block has the columns that are left; nothing is padded.
"""

import torch
from torch import Tensor

__all__ = ["BLOCK_COLUMNS", "to_blocks"]

BLOCK_COLUMNS = 32
"""A cache line of bfloat16 numbers."""


def to_blocks(matrix: Tensor) -> Tensor:
    """[..., K * N] in blocks, of a matrix [..., K, N]."""
    *batch, inner, columns = matrix.shape
    out = matrix.new_empty(*batch, inner * columns)
    place = 0
    for block in torch.split(matrix, BLOCK_COLUMNS, dim=-1):
        size = inner * block.shape[-1]
        out[..., place : place + size].view(block.shape).copy_(block)
        place += size
    return out
