"""Rows of an INT4 expert's tiles times the planes of a few rows, exact integers per group, for gate_up and down."""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import IS_INTERPRETED
from onebox.kernels.common.dependent import wait
from onebox.kernels.common.int_planes import group_dot, int4_halves, plane_operand, prefetch

__all__ = ["GROUP", "TILE_BYTES", "tile_row_dot"]

GROUP = tl.constexpr(128)
TILE_BYTES = tl.constexpr(1024)


@triton.jit
def _load_groups(tile_ptrs, tile_scale_ptrs, start, UNROLL: tl.constexpr):
    """(tiles, scales) of UNROLL groups, all loads issued before the first is used."""
    packed = ()
    scales = ()
    for i in tl.static_range(UNROLL):
        tile = tl.load(tile_ptrs + (start + i) * TILE_BYTES, eviction_policy="evict_first")
        packed += (tile,)  # type: ignore[assignment]
        scales += (tl.load(tile_scale_ptrs + (start + i) * 16),)  # type: ignore[assignment]
    return packed, scales


@triton.jit
def _add_groups(
    total,
    packed,
    scales,
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    for i in tl.static_range(UNROLL):
        before = tl.load(x_ptrs + i * GROUP, mask=used, other=0)
        behind = tl.load(x_ptrs + i * GROUP + 64, mask=used, other=0)
        low, high = int4_halves(packed[i])
        dots = group_dot(low, high, plane_operand(before, COLUMNS), plane_operand(behind, COLUMNS), TILES, COLUMNS)
        x_scale = tl.load(x_scale_ptrs + i, mask=scale_used, other=0.0)
        # An explicit fused multiply-add, so that all variants of this kernel round alike.
        total = tl.fma(dots, scales[i].to(tl.float32)[:, None] * x_scale[None, :], total)
    return total


@triton.jit
def tile_row_dot(
    tile_ptrs,  # [1024], or [TILES, 1024] of neighbouring rows of tiles
    scale_ptr,  # [TILES, GROUPS, 16]
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
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
    if PREFETCH and not IS_INTERPRETED and GROUPS > UNROLL:
        # The compiler has no registers for all scales at once and loads most of them last.
        lane = tl.arange(0, 32 * TILES)
        prefetch(scale_ptr + lane // 32 * (GROUPS * 16) + tl.minimum(lane % 32, GROUPS - 1) * 16)
    row = tl.arange(0, 16 * TILES)
    tile_scale_ptrs = scale_ptr + row // 16 * (GROUPS * 16) + row % 16
    packed, scales = _load_groups(tile_ptrs, tile_scale_ptrs, 0, UNROLL)
    wait(DEPENDENT)
    if GROUPS <= 4 * UNROLL:
        # Few enough groups to unroll: the next ones are in flight while these are multiplied.
        for start in tl.static_range(0, GROUPS, UNROLL):
            next_packed, next_scales = packed, scales
            if start + UNROLL < GROUPS:
                next_packed, next_scales = _load_groups(tile_ptrs, tile_scale_ptrs, start + UNROLL, UNROLL)
            total = _add_groups(
                total,
                packed,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                UNROLL,
                COLUMNS,
                TILES,
            )
            packed, scales = next_packed, next_scales
    else:
        total = _add_groups(total, packed, scales, x_ptrs, used, x_scale_ptrs, scale_used, UNROLL, COLUMNS, TILES)
        for start in tl.range(UNROLL, GROUPS, UNROLL, num_stages=1):
            packed, scales = _load_groups(tile_ptrs, tile_scale_ptrs, start, UNROLL)
            total = _add_groups(
                total,
                packed,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                UNROLL,
                COLUMNS,
                TILES,
            )
    return total * 0.0625
