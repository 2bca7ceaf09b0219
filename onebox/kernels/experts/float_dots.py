"""Rows of a float expert's matrix times a few rows, block after block, for gate_up and down of a decode step."""

import triton
import triton.language as tl

from onebox.kernels.common.dependent import wait
from onebox.kernels.common.float_codes import E2M1_IN_MULTIPLIER
from onebox.kernels.float_linear.fragments import load_block, load_rows, operands, row_operands, sum_block

__all__ = ["expert_dot", "expert_weights", "factor_pointers"]


@triton.jit
def _load_blocks(
    weight_ptr,
    scale_ptr,
    first_row,
    block,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
    SECOND: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The codes of UNROLL blocks, all loads issued before the first is used."""
    loaded = ()
    for i in tl.static_range(UNROLL):
        column = (block + i) * 128
        own = load_block(weight_ptr, scale_ptr, first_row, None, column, K, FORMAT, TILES, STEP, SECOND)
        loaded += (own,)  # type: ignore[assignment]
    return loaded


@triton.jit
def _add_blocks(
    total,
    weights,
    factor_ptrs,
    x_at,
    is_there,
    block,
    FORMAT: tl.constexpr,
    TERMS: tl.constexpr,
    TERM_STRIDE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Total plus the products of UNROLL blocks with loaded weights, one after another, the smallest term first."""
    for i in tl.static_range(UNROLL):
        weight = operands(weights[i], FORMAT)
        sums = tl.zeros_like(total)
        for term in tl.static_range(TERMS - 1, -1, -1):
            x = load_rows(x_at + term * TERM_STRIDE + (block + i) * 128, is_there, FORMAT)
            sums = sum_block(weight, row_operands(x, FORMAT), sums, FORMAT)
        # The fused multiply-add keeps Triton from adding inside the MMA, where the sum is truncated instead of rounded.
        if FORMAT == "block":
            factor = tl.load(factor_ptrs + block + i).to(tl.float32)
            total = tl.fma(sums, tl.broadcast_to(factor[:, None], sums.shape), total)
        else:
            total = tl.fma(sums, 1.0, total)
    return total


@triton.jit
def expert_dot(
    weight_ptr,  # of one expert: uint8 [N, K], nvfp4: uint8 [N, K/2], bf16: bfloat16 [N, K]
    scale_ptr,  # nvfp4, of one expert: uint8 [N, K/16]
    factor_ptrs,  # [16 * TILES]: block: each row's first scale; row: its scale; nvfp4: its multiplier
    first_row,
    x_at,  # [4 * ROWS, 8], of `thread_columns`
    is_there,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
    SECOND: tl.constexpr,
    TERMS: tl.constexpr,
    TERM_STRIDE: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """float32 [16 * TILES, ROWS]: matrix rows of an expert times rows of x; waits for x after its first loads."""
    BLOCKS: tl.constexpr = K // 128
    total = tl.zeros((16 * TILES, x_at.shape[0] // 4), tl.float32)
    weights = _load_blocks(weight_ptr, scale_ptr, first_row, 0, K, FORMAT, TILES, STEP, SECOND, UNROLL)
    if FORMAT == "row" or FORMAT == "nvfp4":
        factor = tl.load(factor_ptrs).to(tl.float32)
    wait(DEPENDENT)
    total = _add_blocks(total, weights, factor_ptrs, x_at, is_there, 0, FORMAT, TERMS, TERM_STRIDE, UNROLL)
    for block in tl.range(UNROLL, BLOCKS, UNROLL, num_stages=1):
        weights = _load_blocks(weight_ptr, scale_ptr, first_row, block, K, FORMAT, TILES, STEP, SECOND, UNROLL)
        total = _add_blocks(total, weights, factor_ptrs, x_at, is_there, block, FORMAT, TERMS, TERM_STRIDE, UNROLL)
    if FORMAT == "nvfp4":
        total *= E2M1_IN_MULTIPLIER
    if FORMAT == "row" or FORMAT == "nvfp4":
        total *= factor[:, None]
    return total


@triton.jit
def expert_weights(weight_ptr, expert, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr):
    """The weights of one expert."""
    return weight_ptr + expert.to(tl.int64) * (N * (K // 2 if FORMAT == "nvfp4" else K))


@triton.jit
def factor_pointers(
    scale_ptr,  # block: [E, PARTS * SIZE / 128, K / 128]; row: [E, PARTS * SIZE]
    multiplier_ptr,  # nvfp4: float32 [E, 3], at the matrix of part 0
    expert,
    part,  # [rows]: gate 0, up 1
    row,  # [rows], of the part
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """`factor_ptrs` of `expert_dot`."""
    if FORMAT == "block":
        result = scale_ptr + ((expert * PARTS + part) * (SIZE // 128) + row // 128) * (K // 128)
    elif FORMAT == "row":
        result = scale_ptr + (expert * PARTS + part) * SIZE + row
    elif FORMAT == "nvfp4":
        result = multiplier_ptr + expert * 3 + part
    else:
        result = row
    return result
