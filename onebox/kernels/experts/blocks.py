"""The pairs of a prefill in blocks of one expert each, for all prefill kernels of routed experts.

A pair is a token and one of its k expert slots. Each expert's pairs, in their order, are cut into blocks. How many
pairs a block has decides which pairs are multiplied together, never a pair's result. Pairs of rows without a sequence
(expert -1) are in no block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import loop_bound
from onebox.kernels.common.launch import next_power_of_2

__all__ = ["BLOCK_M", "Blocks", "block_pairs", "block_size", "group_by_expert", "prefill_workspace"]

BLOCK_M = 64  # pairs in a block at most
_MEAN_PAIRS = {16: 24, 32: 96}
"""Pairs of an expert, in the mean, up to which blocks of each size are the fastest on an H200."""
_TILE = 1024
"""Pairs that a program looks at together."""


class Blocks(NamedTuple):
    """The pairs and the expert of each block, on the device: the number of blocks is known only there."""

    pairs: Tensor  # int32 [blocks * size]: -1 for unused places of an expert's last block; unset in unused blocks
    expert: Tensor  # int64 [blocks]: E for unused blocks


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(
    ids_ptr,  # int32 [pairs]
    counts_ptr,  # int32 [E]
    num_pairs,
    TILE: tl.constexpr,
):
    """Program e counts the pairs of expert e."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    found = tl.zeros((TILE,), tl.int32)
    for start in range(0, loop_bound(num_pairs), TILE):
        pairs = start + lanes
        found += (tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_pairs_kernel(
    ids_ptr,  # int32 [pairs]
    counts_ptr,  # int32 [E]
    pairs_ptr,  # int32 [blocks * BLOCK_M]
    expert_ptr,  # int64 [blocks]
    num_pairs,
    num_blocks,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,  # E rounded up to a power of two
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program e writes the blocks of expert e; program E marks the unused blocks."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, blocks, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    end = tl.where(expert == E, num_blocks, first + (count + BLOCK_M - 1) // BLOCK_M)
    lanes = tl.arange(0, TILE)
    for start in range(loop_bound(first), loop_bound(end), TILE):
        tl.store(expert_ptr + start + lanes, expert, mask=start + lanes < end)
    if expert < E:
        own_ptr = pairs_ptr + first * BLOCK_M
        places = tl.arange(0, BLOCK_M)
        unused = count // BLOCK_M * BLOCK_M + places
        tl.store(own_ptr + unused, -1, mask=(unused >= count) & (unused < (end - first) * BLOCK_M))
        rank = tl.full([], 0, tl.int32)
        # An expert without pairs has nothing to look for.
        for start in range(0, loop_bound(tl.where(count > 0, num_pairs, 0)), TILE):
            pairs = start + lanes
            is_own = (tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
            at = rank + tl.cumsum(is_own, 0) - 1
            tl.store(own_ptr + at, pairs, mask=is_own > 0)
            rank += tl.sum(is_own, 0)


def block_size(num_pairs: int, experts: int) -> int:
    """Pairs in a block, so that most experts have one: places without a pair are multiplied too."""
    for size, most in _MEAN_PAIRS.items():
        if num_pairs <= most * experts:
            return size
    return BLOCK_M


def group_by_expert(ids: Tensor, experts: int, size: int = BLOCK_M) -> Blocks:
    """Cuts the pairs of ids int32 [T, k] into blocks of one expert and up to `size` pairs each."""
    num_pairs = ids.numel()
    num_blocks = num_pairs // size + min(experts, num_pairs)  # the full ones, plus a partial one per expert
    counts, pairs = (ids.new_empty(length, dtype=torch.int32) for length in (experts, num_blocks * size))
    expert = ids.new_empty(num_blocks, dtype=torch.int64)
    count_pairs_kernel[(experts,)](ids, counts, num_pairs, TILE=_TILE, num_warps=4)
    place_pairs_kernel[(experts + 1,)](
        ids,
        counts,
        pairs,
        expert,
        num_pairs,
        num_blocks,
        E=experts,
        EXPERTS=next_power_of_2(experts),
        BLOCK_M=size,
        TILE=_TILE,
        num_warps=4,
    )
    return Blocks(pairs, expert)


@triton.jit
def block_pairs(pairs_ptr, block, BLOCK_M: tl.constexpr):
    """(pairs int64 [BLOCK_M] of the block, 0 for unused places; which places are used)."""
    found = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    return tl.maximum(found, 0), found >= 0


def prefill_workspace(ids: Tensor, inner_size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(inner values bfloat16 [T * k, I], weighted outputs float32 [T, k, H])."""
    inner = torch.empty((ids.numel(), inner_size), dtype=torch.bfloat16, device=ids.device)
    return inner, torch.empty((*ids.shape, hidden), dtype=torch.float32, device=ids.device)
