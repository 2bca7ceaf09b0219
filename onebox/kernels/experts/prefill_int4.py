"""Routed experts of a prefill in Triton, weights of 4, 3 or 2 bits: gate_up, down, sum over a token's slots.

A block of pairs (`blocks.py`) is one operand of an MMA, its expert's weights the other; an MMA's result for one pair
does not depend on the other pairs, so a token's bits depend on that token alone. Weights are read from the same tiles
as in decode, as the left operand (`common/int_tiles.py`). Codes are exact in bfloat16, so each group's dot uses the
codes and is scaled in float32: no weight is rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.expert_tiles import tile_bits
from onebox.kernels.common.arithmetic import rounded, swiglu
from onebox.kernels.common.int_tiles import WORDS, in_tile_order, sum_tiles, tile_order_64
from onebox.kernels.common.launch import divisor
from onebox.kernels.common.tuning import LaunchOptions, Tunable
from onebox.kernels.experts.blocks import BLOCK_M, block_pairs, block_size, group_by_expert, prefill_workspace
from onebox.kernels.experts.slots import sum_slots, tiles_key

__all__ = ["prefill_experts_int4"]

GATE_UP_TILES = 8  # tiles of 16 weight rows per program: gate and up of 64 inner values, half a group
_GATE_UP = Tunable("prefill_gate_up", ({"num_warps": 4}, {"num_warps": 8}, {"num_stages": 2}, {"num_stages": 4}))
_DOWN = Tunable("prefill_down", ({"BLOCKS": 1}, {"BLOCKS": 2}, {"BLOCKS": 4}, {"num_stages": 2}, {"num_stages": 4}))
_DOWN_TILES = 4
GROUP = tl.constexpr(128)


@triton.jit
def _tile_sums(
    x_ptrs,  # [128, BLOCK_M]
    tiles_ptr,  # of the expert: int32 [tiles, GROUPS, 64 * BITS]
    scale_ptr,  # of the expert: [tiles, GROUPS, 16]
    first,  # the program's first tile; TILES * BLOCKS divides `tiles`
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Of each block of TILES float32 [TILES * 16, BLOCK_M]: its rows of the expert's matrix times the pairs."""
    row = tl.arange(0, TILES * 16)
    tile_ptrs = ()
    rest_ptrs = ()
    scale_ptrs = ()
    for block in tl.static_range(BLOCKS):
        tile = first + block * TILES + tl.arange(0, TILES)
        row_ptrs = tiles_ptr + tile[:, None] * (GROUPS * 64 * BITS)
        tile_ptrs += (row_ptrs + tl.arange(0, WORDS)[None, :],)  # type: ignore[assignment]
        rest_ptrs += (row_ptrs + WORDS + tl.arange(0, WORDS // 2)[None, :],)  # type: ignore[assignment]
        scale_at = (first + block * TILES + row // 16) * (GROUPS * 16) + row % 16
        scale_ptrs += (scale_ptr + scale_at,)  # type: ignore[assignment]
    return sum_tiles(x_ptrs, tile_ptrs, 64 * BITS, scale_ptrs, 16, GROUPS, BITS, BLOCKS, rest_ptrs)


@triton.jit
def experts_prefill_gate_up_kernel(
    x_ptr,  # bfloat16 [T, GROUPS * 128], in tile order
    tiles_ptr,  # int32 [E, num_tiles, GROUPS, 64 * BITS]
    scale_ptr,  # [E, num_tiles, GROUPS, 16]
    inner_ptr,  # bfloat16 [T * SLOTS, num_tiles * 8], in tile order
    pairs_ptr,
    expert_ptr,
    num_tiles,
    num_experts,
    BITS: tl.constexpr,
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
    totals = _tile_sums(
        x_ptr + (pair // SLOTS)[None, :] * (GROUPS * GROUP) + tl.arange(0, 128)[:, None],
        tiles_ptr + expert * num_tiles * (GROUPS * 64 * BITS),
        scale_ptr + expert * num_tiles * (GROUPS * 16),
        tl.program_id(0) * TILES,
        BITS,
        GROUPS,
        TILES,
        1,
    )
    by_tile = tl.permute(tl.reshape(totals[0], (TILES, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(by_tile, (TILES * 8, BLOCK_M, 2)))
    inner = tile_order_64(rounded(swiglu(gate, up), tl.bfloat16))
    column = tl.program_id(0) * (TILES * 8) + tl.arange(0, TILES * 8)
    tl.store(inner_ptr + pair[None, :] * (num_tiles * 8) + column[:, None], inner, mask=used[None, :])


@triton.jit
def experts_prefill_down_kernel(
    inner_ptr,  # bfloat16 [pairs, GROUPS * 128], in tile order
    weights_ptr,  # float32 [pairs]
    tiles_ptr,  # int32 [E, num_tiles, GROUPS, 64 * BITS]
    scale_ptr,  # [E, num_tiles, GROUPS, 16]
    slots_ptr,  # float32 [pairs, num_tiles * 16]
    pairs_ptr,
    expert_ptr,
    num_tiles,
    num_experts,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, block, BLOCK_M)
    weight = tl.load(weights_ptr + pair)  # before the sums: it takes fewer registers than its address
    first = tl.program_id(0) * (TILES * BLOCKS)
    totals = _tile_sums(
        inner_ptr + pair[None, :] * (GROUPS * GROUP) + tl.arange(0, 128)[:, None],
        tiles_ptr + expert * num_tiles * (GROUPS * 64 * BITS),
        scale_ptr + expert * num_tiles * (GROUPS * 16),
        first,
        BITS,
        GROUPS,
        TILES,
        BLOCKS,
    )
    for i in tl.static_range(BLOCKS):
        column = (first + i * TILES) * 16 + tl.arange(0, TILES * 16)
        at = slots_ptr + pair[None, :] * (num_tiles * 16) + column[:, None]
        tl.store(at, totals[i] * weight[None, :], mask=used[None, :])


def prefill_experts_int4(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    experts, inner_tiles, hidden_groups = gate_up.shape[:3]
    hidden_tiles, inner_groups = down.shape[1:3]
    size = block_size(ids.numel(), experts)
    blocks = group_by_expert(ids, experts, size)
    inner, slots = prefill_workspace(ids, inner_tiles * 8, hidden_tiles * 16)
    experts_prefill_gate_up_kernel[(inner_tiles // GATE_UP_TILES, len(blocks.expert))](
        in_tile_order(x),
        gate_up.view(torch.int32),
        gate_up_scale,
        inner,
        *blocks,
        inner_tiles,
        experts,
        BITS=tile_bits(gate_up),
        GROUPS=hidden_groups,
        SLOTS=ids.shape[1],
        BLOCK_M=size,
        TILES=GATE_UP_TILES,
        **_options(_GATE_UP, gate_up, size, num_warps=8 if size == BLOCK_M else 4),
    )
    options = _options(_DOWN, down, size, BLOCKS=4 if size == 16 else 2)
    num_row_blocks = divisor(hidden_tiles // _DOWN_TILES, options["BLOCKS"])
    experts_prefill_down_kernel[(hidden_tiles // _DOWN_TILES // num_row_blocks, len(blocks.expert))](
        inner,
        weights,
        down.view(torch.int32),
        down_scale,
        slots,
        *blocks,
        hidden_tiles,
        experts,
        BITS=tile_bits(down),
        GROUPS=inner_groups,
        BLOCK_M=size,
        TILES=_DOWN_TILES,
        num_warps=4,
        **{**options, "BLOCKS": num_row_blocks},
    )
    return sum_slots(slots, x.dtype)


def _options(kernel: Tunable, tiles: Tensor, size: int, **default: int) -> LaunchOptions:
    """Launch options for blocks of `size` pairs."""
    return kernel.options(f"{tiles_key(tiles)}_{size}", {**default, "num_stages": 3, "maxnreg": 255})
