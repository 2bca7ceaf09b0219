"""The integer linears of a decode step with more than 16 rows, in Triton: one pass over the weights.

With few rows the weights' bytes decide, and a warp computes one tile (`groups.py`). With many the products do: warps
share the planes, which are copied to shared memory ahead of their use, and the weights are the left operand, decoded in
registers, of `wgmma` on Hopper and of `mma.sync` elsewhere. Rows are computed in chunks whose planes are the columns of
one MMA; no chunk sees the others, and a program keeps the sums of all. A group's dot products are exact integers and
are added in the same order as in `groups.py`, so a row's bits are the same in both.
"""

import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import load_squares, row_factors
from onebox.kernels.common.int_planes import int4_halves, int6_quarters
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.target import has_large_shared_memory
from onebox.kernels.common.tuning import MODES, Tunable

__all__ = ["launch_many"]

_TRIED = (
    *MODES,
    *({"TILES": tiles, "ROWS": rows} for tiles, rows in ((4, 32), (8, 32), (4, 64), (8, 64))),
    *({"num_stages": stages} for stages in (2, 3, 4)),
)
_LINEARS = {bits: Tunable(f"int{bits}_many", _TRIED) for bits in (4, 6, 8)}


@triton.jit
def _operand(first, second):
    """Quarters of some tiles (kt 0 and 1), int8 [TILES, 512], as half a group's columns in order: [16 * TILES, 64]."""
    TILES: tl.constexpr = first.shape[0]
    split = tl.reshape(tl.join(first, second), (TILES, 8, 4, 2, 2, 4, 2))  # n g t k16 r8 k4 kt
    return tl.reshape(tl.permute(split, (0, 4, 1, 2, 6, 3, 5)), (TILES * 16, 64))  # n r8 g | t kt k16 k4


@triton.jit
def _load_operands(tile_ptrs, inside, BITS: tl.constexpr):
    """Both halves of a group of some tiles, int8 [16 * TILES, 64] each, columns in their order.

    INT4 codes are times 16, INT6 codes times 4.
    """
    first = tl.load(tile_ptrs, mask=inside, other=0)
    second = tl.load(tile_ptrs + 512, mask=inside, other=0)
    if BITS == 4:
        first_low, first_high = int4_halves(first)
        second_low, second_high = int4_halves(second)
        low = _operand(first_low, second_low)
        high = _operand(first_high, second_high)
    elif BITS == 6:
        pairs = tl.load(tile_ptrs + 1024, mask=inside, other=0)
        a, b, c, d = int6_quarters(first, second, pairs)
        low, high = _operand(a, b), _operand(c, d)
    else:
        low = _operand(first.to(tl.int8, bitcast=True), second.to(tl.int8, bitcast=True))
        third = tl.load(tile_ptrs + 1024, mask=inside, other=0).to(tl.int8, bitcast=True)
        fourth = tl.load(tile_ptrs + 1536, mask=inside, other=0).to(tl.int8, bitcast=True)
        high = _operand(third, fourth)
    return low, high


@triton.jit(do_not_specialize=["R", "num_tiles"])
def linear_many_kernel(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    weight_ptr,  # uint8 [K/128, tiles, 256 * BITS]
    weight_scale_ptr,  # [K/128, N] or [N]
    squares_ptr,  # float32 [R, K/128], or None for rows without a pending norm division
    out_ptr,  # [PARTS, R, N]: float32 parts, or the result if there is one part
    R,
    N,
    num_tiles,
    eps,
    K: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a chunk
    TILES: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GROUPS: tl.constexpr = K // 128 // PARTS
    TILE_BYTES: tl.constexpr = 256 * BITS
    release(DEPENDENT)
    part = tl.program_id(1)
    first_tile, first_group = tl.program_id(0) * TILES, part * GROUPS
    tiles = first_tile + tl.arange(0, TILES)
    tiles_inside = (tiles < num_tiles)[:, None]
    tile_stride = num_tiles.to(tl.int64) * TILE_BYTES
    tile_ptrs = weight_ptr + tiles.to(tl.int64)[:, None] * TILE_BYTES + tl.arange(0, 512)[None, :]
    tile_ptrs += first_group * tile_stride
    columns = first_tile * 16 + tl.arange(0, 16 * TILES)
    columns_inside = columns < N
    weight_scale_ptrs = weight_scale_ptr + first_group * N + columns
    planes = tl.arange(0, 2 * ROWS)
    rows = tl.arange(0, ROWS)
    # Rows behind the last are computed from the last one's planes and not stored: no mask in the loop.
    plane_ptrs = planes_ptr + first_group * 128 + tl.arange(0, 64)[:, None]
    scale_ptrs = scale_ptr + first_group
    wait(DEPENDENT)
    totals = ()
    for _ in tl.static_range(CHUNKS):
        totals += (tl.zeros((16 * TILES, ROWS), tl.float32),)  # type: ignore[assignment]
    for group in range(GROUPS):
        low, high = _load_operands(tile_ptrs + group * tile_stride, tiles_inside, BITS)
        if BITS == 4:
            weight_scale = tl.load(weight_scale_ptrs + group * N, mask=columns_inside, other=0.0).to(tl.float32)
        added = ()
        for chunk in tl.static_range(CHUNKS):
            plane = tl.minimum(chunk * (2 * ROWS) + planes, 2 * R - 1)
            at = plane_ptrs + plane[None, :] * K + group * 128
            dots = tl.dot(low, tl.load(at), out_dtype=tl.int32)
            dots = tl.dot(high, tl.load(at + 64), dots, out_dtype=tl.int32)
            upper, lower = tl.split(tl.reshape(dots, (16 * TILES, ROWS, 2)))
            row = tl.minimum(chunk * ROWS + rows, R - 1)
            scale = tl.load(scale_ptrs + row * (K // 128) + group)[None, :]
            scale = weight_scale[:, None] * scale if BITS == 4 else tl.broadcast_to(scale, totals[chunk].shape)
            added += (tl.fma((upper * 256 + lower).to(tl.float32), scale, totals[chunk]),)  # type: ignore[assignment]
        totals = added
    if BITS != 4:
        row_scales = tl.load(weight_scale_ptr + columns, mask=columns_inside, other=0.0).to(tl.float32)[:, None]
    for chunk in tl.static_range(CHUNKS):
        row = chunk * ROWS + rows
        total = totals[chunk]  # type: ignore[var-annotated]
        total *= 0.0625 if BITS == 4 else row_scales  # type: ignore[assignment]
        if squares_ptr is not None:
            squares = load_squares(squares_ptr, row, R, K, GROUPS_BLOCK)
            total *= row_factors(squares, eps, K)[None, :]
        at = out_ptr + (part * R + row).to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(row < R)[None, :] & columns_inside[:, None])


def launch_many(rows: FixedRows, weight: Tensor, weight_scale: Tensor, bits: int, parts: Tensor) -> None:
    """Writes the parts [parts, R, N] of a linear."""
    count, num_rows, num_columns = parts.shape
    num_groups, num_tiles = weight.shape[:2]
    stages = 3 if has_large_shared_memory() else 2
    options = launch_options(
        _LINEARS[bits], f"{_row_class(num_rows)}_{num_groups}", TILES=4, ROWS=32, num_stages=stages
    )
    tiles, chunk = options["TILES"], min(options["ROWS"], next_power_of_2(num_rows))
    linear_many_kernel[(ceil_div(num_tiles, tiles), count)](
        rows.planes,
        rows.scale,
        weight,
        weight_scale,
        rows.squares,
        parts,
        num_rows,
        num_columns,
        num_tiles,
        rows.eps,
        K=num_groups * 128,
        BITS=bits,
        PARTS=count,
        CHUNKS=ceil_div(num_rows, chunk),
        GROUPS_BLOCK=next_power_of_2(num_groups),
        num_warps=tiles,
        **{**options, "ROWS": chunk},
    )


def _row_class(num_rows: int) -> int:
    """Rows rounded up to whole chunks of 32: what kernels are compiled and tuned for."""
    return 32 * ceil_div(num_rows, 32)
