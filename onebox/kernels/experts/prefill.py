"""The routed experts in Triton, for the many tokens of a prefill.

Token-slots (pairs) are sorted by expert, and each expert's are cut into blocks of 64. A block is one operand of an MMA,
its expert's weights the other; the number of blocks depends on the tokens, the shape of one never does, and what an MMA
computes of one pair does not see the others: a token's bits are its own.

INT4 weights are read from the tiles that decoding reads, as the left operand (`common/int_tiles.py`). Codes are exact
in bfloat16, so each group's dot is taken with the codes and scaled in float32: no weight is rounded on the way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import dot_bf16, rounded, swiglu
from onebox.kernels.common.int_tiles import WORDS, in_tile_order, sum_tiles, tile_order_64
from onebox.kernels.common.target import has_large_shared_memory
from onebox.kernels.experts.slots import sum_slots

__all__ = ["BLOCK_M", "block_pairs", "group_by_expert", "prefill_experts", "prefill_experts_bf16"]

BLOCK_M = 64  # pairs in a block
GATE_UP_TILES = 8  # tiles of 16 weight rows a program takes: gate and up of 64 inner values, half a group
DOWN_TILES = 4  # small programs, so that several share a multiprocessor and one multiplies while another stores
GROUP = tl.constexpr(128)
TILE_WORDS = tl.constexpr(256)


class Blocks(NamedTuple):
    """Which pairs each block works for. All on the device: their number is known there only."""

    pairs: Tensor  # int64 [blocks * BLOCK_M]: -1 where an expert's last block has room left
    expert: Tensor  # int64 [blocks]: E for blocks that are not needed


def group_by_expert(ids: Tensor, experts: int) -> Blocks:
    """Cuts the pairs of ids [T, k] into blocks of one expert each."""
    pairs = ids.numel()
    ranked, order = ids.flatten().sort(stable=True)
    first = torch.searchsorted(ranked, torch.arange(experts + 1, dtype=ids.dtype, device=ids.device))
    counts = (first.diff() + BLOCK_M - 1) // BLOCK_M
    ends = counts.cumsum(0)
    most = pairs // BLOCK_M + min(experts, pairs)  # a full block for each 64 pairs, a part of one for each expert
    expert = torch.searchsorted(ends, torch.arange(most, device=ids.device), right=True)
    # From a pair's rank to its place: as far behind its expert's first block as it is behind the expert's first pair.
    places = ((ends - counts) * BLOCK_M - first[:-1])[ranked.to(torch.int64)] + torch.arange(pairs, device=ids.device)
    table = torch.full((most * BLOCK_M,), -1, dtype=torch.int64, device=ids.device)
    return Blocks(table.scatter_(0, places, order), expert)


@triton.jit
def block_pairs(pairs_ptr, block, BLOCK_M: tl.constexpr):
    """(pairs int64 [BLOCK_M] of the block, 0 where there is none; which of them there are)."""
    found = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    return tl.maximum(found, 0), found >= 0


@triton.jit
def _tile_sums(
    x_ptrs,  # [128, BLOCK_M]
    tiles_ptr,  # the expert's: int32 [tiles, GROUPS, TILE_WORDS]; TILES divides their number
    scale_ptr,  # the expert's: [tiles, GROUPS, 16]
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
):
    """float32 [TILES * 16, BLOCK_M]: the program's rows of the expert's matrix times the block's pairs."""
    first = tl.program_id(0) * TILES
    tile = first + tl.arange(0, TILES)
    row = tl.arange(0, TILES * 16)
    return sum_tiles(
        x_ptrs,
        tiles_ptr + tile[:, None] * (GROUPS * TILE_WORDS) + tl.arange(0, WORDS)[None, :],
        TILE_WORDS,
        scale_ptr + (first + row // 16) * (GROUPS * 16) + row % 16,
        16,
        GROUPS,
        4,
    )


@triton.jit
def experts_prefill_gate_up_kernel(
    x_ptr,  # bfloat16 [T, GROUPS * 128], in tile order
    tiles_ptr,  # int32 [E, num_tiles, GROUPS, TILE_WORDS]
    scale_ptr,  # [E, num_tiles, GROUPS, 16]
    inner_ptr,  # bfloat16 [T * SLOTS, num_tiles * 8], in tile order
    pairs_ptr,
    expert_ptr,
    num_tiles,
    num_experts,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, block, BLOCK_M)
    total = _tile_sums(
        x_ptr + (pair // SLOTS)[None, :] * (GROUPS * GROUP) + tl.arange(0, 128)[:, None],
        tiles_ptr + expert * num_tiles * (GROUPS * TILE_WORDS),
        scale_ptr + expert * num_tiles * (GROUPS * 16),
        GROUPS,
        TILES,
    )
    by_tile = tl.permute(tl.reshape(total, (TILES, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(by_tile, (TILES * 8, BLOCK_M, 2)))
    inner = tile_order_64(rounded(swiglu(gate, up), tl.bfloat16))
    column = tl.program_id(0) * (TILES * 8) + tl.arange(0, TILES * 8)
    tl.store(inner_ptr + pair[None, :] * (num_tiles * 8) + column[:, None], inner, mask=used[None, :])


@triton.jit
def experts_prefill_down_kernel(
    inner_ptr,  # bfloat16 [P, GROUPS * 128], in tile order
    weights_ptr,  # float32 [P]
    tiles_ptr,  # int32 [E, num_tiles, GROUPS, TILE_WORDS]
    scale_ptr,  # [E, num_tiles, GROUPS, 16]
    slots_ptr,  # float32 [P, num_tiles * 16]
    pairs_ptr,
    expert_ptr,
    num_tiles,
    num_experts,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, block, BLOCK_M)
    weight = tl.load(weights_ptr + pair)  # before the sums: a number a pair is less to keep than its address
    total = _tile_sums(
        inner_ptr + pair[None, :] * (GROUPS * GROUP) + tl.arange(0, 128)[:, None],
        tiles_ptr + expert * num_tiles * (GROUPS * TILE_WORDS),
        scale_ptr + expert * num_tiles * (GROUPS * 16),
        GROUPS,
        TILES,
    )
    column = tl.program_id(0) * (TILES * 16) + tl.arange(0, TILES * 16)
    at = slots_ptr + pair[None, :] * (num_tiles * 16) + column[:, None]
    tl.store(at, total * weight[None, :], mask=used[None, :])


@triton.jit
def experts_prefill_gate_up_bf16_kernel(
    x_ptr,  # bfloat16 [T, H]
    gate_up_ptr,  # bfloat16 [E, 2I, H]
    inner_ptr,  # bfloat16 [T * SLOTS, I]
    pairs_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, block, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pair // SLOTS)[:, None] * H + k[None, :]
    gate_ptrs = gate_up_ptr + expert * (2 * I * H) + n[None, :] * H + k[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_K):
        inside = (start + k < H)[:, None] & (n < I)[None, :]
        x = tl.load(x_ptrs + start, mask=used[:, None] & (start + k < H)[None, :], other=0.0)
        gate = dot_bf16(x, tl.load(gate_ptrs + start, mask=inside, other=0.0), gate)
        up = dot_bf16(x, tl.load(gate_ptrs + I * H + start, mask=inside, other=0.0), up)
    tl.store(
        inner_ptr + pair[:, None] * I + n[None, :],
        rounded(swiglu(gate, up), tl.bfloat16),
        mask=used[:, None] & (n < I)[None, :],
    )


@triton.jit
def experts_prefill_down_bf16_kernel(
    inner_ptr,  # bfloat16 [P, I]
    weights_ptr,  # float32 [P]
    down_ptr,  # bfloat16 [E, H, I]
    slots_ptr,  # float32 [P, H]
    pairs_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, block, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inner_ptrs = inner_ptr + pair[:, None] * I + k[None, :]
    down_ptrs = down_ptr + expert * (H * I) + n[None, :] * I + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, I, BLOCK_K):
        inside = (start + k < I)[:, None] & (n < H)[None, :]
        inner = tl.load(inner_ptrs + start, mask=used[:, None] & (start + k < I)[None, :], other=0.0)
        total = dot_bf16(inner, tl.load(down_ptrs + start, mask=inside, other=0.0), total)
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0)
    tl.store(
        slots_ptr + pair[:, None] * H + n[None, :],
        total * weight[:, None],
        mask=used[:, None] & (n < H)[None, :],
    )


def prefill_experts(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    experts, inner_tiles, hidden_groups = gate_up.shape[:3]
    hidden_tiles, inner_groups = down.shape[1:3]
    blocks = group_by_expert(ids, experts)
    inner, slots = _workspace(ids, inner_tiles * 8, hidden_tiles * 16)
    shape = {"BLOCK_M": BLOCK_M, "num_stages": 3}
    if has_large_shared_memory():
        shape["maxnreg"] = 128  # so that two programs share a multiprocessor: one multiplies while the other stores
    experts_prefill_gate_up_kernel[(inner_tiles // GATE_UP_TILES, len(blocks.expert))](
        in_tile_order(x),
        gate_up.view(torch.int32),
        gate_up_scale,
        inner,
        *blocks,
        inner_tiles,
        experts,
        GROUPS=hidden_groups,
        SLOTS=ids.shape[1],
        TILES=GATE_UP_TILES,
        num_warps=8,
        **shape,
    )
    experts_prefill_down_kernel[(hidden_tiles // DOWN_TILES, len(blocks.expert))](
        inner,
        weights,
        down.view(torch.int32),
        down_scale,
        slots,
        *blocks,
        hidden_tiles,
        experts,
        GROUPS=inner_groups,
        TILES=DOWN_TILES,
        num_warps=4,
        **shape,
    )
    return sum_slots(slots, x.dtype)


def prefill_experts_bf16(x, ids, weights, gate_up, down):
    experts, hidden, inner_size = down.shape
    blocks = group_by_expert(ids, experts)
    inner, slots = _workspace(ids, inner_size, hidden)
    shape = {"BLOCK_M": BLOCK_M, "BLOCK_K": 64, "num_warps": 4}
    experts_prefill_gate_up_bf16_kernel[(triton.cdiv(inner_size, 64), len(blocks.expert))](
        x, gate_up, inner, *blocks, experts, H=hidden, I=inner_size, SLOTS=ids.shape[1], BLOCK_N=64, **shape
    )
    experts_prefill_down_bf16_kernel[(triton.cdiv(hidden, 128), len(blocks.expert))](
        inner, weights, down, slots, *blocks, experts, H=hidden, I=inner_size, BLOCK_N=128, **shape
    )
    return sum_slots(slots, x.dtype)


def _workspace(ids: Tensor, inner_size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(inner values bfloat16 [T * k, I], weighted outputs float32 [T, k, H])."""
    inner = torch.empty((ids.numel(), inner_size), dtype=torch.bfloat16, device=ids.device)
    return inner, torch.empty((*ids.shape, hidden), dtype=torch.float32, device=ids.device)
