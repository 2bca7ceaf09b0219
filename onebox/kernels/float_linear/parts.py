"""The float linears as parts (partial sums over slices of K), in Triton: one warp per 16 columns and part.

`parts_tile` is also called by kernels that compute a linear in the same launch as other work (`TileLaunch`).
"""

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import dot_split
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import load_squares, row_factors
from onebox.kernels.common.float_codes import decode_e4m3
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.launch import next_power_of_2
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.float_linear.kernel import BLOCK, linear_tile, store_tile
from onebox.kernels.float_linear.tiles import PART_BLOCK, num_parts

__all__ = ["TileLaunch", "float_parts", "parts_tile"]

_PARTS = Tunable("float_parts")


@triton.jit
def _byte_operand(weight):
    """One-byte weights [16, 64] with permuted columns: each thread loads exactly its elements of the MMA operand.

    A thread loads 16 neighbouring columns of a row, and an MMA takes four neighbours from each thread. Weights and rows
    use the same permutation, so their product does not change.
    """
    split = tl.reshape(weight, (16, 4, 4, 4))  # row t s j
    return tl.reshape(tl.permute(split, (0, 2, 1, 3)), (16, 64))  # row | s t j


@triton.jit
def _pair_operand(low, high):
    """Two-byte weights [16, 64], permuted likewise, from each thread's first and last 8 columns, each [64, 8]."""
    split = tl.reshape(tl.join(low, high), (16, 4, 2, 4, 2))  # row t s j half
    return tl.reshape(tl.permute(split, (0, 4, 2, 1, 3)), (16, 64))  # row | half s t j


@triton.jit
def _row_operand(low, high, ROWS: tl.constexpr):
    """Rows, [64, ROWS] in the order of the weights' operand, from columns as in `_pair_operand`: [4 * ROWS, 8]."""
    split = tl.reshape(tl.join(low, high), (ROWS, 4, 2, 4, 2))  # row t s j half
    return tl.reshape(tl.permute(split, (4, 2, 1, 3, 0)), (64, ROWS))  # half s t j | row


@triton.jit
def _load_halves(weight_ptr, tile, first, N, K: tl.constexpr, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    """(codes,) or (low, high) of COUNT blocks of 64 columns of 16 rows from `first` on, all loads issued at once."""
    halves = ()
    if FORMAT == "bf16":
        threads = tl.arange(0, 64)[:, None]
        n = tile * 16 + threads // 4
        at = weight_ptr + n.to(tl.int64) * K + first + threads % 4 * 16 + tl.arange(0, 8)[None, :]
        for half in tl.static_range(COUNT):
            low = tl.load(at + half * 64, mask=n < N, other=0.0, eviction_policy="evict_first")
            high = tl.load(at + half * 64 + 8, mask=n < N, other=0.0, eviction_policy="evict_first")
            halves += ((low, high),)  # type: ignore[assignment]
    else:
        n = tile * 16 + tl.arange(0, 16)[:, None]
        at = weight_ptr + n.to(tl.int64) * K + first + tl.arange(0, 64)[None, :]
        for half in tl.static_range(COUNT):
            codes = tl.load(at + half * 64, mask=n < N, other=0, eviction_policy="evict_first")
            halves += ((codes,),)  # type: ignore[assignment]
    return halves


@triton.jit
def _load_rows(x_at, is_there, COUNT: tl.constexpr):
    """(low, high) of COUNT blocks of 64 columns of the rows."""
    halves = ()
    for half in tl.static_range(COUNT):
        low = tl.load(x_at + half * 64, mask=is_there, other=0.0)
        high = tl.load(x_at + half * 64 + 8, mask=is_there, other=0.0)
        halves += ((low, high),)  # type: ignore[assignment]
    return halves


@triton.jit
def _half_dot(weight, x, total, FORMAT: tl.constexpr, BLOCK_R: tl.constexpr):
    """Total plus the product of 64 columns of weights and rows."""
    rows = _row_operand(x[0], x[1], BLOCK_R)
    if FORMAT == "bf16":
        result = dot_split(_pair_operand(weight[0], weight[1]), rows, total)
    else:
        codes = decode_e4m3(weight[0])
        result = dot_split(_byte_operand(codes), rows, total)
    return result


@triton.jit
def _fragment_tile(
    program,
    x_ptr,
    squares_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,  # float32 [PARTS, R, N]
    R,
    N,
    scale_stride,
    eps,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """16 columns of a linear over one part of K, by one warp and without shared memory.

    All loads of the part's weights are issued before the wait for the rows.
    """
    BLOCKS: tl.constexpr = K // 128 // PARTS
    tiles = (N + 15) // 16
    tile = program % tiles
    part = program // tiles
    weights = _load_halves(weight_ptr, tile, part * (BLOCKS * 128), N, K, FORMAT, 2 * BLOCKS)
    if FORMAT == "block":
        scale_at = scale_ptr + tile * 16 // BLOCK * (K // BLOCK) + part * BLOCKS
        scales = ()
        for block in tl.static_range(BLOCKS):
            scales += (tl.load(scale_at + block),)  # type: ignore[assignment]
    if FORMAT == "row":
        n = tile * 16 + tl.arange(0, 16)
        row_scales = tl.load(scale_ptr + n * scale_stride, n < N, other=0.0)
    threads = tl.arange(0, BLOCK_R * 4)[:, None]
    x_at = x_ptr + (threads // 4).to(tl.int64) * K + part * (BLOCKS * 128) + threads % 4 * 16 + tl.arange(0, 8)[None, :]
    is_there = threads // 4 < R
    total = tl.zeros((16, BLOCK_R), tl.float32)
    r = tl.arange(0, BLOCK_R)
    wait(DEPENDENT)
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, r, R, K, GROUPS_BLOCK)
    x = _load_rows(x_at, is_there, 2 * BLOCKS)
    for block in tl.static_range(BLOCKS):
        sums = _half_dot(weights[2 * block], x[2 * block], tl.zeros_like(total), FORMAT, BLOCK_R)
        sums = _half_dot(weights[2 * block + 1], x[2 * block + 1], sums, FORMAT, BLOCK_R)
        if FORMAT == "block":
            sums *= scales[block].to(tl.float32)
        total += sums
    if FORMAT == "row":
        total *= row_scales.to(tl.float32)[:, None]
    if squares_ptr is not None:
        total *= row_factors(squares, eps, K)[None, :]
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
    PARTS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """16 columns of a linear over one part of K by `linear_tile`, for NVFP4, which has no fragment layout."""
    wait(DEPENDENT)
    r = tl.arange(0, BLOCK_R)
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, r, R, K, GROUPS_BLOCK)
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
        PARTS,
    )
    if squares_ptr is not None:
        total *= row_factors(squares, eps, K)[None, :]
    store_tile(total, r, program % tiles, program // tiles, out_ptr, R, N, 16)


@triton.jit
def parts_tile(
    program,  # index of the tile of 16 columns: all tiles of one part, then of the next
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
    PARTS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of a linear's parts; waits for the rows."""
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
            PARTS,
            GROUPS_BLOCK,
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
            PARTS,
            GROUPS_BLOCK,
            DEPENDENT,
        )


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
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
        BLOCK_R,
        BLOCK_K,
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
        arguments: tuple[Tensor | int | None, ...] = (None, None, None, None, 0, 0)
        if weight is not None:
            split, columns, kind = num_parts(width, weight), len(weight.codes), weight.kind
            programs = -(-columns // 16) * split
            out = torch.empty((split, num_rows, columns), dtype=torch.float32, device=x.device)
            is_one_scale = weight.scale is None or weight.scale.numel() == 1
            arguments = weight.codes, weight.scale, weight.multiplier, out, columns, 0 if is_one_scale else 1
        constants = {
            "K": width,
            "FORMAT": kind,
            "PARTS": split,
            "BLOCK_R": max(8, next_power_of_2(num_rows)),
            "BLOCK_K": PART_BLOCK,
            "GROUPS_BLOCK": next_power_of_2(width // 128),
            "num_warps": 1,
            "num_stages": 1,
            # Without a limit the compiler saves registers by delaying the loads of rows, one memory round trip after
            # another.
            "maxnreg": 168 if num_rows <= 16 else 255,
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
