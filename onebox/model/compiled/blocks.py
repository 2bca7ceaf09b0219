"""Matrices in the layout that compiled products read.

A block of columns is summed in registers along K, so it is stored in the order in which it is read, which a CPU
prefetches best:

    [K, N]    block 0: k 0: columns 0..31, k 1: columns 0..31, ...    block 1: k 0: columns 32..63, k 1: ...    ...

bfloat16 numbers of a block are stored in pairs, column i before column 16 + i: a pair is a word of 32 bits, and the
words shifted and the words masked are two vectors of float32. The remaining columns, fewer than a block, come last, one
after the other; nothing is padded.
"""

import torch
from torch import Tensor

from onebox.model.compiled.vectors import BLOCK_COLUMNS

__all__ = ["column_index", "to_blocks"]


def to_blocks(matrix: Tensor) -> Tensor:
    """[..., K * N] in blocks, of a matrix [..., K, N]."""
    *batch, inner, columns = matrix.shape
    out = matrix.new_empty(*batch, inner * columns)
    place = 0
    for block in torch.split(matrix, BLOCK_COLUMNS, dim=-1):
        if block.shape[-1] < BLOCK_COLUMNS:
            block = block.mT
        elif block.dtype is torch.bfloat16:
            block = block.reshape(*batch, inner, 2, -1).mT
        size = inner * min(BLOCK_COLUMNS, columns - place // inner)
        out[..., place : place + size].view(block.shape).copy_(block)
        place += size
    return out


def column_index(columns: Tensor, inner: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Where the numbers of some columns, int64 [n], of a matrix [inner, num_columns] are: int64 [n, inner]."""
    in_blocks = num_columns // BLOCK_COLUMNS * BLOCK_COLUMNS
    place = columns % BLOCK_COLUMNS
    if dtype is torch.bfloat16:
        place = place % (BLOCK_COLUMNS // 2) * 2 + place // (BLOCK_COLUMNS // 2)
    is_last = columns >= in_blocks
    first = torch.where(is_last, columns * inner, columns // BLOCK_COLUMNS * BLOCK_COLUMNS * inner + place)
    step = torch.where(is_last, 1, BLOCK_COLUMNS)
    return first[:, None] + step[:, None] * torch.arange(inner)
