"""The float linears as parts (partial sums over slices of K), in Triton: one warp per 16 or 32 columns and part.

`parts_tile` is also called by kernels that compute a linear in the same launch as other work (`TileLaunch`).
"""

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import load_squares, row_factors
from onebox.kernels.common.float_codes import E2M1_IN_MULTIPLIER
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.float_linear.fragments import (
    load_block,
    load_rows,
    operands,
    row_operands,
    sum_block,
    thread_columns,
)
from onebox.kernels.float_linear.kernel import BLOCK, store_tile
from onebox.kernels.float_linear.tiles import PART_BLOCK, num_parts

__all__ = ["TileLaunch", "float_parts", "parts_tile"]

_PARTS = Tunable("float_parts")

_FEW_ROWS = 16
"""Rows that a program computes at once. With more, the rows' bytes count, not the weights': it has 32 columns where
their weights fit its registers."""


@triton.jit
def _load_part(
    weight_ptr,
    scale_ptr,
    tile,
    first,
    N,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The codes of a part's blocks, all loads issued at once."""
    first_row, last_row = tile.to(tl.int64) * (16 * TILES), tl.full([], N - 1, tl.int64)
    blocks = ()
    for block in tl.static_range(BLOCKS):
        loaded = load_block(weight_ptr, scale_ptr, first_row, last_row, first + block * 128, K, FORMAT, TILES, 16, 8)
        blocks += (loaded,)  # type: ignore[assignment]
    return blocks


@triton.jit
def _part_operands(weights, FORMAT: tl.constexpr, BLOCKS: tl.constexpr):
    """The left operands of a part's blocks."""
    result = ()
    for block in tl.static_range(BLOCKS):
        result += (operands(weights[block], FORMAT),)  # type: ignore[assignment]
    return result


@triton.jit
def _sum_rows(
    weights,  # of each block: operands with KEPT, else codes
    scales,  # of each block, in the block format
    row_scales,  # [16 * TILES], in the row format
    multiplier,  # nvfp4
    x_ptr,  # at the part's first column
    squares_ptr,
    start,  # the first of BLOCK_R rows
    R,
    eps,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """float32 [16 * TILES, BLOCK_R]: the product of a part's blocks and some rows."""
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, start + tl.arange(0, BLOCK_R), R, K, GROUPS_BLOCK)
    place, column = thread_columns(BLOCK_R, FORMAT)
    x_at = x_ptr + (start + place).to(tl.int64) * K + column
    x = ()
    for block in tl.static_range(BLOCKS):
        x += (load_rows(x_at + block * 128, start + place < R, FORMAT),)  # type: ignore[assignment]
    total = tl.zeros((16 * TILES, BLOCK_R), tl.float32)
    for block in tl.static_range(BLOCKS):
        weight = weights[block] if KEPT else operands(weights[block], FORMAT)
        sums = sum_block(weight, row_operands(x[block], FORMAT), tl.zeros_like(total), FORMAT)
        # The fused multiply-add keeps Triton from adding inside the MMA, where the sum is truncated instead of rounded.
        if FORMAT == "block":
            total = tl.fma(sums, tl.broadcast_to(scales[block].to(tl.float32), sums.shape), total)
        else:
            total = tl.fma(sums, 1.0, total)
    if FORMAT == "row":
        total *= row_scales.to(tl.float32)[:, None]
    if FORMAT == "nvfp4":
        total *= E2M1_IN_MULTIPLIER
        total *= multiplier
    if squares_ptr is not None:
        total *= row_factors(squares, eps, K)[None, :]
    return total


@triton.jit
def parts_tile(
    program,  # index of the tile of 16 * TILES columns: all tiles of one part, then of the next
    x_ptr,
    squares_ptr,
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [PARTS, R, N]
    R,
    N,
    scale_stride,
    eps,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKED: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some columns of a linear over one part of K, by one warp and without shared memory; waits for the rows.

    All loads of the part's weights are issued before the wait. With CHUNKED there are more than BLOCK_R rows: chunks of
    so many are computed one after another with the weights that are loaded.
    """
    BLOCKS: tl.constexpr = K // 128 // PARTS
    tiles = (N + 16 * TILES - 1) // (16 * TILES)
    tile = program % tiles
    part = program // tiles
    first = part * (BLOCKS * 128)
    weights = _load_part(weight_ptr, scale_ptr, tile, first, N, K, FORMAT, BLOCKS, TILES)
    scales = ()
    if FORMAT == "block":
        scale_at = scale_ptr + tile * (16 * TILES) // BLOCK * (K // BLOCK) + part * BLOCKS
        for block in tl.static_range(BLOCKS):
            scales += (tl.load(scale_at + block),)  # type: ignore[assignment]
    row_scales = None
    if FORMAT == "row":
        n = tl.minimum(tile * (16 * TILES) + tl.arange(0, 16 * TILES), N - 1)
        row_scales = tl.load(scale_ptr + n * scale_stride)
    multiplier = tl.load(multiplier_ptr) if FORMAT == "nvfp4" else None
    x_ptr += first
    r = tl.arange(0, BLOCK_R)
    wait(DEPENDENT)
    start = 0
    if CHUNKED:
        # Decoded once, where there are registers for it.
        KEPT: tl.constexpr = BLOCKS * TILES <= 4
        weight = _part_operands(weights, FORMAT, BLOCKS) if KEPT else weights
        while start < R:
            total = _sum_rows(
                weight,
                scales,
                row_scales,
                multiplier,
                x_ptr,
                squares_ptr,
                start,
                R,
                eps,
                K,
                FORMAT,
                TILES,
                BLOCK_R,
                BLOCKS,
                GROUPS_BLOCK,
                KEPT,
            )
            store_tile(total, start + r, tile, part, out_ptr, R, N, 16 * TILES)
            start += BLOCK_R
    else:
        total = _sum_rows(
            weights,
            scales,
            row_scales,
            multiplier,
            x_ptr,
            squares_ptr,
            start,
            R,
            eps,
            K,
            FORMAT,
            TILES,
            BLOCK_R,
            BLOCKS,
            GROUPS_BLOCK,
            False,
        )
        store_tile(total, r, tile, part, out_ptr, R, N, 16 * TILES)


@triton.jit(do_not_specialize=["R"])
def float_parts_kernel(
    x_ptr,  # [R, K]
    squares_ptr,  # float32 [R, K/128], or None for rows without a pending norm division
    weight_ptr,  # this and the next five as in `linear_tile`
    scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [PARTS, R, N]
    N: tl.constexpr,
    scale_stride,
    R,
    eps,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKED: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    parts_tile(
        tl.program_id(0),
        x_ptr,
        squares_ptr,
        weight_ptr,
        scale_ptr,
        multiplier_ptr,
        out_ptr,
        R,
        N,
        scale_stride,
        eps,
        K,
        FORMAT,
        TILES,
        BLOCK_R,
        CHUNKED,
        PARTS,
        GROUPS_BLOCK,
        DEPENDENT,
    )


class TileLaunch(NamedTuple):
    """The tiles of a linear in a launch of a kernel that calls `parts_tile`, alone or with other work."""

    out: Tensor | None
    """float32 [parts, R, N], for the kernel to write."""
    programs: int
    arguments: tuple[Tensor | int | None, ...]
    """The kernel's arguments from `weight_ptr` to `scale_stride`."""
    constants: dict[str, int | str | bool | None]
    """The kernel's constexprs from K to GROUPS_BLOCK, and the warps and stages of a program."""

    @classmethod
    def of(cls, x: Tensor, weight: FloatWeight | None) -> "TileLaunch":
        """For rows x [R, K]; without a weight there are no tiles, and FORMAT is None."""
        num_rows, width = (0, PART_BLOCK) if weight is None else x.shape
        out, split, programs, kind = None, 1, 0, None
        tiles = 1
        arguments: tuple[Tensor | int | None, ...] = (None, None, None, None, 0, 0)
        if weight is not None:
            split, columns, kind = num_parts(width, weight), len(weight.codes), weight.kind
            if num_rows > _FEW_ROWS and width // PART_BLOCK // split <= 2:
                tiles = 2
            programs = ceil_div(columns, 16 * tiles) * split
            out = torch.empty((split, num_rows, columns), dtype=torch.float32, device=x.device)
            is_one_scale = weight.scale is None or weight.scale.numel() == 1
            arguments = weight.codes, weight.scale, weight.multiplier, out, columns, 0 if is_one_scale else 1
        constants = {
            "K": width,
            "FORMAT": kind,
            "PARTS": split,
            "TILES": tiles,
            "BLOCK_R": max(8, next_power_of_2(min(num_rows, _FEW_ROWS))),
            "CHUNKED": num_rows > _FEW_ROWS,
            "GROUPS_BLOCK": next_power_of_2(width // 128),
            "num_warps": 1,
            "num_stages": 1,
            # Without a limit the compiler saves registers by delaying the loads of rows, one memory round trip after
            # another.
            "maxnreg": 168 if num_rows <= _FEW_ROWS else 255,
        }
        return cls(out, programs, arguments, constants)


def float_parts(rows, weight):
    launch = TileLaunch.of(rows.x, weight)
    if len(rows.x):
        float_parts_kernel[(launch.programs,)](
            rows.x,
            rows.squares,
            *launch.arguments,
            len(rows.x),
            rows.eps,
            **launch.constants,
            **launch_options(_PARTS, f"{launch.arguments[4]}x{rows.x.shape[1]}"),
        )
    return cast(Tensor, launch.out)
