"""Rows of an integer expert's tiles times the planes of a few rows, exact integers per group, for gate_up and down."""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import IS_INTERPRETED
from onebox.kernels.common.dependent import wait
from onebox.kernels.common.int_planes import code_halves, group_dot, plane_operand, prefetch

__all__ = ["GROUP", "tile_row_dot"]

GROUP = tl.constexpr(128)


@triton.jit
def _tile_ptrs(tiles_ptr, GROUPS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """Pointers to the first 512 bytes (INT4: all 1,024) of rows of tiles: [TILES, bytes], or [bytes] of one row."""
    BYTES: tl.constexpr = 1024 if BITS == 4 else 512
    if TILES == 1:
        return tiles_ptr + tl.arange(0, BYTES)
    else:
        return tiles_ptr + tl.arange(0, TILES)[:, None] * (GROUPS * 256 * BITS) + tl.arange(0, BYTES)[None, :]


@triton.jit
def _rest_ptrs(tiles_ptr, GROUPS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """Pointers to the last 256 bytes of INT3's: [32, TILES, 8], in the order in which Triton gives a thread eight."""
    rows = tl.arange(0, TILES)[None, :, None] * (GROUPS * 256 * BITS)
    return tiles_ptr + 512 + rows + tl.arange(0, 32)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]


@triton.jit
def _load_groups(tile_ptrs, rest_ptrs, tile_scale_ptrs, start, BITS: tl.constexpr, UNROLL: tl.constexpr):
    """(tiles, the rest of INT3's, scales) of UNROLL groups, all loads issued before the first is used."""
    packed = ()
    rests = ()
    scales = ()
    for i in tl.static_range(UNROLL):
        tile = tl.load(tile_ptrs + (start + i) * (256 * BITS), eviction_policy="evict_first")
        packed += (tile,)  # type: ignore[assignment]
        if BITS == 3:
            rest = tl.load(rest_ptrs + (start + i) * (256 * BITS), eviction_policy="evict_first")
            rests += (rest,)  # type: ignore[assignment]
        scales += (tl.load(tile_scale_ptrs + (start + i) * 16),)  # type: ignore[assignment]
    return packed, rests, scales


@triton.jit
def _add_groups(
    total,
    packed,
    rests,
    scales,
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
    BITS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    JOINED: tl.constexpr = BITS != 4
    for i in tl.static_range(UNROLL):
        before = tl.load(x_ptrs + i * GROUP, mask=used, other=0)
        behind = tl.load(x_ptrs + i * GROUP + 64, mask=used, other=0)
        low, high = code_halves(packed[i], rests[i] if BITS == 3 else None, BITS, TILES)
        before, behind = plane_operand(before, COLUMNS, JOINED), plane_operand(behind, COLUMNS, JOINED)
        dots = group_dot(low, high, before, behind, TILES, COLUMNS, JOINED)
        x_scale = tl.load(x_scale_ptrs + i, mask=scale_used, other=0.0)
        # An explicit fused multiply-add, so that all variants of this kernel round alike.
        total = tl.fma(dots, scales[i].to(tl.float32)[:, None] * x_scale[None, :], total)
    return total


@triton.jit
def tile_row_dot(
    tiles_ptr,  # uint8 [TILES, GROUPS, 256 * BITS]
    scale_ptr,  # [TILES, GROUPS, 16]
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
    TILES: tl.constexpr = 1,
):
    """TILES rows of tiles times COLUMNS planes, group after group: float32 [16 * TILES, COLUMNS / 2].

    The loads of the first weights are issued before the wait for the planes.
    """
    total = tl.zeros((16 * TILES, COLUMNS // 2), tl.float32)
    tile_ptrs = _tile_ptrs(tiles_ptr, GROUPS, BITS, TILES)
    rest_ptrs = _rest_ptrs(tiles_ptr, GROUPS, BITS, TILES)
    if PREFETCH and not IS_INTERPRETED and GROUPS > UNROLL:
        # The compiler has no registers for all scales at once and loads most of them last.
        lane = tl.arange(0, 32 * TILES)
        prefetch(scale_ptr + lane // 32 * (GROUPS * 16) + tl.minimum(lane % 32, GROUPS - 1) * 16)
    row = tl.arange(0, 16 * TILES)
    tile_scale_ptrs = scale_ptr + row // 16 * (GROUPS * 16) + row % 16
    packed, rests, scales = _load_groups(tile_ptrs, rest_ptrs, tile_scale_ptrs, 0, BITS, UNROLL)
    wait(DEPENDENT)
    if GROUPS <= 4 * UNROLL:
        # Few enough groups to unroll: the next ones are in flight while these are multiplied.
        for start in tl.static_range(0, GROUPS, UNROLL):
            next_packed, next_rests, next_scales = packed, rests, scales
            if start + UNROLL < GROUPS:
                next_packed, next_rests, next_scales = _load_groups(
                    tile_ptrs, rest_ptrs, tile_scale_ptrs, start + UNROLL, BITS, UNROLL
                )
            total = _add_groups(
                total,
                packed,
                rests,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                BITS,
                UNROLL,
                COLUMNS,
                TILES,
            )
            packed, rests, scales = next_packed, next_rests, next_scales
    else:
        total = _add_groups(
            total, packed, rests, scales, x_ptrs, used, x_scale_ptrs, scale_used, BITS, UNROLL, COLUMNS, TILES
        )
        for start in tl.range(UNROLL, GROUPS, UNROLL, num_stages=1):
            packed, rests, scales = _load_groups(tile_ptrs, rest_ptrs, tile_scale_ptrs, start, BITS, UNROLL)
            total = _add_groups(
                total,
                packed,
                rests,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                BITS,
                UNROLL,
                COLUMNS,
                TILES,
            )
    return total * (0.5 ** (8 - BITS))  # codes were 2^(8 - BITS) times as large
