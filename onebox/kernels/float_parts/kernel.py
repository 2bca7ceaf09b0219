"""The float linears as parts, in Triton: a warp for 16 columns and a part of K, two weights beside each other."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.dependent import dependent, release, wait
from onebox.kernels.float_linear.kernel import BLOCK, USES_ASM, decode_e4m3, dot, linear_tile, store_tile
from onebox.kernels.float_linear.tiles import PART_BLOCK, FloatWeight, num_parts
from onebox.kernels.int_linear.kernel import row_factors
from onebox.kernels.rows import FixedRows

__all__ = ["float_parts", "parts_arguments", "parts_tile"]


@triton.jit
def _weight_operand(weight):
    """[16, 64] with its columns permuted, so that what a thread loads is what its MMA takes.

    A thread loads 16 neighbouring columns of a row, and an MMA takes four neighbours of each thread. Weights and rows
    go through the same permutation, so their product does not change.
    """
    split = tl.reshape(weight, (16, 4, 4, 4))  # row t s j
    return tl.reshape(tl.permute(split, (0, 2, 1, 3)), (16, 64))  # row | s t j


@triton.jit
def _row_operand(low, high, ROWS: tl.constexpr):
    """[64, ROWS] in the order of `_weight_operand`, from each thread's first eight of its 16 columns and its last."""
    split = tl.reshape(tl.join(low, high), (ROWS, 4, 2, 4, 2))  # row t s j half
    return tl.reshape(tl.permute(split, (4, 2, 1, 3, 0)), (64, ROWS))  # half s t j | row


@triton.jit
def _half_dot(weight, x_at, is_there, total, FORMAT: tl.constexpr, BLOCK_R: tl.constexpr, ASM: tl.constexpr):
    """The sum of total and 64 columns of weights times the rows."""
    low = tl.load(x_at, mask=is_there, other=0.0)
    high = tl.load(x_at + 8, mask=is_there, other=0.0)
    if FORMAT != "bf16":
        weight = decode_e4m3(weight, ASM)
    return dot(_weight_operand(weight), _row_operand(low, high, BLOCK_R), total)


@triton.jit
def _fragment_tile(
    program,
    x_ptr,
    squares_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,  # float32 [SPLIT, R, N]
    R,
    N,
    scale_stride,
    eps,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """16 columns of a linear over one part of K, by one warp and without shared memory.

    All of the part's weights are under way before it waits for the rows.
    """
    BLOCKS: tl.constexpr = K // 128 // SPLIT
    tiles = (N + 15) // 16
    tile = program % tiles
    part = program // tiles
    n = tile * 16 + tl.arange(0, 16)
    inside = (n < N)[:, None]
    at = weight_ptr + n.to(tl.int64)[:, None] * K + part * (BLOCKS * 128) + tl.arange(0, 64)[None, :]
    weights = ()
    for half in tl.static_range(2 * BLOCKS):
        codes = tl.load(at + half * 64, mask=inside, other=0, eviction_policy="evict_first")
        weights += (codes,)  # type: ignore[assignment]
    scale_at = scale_ptr
    if FORMAT == "block":
        scale_at = scale_ptr + tile * 16 // BLOCK * (K // BLOCK) + part * BLOCKS
    threads = tl.arange(0, BLOCK_R * 4)[:, None]
    x_at = x_ptr + (threads // 4).to(tl.int64) * K + part * (BLOCKS * 128) + threads % 4 * 16 + tl.arange(0, 8)[None, :]
    is_there = threads // 4 < R
    total = tl.zeros((16, BLOCK_R), tl.float32)
    wait(DEPENDENT)
    for block in tl.static_range(BLOCKS):
        here = x_at + block * 128
        sums = _half_dot(weights[2 * block], here, is_there, tl.zeros_like(total), FORMAT, BLOCK_R, ASM)
        sums = _half_dot(weights[2 * block + 1], here + 64, is_there, sums, FORMAT, BLOCK_R, ASM)
        if FORMAT == "block":
            sums *= tl.load(scale_at + block).to(tl.float32)
        total += sums
    r = tl.arange(0, BLOCK_R)
    if FORMAT == "row":
        total *= tl.load(scale_ptr + n * scale_stride, n < N, other=0.0).to(tl.float32)[:, None]
    if squares_ptr is not None:
        total *= row_factors(squares_ptr, r, R, eps, K, GROUPS_BLOCK)[None, :]
    store_tile(total, r, tile, part, out_ptr, R, N, 16)


@triton.jit
def _plain_tile(
    program,
    x_ptr,
    squares_ptr,
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,
    R,
    N,
    eps,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The same through the tiles of `float_linear`, for formats and widths that have no fragments."""
    wait(DEPENDENT)
    r = tl.arange(0, BLOCK_R)
    tiles = (N + 15) // 16
    total = linear_tile(
        r,
        program % tiles,
        program // tiles,
        x_ptr,
        weight_ptr,
        scale_ptr,
        multiplier_ptr,
        R,
        N,
        K,
        1,
        K,
        FORMAT,
        16,
        BLOCK_R,
        BLOCK_K,
        SPLIT,
        ASM,
    )
    if squares_ptr is not None:
        total *= row_factors(squares_ptr, r, R, eps, K, GROUPS_BLOCK)[None, :]
    store_tile(total, r, program % tiles, program // tiles, out_ptr, R, N, 16)


@triton.jit
def parts_tile(
    program,  # which of the tiles of 16 columns, of one part after the other
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
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of a linear's parts, in whatever way its format has; waits for the rows."""
    if FORMAT == "nvfp4":
        _plain_tile(
            program,
            x_ptr,
            squares_ptr,
            weight_ptr,
            scale_ptr,
            multiplier_ptr,
            out_ptr,
            R,
            N,
            eps,
            K,
            FORMAT,
            BLOCK_R,
            BLOCK_K,
            SPLIT,
            GROUPS_BLOCK,
            ASM,
            DEPENDENT,
        )
    else:
        _fragment_tile(
            program,
            x_ptr,
            squares_ptr,
            weight_ptr,
            scale_ptr,
            out_ptr,
            R,
            N,
            scale_stride,
            eps,
            K,
            FORMAT,
            BLOCK_R,
            SPLIT,
            GROUPS_BLOCK,
            ASM,
            DEPENDENT,
        )


@triton.jit(do_not_specialize=["R"])
def float_parts_kernel(
    x_ptr,  # [R, K]
    squares_ptr,  # float32 [R, K/128], or None for rows that have their length already
    weight_ptr,  # this and the next five: as in `linear_tile`
    scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [SPLIT, R, N]
    N,
    scale_stride,
    other_weight_ptr,  # the same of the second weight
    other_scale_ptr,
    other_multiplier_ptr,
    other_out_ptr,
    OTHER_N,
    other_scale_stride,
    R,
    eps,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    OTHER_FORMAT: tl.constexpr,
    SPLIT: tl.constexpr,
    OTHER_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    program = tl.program_id(0)
    programs = (N + 15) // 16 * SPLIT
    if program < programs:
        parts_tile(
            program,
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
            BLOCK_R,
            BLOCK_K,
            SPLIT,
            GROUPS_BLOCK,
            ASM,
            DEPENDENT,
        )
    elif OTHER_FORMAT is not None:
        parts_tile(
            program - programs,
            x_ptr,
            squares_ptr,
            other_weight_ptr,
            other_scale_ptr,
            other_multiplier_ptr,
            other_out_ptr,
            R,
            OTHER_N,
            other_scale_stride,
            eps,
            K,
            OTHER_FORMAT,
            BLOCK_R,
            BLOCK_K,
            OTHER_SPLIT,
            GROUPS_BLOCK,
            ASM,
            DEPENDENT,
        )


def float_parts(rows: FixedRows, weights: tuple[FloatWeight, ...]) -> tuple[Tensor, ...]:
    """See `onebox.kernels.float_parts.float_parts`."""
    x = rows.x
    num_rows, width = x.shape
    splits = [num_parts(width, weight) for weight in weights]
    outs = tuple(
        torch.empty((split, num_rows, len(weight.codes)), dtype=torch.float32, device=x.device)
        for weight, split in zip(weights, splits, strict=True)
    )
    if not num_rows:
        return outs
    first, other = weights[0], weights[-1]
    programs = sum(-(-len(weight.codes) // 16) * split for weight, split in zip(weights, splits, strict=True))
    float_parts_kernel[(programs,)](
        x,
        rows.squares,
        *parts_arguments(first, outs[0]),
        *parts_arguments(other, outs[-1]),
        num_rows,
        rows.eps,
        K=width,
        FORMAT=first.kind,
        OTHER_FORMAT=other.kind if len(weights) > 1 else None,
        SPLIT=splits[0],
        OTHER_SPLIT=splits[-1],
        BLOCK_R=max(8, triton.next_power_of_2(num_rows)),
        BLOCK_K=PART_BLOCK,
        GROUPS_BLOCK=triton.next_power_of_2(width // 128),
        ASM=USES_ASM,
        num_warps=1,
        num_stages=1,
        **dependent(x, "float_pair" if len(weights) > 1 else "float_parts"),
    )
    return outs


def parts_arguments(weight: FloatWeight, out: Tensor) -> tuple[Tensor | int | None, ...]:
    is_shared = weight.scale is None or weight.scale.numel() == 1
    return weight.codes, weight.scale, weight.multiplier, out, len(weight.codes), 0 if is_shared else 1
