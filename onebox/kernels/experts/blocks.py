"""The pairs of a prefill in blocks of one expert each, for all prefill kernels of routed experts.

A pair is a token and one of its k expert slots. Pairs are sorted by expert and each expert's pairs are cut into blocks
of 64. The number of blocks depends on the tokens, the shape of a block does not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["BLOCK_M", "block_pairs", "group_by_expert", "prefill_workspace"]

BLOCK_M = 64  # pairs in a block


class Blocks(NamedTuple):
    """The pairs and the expert of each block, on the device: the number of blocks is known only there."""

    pairs: Tensor  # int64 [blocks * BLOCK_M]: -1 for unused places of an expert's last block
    expert: Tensor  # int64 [blocks]: E for unused blocks


def group_by_expert(ids: Tensor, experts: int) -> Blocks:
    """Cuts the pairs of ids [T, k] into blocks of one expert each."""
    pairs = ids.numel()
    ranked, order = ids.flatten().sort(stable=True)
    first = torch.searchsorted(ranked, torch.arange(experts + 1, dtype=ids.dtype, device=ids.device))
    counts = (first.diff() + BLOCK_M - 1) // BLOCK_M
    ends = counts.cumsum(0)
    most = pairs // BLOCK_M + min(experts, pairs)  # one block per 64 pairs, plus a partial one per expert
    expert = torch.searchsorted(ends, torch.arange(most, device=ids.device), right=True)
    # A pair's offset from its expert's first block equals its rank among the expert's pairs.
    places = ((ends - counts) * BLOCK_M - first[:-1])[ranked.to(torch.int64)] + torch.arange(pairs, device=ids.device)
    table = torch.full((most * BLOCK_M,), -1, dtype=torch.int64, device=ids.device)
    return Blocks(table.scatter_(0, places, order), expert)


@triton.jit
def block_pairs(pairs_ptr, block, BLOCK_M: tl.constexpr):
    """(pairs int64 [BLOCK_M] of the block, 0 for unused places; which places are used)."""
    found = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    return tl.maximum(found, 0), found >= 0


def prefill_workspace(ids: Tensor, inner_size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(inner values bfloat16 [T * k, I], weighted outputs float32 [T, k, H])."""
    inner = torch.empty((ids.numel(), inner_size), dtype=torch.bfloat16, device=ids.device)
    return inner, torch.empty((*ids.shape, hidden), dtype=torch.float32, device=ids.device)
