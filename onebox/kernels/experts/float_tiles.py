"""Tiles of FP8 and NVFP4 experts, decoded and multiplied, for the decode and prefill kernels.

A stored number is, up to a factor that is applied to sums in float32, exactly a bfloat16 number: an E4M3 code has 4
significant bits, an E2M1 code times its E4M3 scale 2 + 4, and the exponents fit. So tiles are decoded in registers
(`common/float_codes.py`) and enter bfloat16 MMAs with exact products. The weight is the left operand, the only one that
may stay in registers; gate and up rows alternate in it, so that one tile gives both.

Each block of K starts a new accumulator, for any number of rows: the order along K is a constant of the format.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import dot_split, swiglu
from onebox.kernels.common.float_codes import E2M1_IN_MULTIPLIER, decode_e4m3, load_nvfp4
from onebox.kernels.common.float_weight import SCALE_BLOCK

__all__ = ["StoredExperts", "bf16_experts", "dot_with_rows", "fp8_experts", "gate_up_inner", "nvfp4_experts"]

BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _load_tile(
    weight_ptr,  # of one expert: uint8 [N, K], nvfp4: uint8 [N, K/2]
    scale_ptr,  # nvfp4, of one expert: uint8 [N, K/16]
    row,  # [BLOCK_N]
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns first .. first + BLOCK_K of weight rows, bfloat16 [BLOCK_N, BLOCK_K]; nvfp4: 2^8 too small."""
    if FORMAT == "nvfp4":
        tile = load_nvfp4(weight_ptr, scale_ptr, row, first, N, K, BLOCK_K)
    else:
        k = first + tl.arange(0, BLOCK_K)
        inside = (row < N)[:, None] & (k < K)[None, :]
        tile = decode_e4m3(tl.load(weight_ptr + row[:, None] * K + k[None, :], mask=inside, other=0))
    return tile


@triton.jit
def dot_with_rows(
    x_ptrs,  # [1, M], each to the start of a row of K numbers, bfloat16 or float32
    used,  # [1, M]
    weight_ptr,  # uint8 [E, PARTS * SIZE, K], nvfp4: [E, PARTS * SIZE, K/2]
    scale_ptr,  # block: [E, PARTS * ceil(SIZE/128), ceil(K/128)]; row: [E, PARTS * SIZE]; nvfp4: [E, .., K/16]
    multiplier_ptr,  # nvfp4: float32 [E, 3], at the matrix of part 0
    expert,  # int64
    part,  # [BLOCK_N]
    n,  # [BLOCK_N], a row of the part
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # "block", "row" or "nvfp4"
    BLOCK_K: tl.constexpr,  # divides 128 in the block format
):
    """float32 [BLOCK_N, M]: weight rows (part, n) of an expert times the rows of x; undefined where n >= SIZE.

    `part` selects one of the stacked matrices: gate or up of gate_up.
    """
    N: tl.constexpr = PARTS * SIZE
    row = part * SIZE + n
    if FORMAT == "block":
        block = part * ((SIZE + BLOCK - 1) // BLOCK) + n // BLOCK
        factor_row = expert * (PARTS * ((SIZE + BLOCK - 1) // BLOCK)) + block
        factor_ptrs = scale_ptr + factor_row * ((K + BLOCK - 1) // BLOCK)
    elif FORMAT == "row":
        factor_ptrs = scale_ptr + expert * N + row
    else:
        factor_ptrs = multiplier_ptr + expert * 3 + part
        scale_ptr += expert * (N * (K // 16))
    weight_ptr += expert * (N * (K // 2 if FORMAT == "nvfp4" else K))

    total = tl.zeros((n.shape[0], used.shape[1]), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptrs + k[:, None], mask=used & (k < K)[:, None], other=0.0)
        tile = _load_tile(weight_ptr, scale_ptr, row, first, N, K, FORMAT, BLOCK_K)
        dots = dot_split(tile, x, tl.zeros_like(total))
        # The fused multiply-add keeps Triton from adding inside the MMA, where the sum is truncated instead of rounded.
        if FORMAT == "block":
            factor = tl.load(factor_ptrs + first // BLOCK, mask=n < SIZE, other=0.0).to(tl.float32)
            total = tl.fma(dots, tl.broadcast_to(factor[:, None], dots.shape), total)
        else:
            total = tl.fma(dots, 1.0, total)
    if FORMAT == "nvfp4":
        total *= E2M1_IN_MULTIPLIER
    if FORMAT != "block":
        total *= tl.load(factor_ptrs, mask=n < SIZE, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def gate_up_inner(
    x_ptrs,
    used,
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    expert,
    block,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(inner columns [BLOCK_N / 2, 1] of the block, their SiLU(gate) * up, float32 [BLOCK_N / 2, M])."""
    row = tl.arange(0, BLOCK_N)
    total = dot_with_rows(
        x_ptrs,
        used,
        weight_ptr,
        scale_ptr,
        multiplier_ptr,
        expert,
        row % 2,
        block * (BLOCK_N // 2) + row // 2,
        2,
        I,
        H,
        FORMAT,
        BLOCK_K,
    )
    gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_N // 2, 2, used.shape[1])), (0, 2, 1)))
    return (block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2))[:, None], swiglu(gate, up)


class StoredExperts(NamedTuple):
    """The stored matrices [E, ...] as arguments of the kernels."""

    kind: str  # the kernels' FORMAT
    gate_up: tuple[Tensor, Tensor | None, Tensor | None]  # codes, scale, multiplier
    down: tuple[Tensor, Tensor | None, Tensor | None]


def bf16_experts(gate_up: Tensor, down: Tensor) -> StoredExperts:
    return StoredExperts("bf16", (gate_up, None, None), (down, None, None))


def fp8_experts(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> StoredExperts:
    kind = "block" if gate_up_scale.ndim == 3 else "row"
    codes = gate_up.view(torch.uint8), down.view(torch.uint8)
    return StoredExperts(kind, (codes[0], gate_up_scale, None), (codes[1], down_scale, None))


def nvfp4_experts(
    gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, multipliers: Tensor
) -> StoredExperts:
    scales = gate_up_scale.view(torch.uint8), down_scale.view(torch.uint8)
    return StoredExperts("nvfp4", (gate_up, scales[0], multipliers), (down, scales[1], multipliers[:, 2:]))
