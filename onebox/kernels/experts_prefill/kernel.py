"""The routed experts in Triton, for the many tokens of a prefill.

Token-slots (pairs) are sorted by expert, and each expert's are cut into blocks of 64. A block is one operand of an MMA,
its expert's weights the other; the number of blocks depends on the tokens, the shape of one never does, and a row of an
MMA does not see the other rows: a token's bits are its own.

INT4 weights are read from the tiles that decoding reads. Codes are exact in bfloat16, so each group's dot is taken with
the codes and scaled in float32: nothing is rounded on the way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.experts.kernel import dot_bf16, sum_slots, swiglu, to_bf16

__all__ = ["BLOCK_M", "block_pairs", "group_by_expert", "prefill_experts", "prefill_experts_bf16"]

BLOCK_M = 64  # pairs in a block
TILES = 4  # tiles of 16 weight rows a program takes; 8 spill registers on sm_121
GROUP = tl.constexpr(128)
TILE_BYTES = tl.constexpr(1024)


class Blocks(NamedTuple):
    """Which pairs each block works for. All on the device: their number is known there only."""

    order: Tensor  # int64 [P]: pairs sorted by expert
    first: Tensor  # int64 [E + 1]: where each expert's pairs begin in `order`
    last_block: Tensor  # int64 [E]: the block after an expert's last
    expert: Tensor  # int64 [blocks]: E for blocks that are not needed


def group_by_expert(ids: Tensor, experts: int) -> Blocks:
    """Cuts the pairs of ids [T, k] into blocks of one expert each."""
    pairs = ids.numel()
    ranked, order = ids.flatten().sort(stable=True)
    first = torch.searchsorted(ranked, torch.arange(experts + 1, dtype=ids.dtype, device=ids.device))
    last_block = ((first.diff() + BLOCK_M - 1) // BLOCK_M).cumsum(0)
    most = pairs // BLOCK_M + min(experts, pairs)  # a full block for each 64 pairs, a part of one for each expert
    expert = torch.searchsorted(last_block, torch.arange(most, device=ids.device), right=True)
    return Blocks(order, first, last_block, expert)


@triton.jit
def block_pairs(order_ptr, first_ptr, last_block_ptr, block, expert, BLOCK_M: tl.constexpr):
    """(pairs int64 [BLOCK_M] of the block, which of them there are)."""
    before = tl.load(last_block_ptr + expert - 1, mask=expert > 0, other=0)
    position = tl.load(first_ptr + expert) + (block - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    used = position < tl.load(first_ptr + expert + 1)
    return tl.load(order_ptr + position, mask=used, other=0), used


@triton.jit
def _as_operand(half, TILES: tl.constexpr, INTERPRETED: tl.constexpr):
    """int8 codes [TILES, 1024] of half a group, in fragment order, to bfloat16 [64, TILES * 16]."""
    split = tl.reshape(half, (TILES, 2, 8, 4, 2, 2, 4))  # n kt g t k16 r8 k4
    codes = tl.reshape(tl.permute(split, (3, 1, 4, 6, 0, 5, 2)), (64, TILES * 16))  # t kt k16 k4 | n r8 g
    if INTERPRETED:  # it cannot make a bfloat16 of an integer
        return codes.to(tl.float32).to(tl.bfloat16)
    else:
        return codes.to(tl.bfloat16)


@triton.jit
def _dot_with_tiles(
    x_ptrs,  # [BLOCK_M, 64]
    used,
    tiles_ptr,  # the expert's: uint8 [tiles, GROUPS, 1024]
    scale_ptr,  # the expert's: [tiles, GROUPS, 16]
    tile,  # [TILES]
    num_tiles,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """float32 [BLOCK_M, TILES * 16], group after group."""
    there = (tile < num_tiles)[:, None]
    byte_ptrs = tiles_ptr + tile[:, None] * (GROUPS * TILE_BYTES) + tl.arange(0, TILE_BYTES)[None, :]
    scale_ptrs = scale_ptr + tile[:, None] * (GROUPS * 16) + tl.arange(0, 16)[None, :]
    total = tl.zeros((BLOCK_M, TILES * 16), tl.float32)
    for group in range(GROUPS):
        packed = tl.load(byte_ptrs + group * TILE_BYTES, mask=there, other=0).to(tl.int8, bitcast=True)
        first = tl.load(x_ptrs + group * GROUP, mask=used[:, None], other=0.0)
        second = tl.load(x_ptrs + group * GROUP + 64, mask=used[:, None], other=0.0)
        dots = tl.zeros((BLOCK_M, TILES * 16), tl.float32)
        # Shifting a signed byte right copies its sign; the low nibble is first moved up to where the sign is.
        dots = dot_bf16(first, _as_operand((packed << 4) >> 4, TILES, INTERPRETED), dots, INTERPRETED)
        dots = dot_bf16(second, _as_operand(packed >> 4, TILES, INTERPRETED), dots, INTERPRETED)
        scale = tl.load(scale_ptrs + group * 16, mask=there, other=0.0).to(tl.float32)
        total += dots * tl.reshape(scale, (TILES * 16,))[None, :]
    return total


@triton.jit
def experts_prefill_gate_up_kernel(
    x_ptr,  # bfloat16 [T, GROUPS * 128]
    tiles_ptr,  # uint8 [E, num_tiles, GROUPS, 1024]
    scale_ptr,  # [E, num_tiles, GROUPS, 16]
    inner_ptr,  # bfloat16 [T * SLOTS, num_tiles * 8]
    order_ptr,
    first_ptr,
    last_block_ptr,
    expert_ptr,
    num_tiles,
    num_experts,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(order_ptr, first_ptr, last_block_ptr, block, expert, BLOCK_M)
    total = _dot_with_tiles(
        x_ptr + (pair // SLOTS)[:, None] * (GROUPS * GROUP) + tl.arange(0, 64)[None, :],
        used,
        tiles_ptr + expert * num_tiles * (GROUPS * TILE_BYTES),
        scale_ptr + expert * num_tiles * (GROUPS * 16),
        tl.program_id(0) * TILES + tl.arange(0, TILES),
        num_tiles,
        GROUPS,
        BLOCK_M,
        TILES,
        INTERPRETED,
    )
    by_tile = tl.permute(tl.reshape(total, (BLOCK_M, TILES, 2, 8)), (0, 1, 3, 2))
    gate, up = tl.split(tl.reshape(by_tile, (BLOCK_M, TILES * 8, 2)))
    column = tl.program_id(0) * (TILES * 8) + tl.arange(0, TILES * 8)
    width = num_tiles * 8
    tl.store(
        inner_ptr + pair[:, None] * width + column[None, :],
        to_bf16(swiglu(gate, up), INTERPRETED),
        mask=used[:, None] & (column < width)[None, :],
    )


@triton.jit
def experts_prefill_down_kernel(
    inner_ptr,  # bfloat16 [P, GROUPS * 128]
    weights_ptr,  # float32 [P]
    tiles_ptr,  # uint8 [E, num_tiles, GROUPS, 1024]
    scale_ptr,  # [E, num_tiles, GROUPS, 16]
    slots_ptr,  # float32 [P, num_tiles * 16]
    order_ptr,
    first_ptr,
    last_block_ptr,
    expert_ptr,
    num_tiles,
    num_experts,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(order_ptr, first_ptr, last_block_ptr, block, expert, BLOCK_M)
    total = _dot_with_tiles(
        inner_ptr + pair[:, None] * (GROUPS * GROUP) + tl.arange(0, 64)[None, :],
        used,
        tiles_ptr + expert * num_tiles * (GROUPS * TILE_BYTES),
        scale_ptr + expert * num_tiles * (GROUPS * 16),
        tl.program_id(0) * TILES + tl.arange(0, TILES),
        num_tiles,
        GROUPS,
        BLOCK_M,
        TILES,
        INTERPRETED,
    )
    column = tl.program_id(0) * (TILES * 16) + tl.arange(0, TILES * 16)
    width = num_tiles * 16
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0)
    tl.store(
        slots_ptr + pair[:, None] * width + column[None, :],
        total * weight[:, None],
        mask=used[:, None] & (column < width)[None, :],
    )


@triton.jit
def experts_prefill_gate_up_bf16_kernel(
    x_ptr,  # bfloat16 [T, H]
    gate_up_ptr,  # bfloat16 [E, 2I, H]
    inner_ptr,  # bfloat16 [T * SLOTS, I]
    order_ptr,
    first_ptr,
    last_block_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(order_ptr, first_ptr, last_block_ptr, block, expert, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pair // SLOTS)[:, None] * H + k[None, :]
    gate_ptrs = gate_up_ptr + expert * (2 * I * H) + n[None, :] * H + k[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_K):
        inside = (start + k < H)[:, None] & (n < I)[None, :]
        x = tl.load(x_ptrs + start, mask=used[:, None] & (start + k < H)[None, :], other=0.0)
        gate = dot_bf16(x, tl.load(gate_ptrs + start, mask=inside, other=0.0), gate, INTERPRETED)
        up = dot_bf16(x, tl.load(gate_ptrs + I * H + start, mask=inside, other=0.0), up, INTERPRETED)
    tl.store(
        inner_ptr + pair[:, None] * I + n[None, :],
        to_bf16(swiglu(gate, up), INTERPRETED),
        mask=used[:, None] & (n < I)[None, :],
    )


@triton.jit
def experts_prefill_down_bf16_kernel(
    inner_ptr,  # bfloat16 [P, I]
    weights_ptr,  # float32 [P]
    down_ptr,  # bfloat16 [E, H, I]
    slots_ptr,  # float32 [P, H]
    order_ptr,
    first_ptr,
    last_block_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(order_ptr, first_ptr, last_block_ptr, block, expert, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inner_ptrs = inner_ptr + pair[:, None] * I + k[None, :]
    down_ptrs = down_ptr + expert * (H * I) + n[None, :] * I + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, I, BLOCK_K):
        inside = (start + k < I)[:, None] & (n < H)[None, :]
        inner = tl.load(inner_ptrs + start, mask=used[:, None] & (start + k < I)[None, :], other=0.0)
        total = dot_bf16(inner, tl.load(down_ptrs + start, mask=inside, other=0.0), total, INTERPRETED)
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0)
    tl.store(
        slots_ptr + pair[:, None] * H + n[None, :],
        total * weight[:, None],
        mask=used[:, None] & (n < H)[None, :],
    )


def prefill_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """See `onebox.kernels.experts_prefill.prefill_experts`."""
    experts, inner_tiles, hidden_groups = gate_up.shape[:3]
    hidden_tiles, inner_groups = down.shape[1:3]
    blocks = group_by_expert(ids, experts)
    inner, slots = _workspace(ids, inner_tiles * 8, hidden_tiles * 16)
    shape = {"BLOCK_M": BLOCK_M, "TILES": TILES, "INTERPRETED": triton.knobs.runtime.interpret, "num_warps": 4}
    experts_prefill_gate_up_kernel[(triton.cdiv(inner_tiles, TILES), len(blocks.expert))](
        x,
        gate_up,
        gate_up_scale,
        inner,
        *blocks,
        inner_tiles,
        experts,
        GROUPS=hidden_groups,
        SLOTS=ids.shape[1],
        **shape,
    )
    experts_prefill_down_kernel[(triton.cdiv(hidden_tiles, TILES), len(blocks.expert))](
        inner, weights, down, down_scale, slots, *blocks, hidden_tiles, experts, GROUPS=inner_groups, **shape
    )
    return sum_slots(slots, x.dtype)


def prefill_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `onebox.kernels.experts_prefill.prefill_experts_bf16`."""
    experts, hidden, inner_size = down.shape
    blocks = group_by_expert(ids, experts)
    inner, slots = _workspace(ids, inner_size, hidden)
    shape = {"BLOCK_M": BLOCK_M, "BLOCK_K": 64, "INTERPRETED": triton.knobs.runtime.interpret, "num_warps": 4}
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
