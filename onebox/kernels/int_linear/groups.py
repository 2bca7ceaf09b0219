"""A tile of an integer matrix times the few rows of a decode step, group after group, in Triton.

One warp computes one tile (16 matrix rows), and almost nothing goes through shared memory (`common/int_planes.py`).
`many.py` is for more rows.
"""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import IS_INTERPRETED
from onebox.kernels.common.dependent import wait
from onebox.kernels.common.fixed_point import load_squares, row_factors
from onebox.kernels.common.int_planes import (
    group_dot,
    int4_halves,
    int6_quarters,
    operands_dot,
    plane_operand,
    prefetch,
    quarters_operand,
)

__all__ = ["sum_groups"]


@triton.jit
def _load_tiles(tiles_ptr, stride, UNROLL: tl.constexpr, BITS: tl.constexpr):
    """Bytes of UNROLL groups, all loads issued before the first use.

    INT8: the halves j. INT4: firsts only, both halves in each byte. INT6: the upper bits of kt 0 and 1, then the lower.
    """
    firsts = ()
    seconds = ()
    thirds = ()
    for step in tl.static_range(UNROLL):
        at = tiles_ptr + step * stride
        first = tl.load(at, eviction_policy="evict_first")
        firsts += (first,)  # type: ignore[assignment]
        if BITS == 8:
            second = tl.load(at + 1024, eviction_policy="evict_first")
            seconds += (second,)  # type: ignore[assignment]
        if BITS == 6:
            second = tl.load(at + 512, eviction_policy="evict_first")
            third = tl.load(at + 1024, eviction_policy="evict_first")
            seconds += (second,)  # type: ignore[assignment]
            thirds += (third,)  # type: ignore[assignment]
    return firsts, seconds, thirds


@triton.jit
def _load_scales(scale_ptrs, inside, stride, UNROLL: tl.constexpr, BITS: tl.constexpr):
    """Scales of UNROLL groups of INT4 tiles; others have none here."""
    scales = ()
    for step in tl.static_range(UNROLL):
        if BITS == 4:
            scales += (tl.load(scale_ptrs + step * stride, mask=inside, other=0.0),)  # type: ignore[assignment]
    return scales


@triton.jit
def _add_groups(
    total,
    firsts,
    seconds,
    thirds,
    weight_scales,
    plane_ptrs,
    planes_inside,
    scale_ptrs,
    rows_inside,
    BITS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Total plus the dots of UNROLL groups with loaded weights, one group after another."""
    for step in tl.static_range(UNROLL):
        scale = tl.load(scale_ptrs + step, mask=rows_inside, other=0.0)[None, :]
        scale = (
            weight_scales[step].to(tl.float32)[:, None] * scale if BITS == 4 else tl.broadcast_to(scale, total.shape)
        )
        at = plane_ptrs + step * 128
        before = plane_operand(tl.load(at, mask=planes_inside, other=0), COLUMNS)
        behind = plane_operand(tl.load(at + 64, mask=planes_inside, other=0), COLUMNS)
        if BITS == 6:
            a, b, c, d = int6_quarters(firsts[step], seconds[step], thirds[step])
            first, second = quarters_operand(a, b, 1), quarters_operand(c, d, 1)
            dots = operands_dot(first, second, before, behind, 1, COLUMNS)
        elif BITS == 4:
            first, second = int4_halves(firsts[step])
            dots = group_dot(first, second, before, behind, 1, COLUMNS)
        else:
            first = firsts[step].to(tl.int8, bitcast=True)
            second = seconds[step].to(tl.int8, bitcast=True)
            dots = group_dot(first, second, before, behind, 1, COLUMNS)
        # An explicit fused multiply-add, so that all variants of this kernel round alike.
        total = tl.fma(dots, scale, total)
    return total


@triton.jit
def sum_groups(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    weight_ptr,  # uint8 [K/128, tiles, 256 * BITS]
    weight_scale_ptr,  # [K/128, N] or [N]
    squares_ptr,  # float32 [R, K/128], or None for rows without a pending norm division
    R,
    N,
    num_tiles,
    tile,
    first_group,
    eps,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """float32 [16, COLUMNS / 2]: the linear over GROUPS groups from `first_group`, in order.

    Loads of the first weights are issued before the wait for the rows. Values used at the end are loaded at the start:
    otherwise a program would end by waiting for one or two numbers.
    """
    TILE_BYTES: tl.constexpr = 256 * BITS
    LOADED: tl.constexpr = 512 if BITS == 6 else 1024
    tile_stride = num_tiles.to(tl.int64) * TILE_BYTES
    tile_ptrs = weight_ptr + tile.to(tl.int64) * TILE_BYTES + tl.arange(0, LOADED)[None, :]
    tile_ptrs += first_group * tile_stride
    columns = tile * 16 + tl.arange(0, 16)
    columns_inside = columns < N
    weight_scale_ptrs = weight_scale_ptr + first_group * N + columns
    planes = tl.arange(0, COLUMNS)
    planes_inside = (planes < 2 * R)[:, None]
    plane_ptrs = planes_ptr + planes[:, None] * K + first_group * 128 + tl.arange(0, 64)[None, :]
    rows = tl.arange(0, COLUMNS // 2)
    scale_ptrs = scale_ptr + rows * (K // 128) + first_group
    total = tl.zeros((16, COLUMNS // 2), tl.float32)
    if PREFETCH and not IS_INTERPRETED and BITS == 4 and GROUPS > UNROLL:
        # The compiler has no registers for all scales at once and loads most of them last.
        groups = tl.minimum(tl.arange(0, 32), GROUPS - 1)
        prefetch(weight_scale_ptr + (first_group + groups) * N + tile * 16)
    scales = _load_scales(weight_scale_ptrs, columns_inside, N, UNROLL, BITS)
    firsts, seconds, thirds = _load_tiles(tile_ptrs, tile_stride, UNROLL, BITS)
    if BITS != 4:
        row_scales = tl.load(weight_scale_ptr + columns, mask=columns_inside, other=0.0)
    wait(DEPENDENT)
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, rows, R, K, GROUPS_BLOCK)
    total = _add_groups(
        total,
        firsts,
        seconds,
        thirds,
        scales,
        plane_ptrs,
        planes_inside,
        scale_ptrs,
        rows < R,
        BITS,
        UNROLL,
        COLUMNS,
    )
    if squares_ptr is not None:
        factors = row_factors(squares, eps, K)
    for group in tl.range(UNROLL, GROUPS, UNROLL, num_stages=1):
        scales = _load_scales(weight_scale_ptrs + group * N, columns_inside, N, UNROLL, BITS)
        firsts, seconds, thirds = _load_tiles(tile_ptrs + group * tile_stride, tile_stride, UNROLL, BITS)
        total = _add_groups(
            total,
            firsts,
            seconds,
            thirds,
            scales,
            plane_ptrs + group * 128,
            planes_inside,
            scale_ptrs + group,
            rows < R,
            BITS,
            UNROLL,
            COLUMNS,
        )
    if BITS == 4:
        total *= 0.0625
    else:
        total *= row_scales.to(tl.float32)[:, None]
    if squares_ptr is not None:
        total *= factors[None, :]
    return total
