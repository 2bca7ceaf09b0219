"""The routed experts in Triton for weights stored as FP8 or NVFP4: gate_up, down, sum, as the neighbours do for BF16.

A stored number is, up to a factor that is applied to sums in float32, exactly a bfloat16 number: an E4M3 code has 4
significant bits, an E2M1 code times its E4M3 group scale 2 + 4, and the exponents fit. So tiles are decoded in
registers (`common/float_codes.py`) and go into bfloat16 MMAs with exact products. The weight is the left operand, since
only that one may stay in registers; rows of gate and up alternate in it, so that one tile gives both.

In decoding the first pair (row and slot) with an expert works for all pairs with it; in prefill pairs are grouped by
expert. Each block of K starts a new accumulator, whatever the rows: an order along K that is a constant of the format.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import dot_split, rounded, swiglu
from onebox.kernels.common.float_codes import E2M1_IN_MULTIPLIER, decode_e4m3, load_nvfp4
from onebox.kernels.common.float_weight import SCALE_BLOCK
from onebox.kernels.experts.prefill import BLOCK_M, block_pairs, group_by_expert
from onebox.kernels.experts.slots import pair_of_program, sharers, sharing, spread, sum_slots

__all__ = ["prefill_experts_fp8", "prefill_experts_nvfp4", "routed_experts_fp8", "routed_experts_nvfp4"]

BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _load_tile(
    weight_ptr,  # an expert's: uint8 [N, K], nvfp4: uint8 [N, K/2]
    scale_ptr,  # nvfp4, an expert's: uint8 [N, K/16]
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
def _dot_with_rows(
    x_ptrs,  # [1, M], each at the begin of a row of K numbers, bfloat16 or float32
    used,  # [1, M]
    weight_ptr,  # uint8 [E, PARTS * SIZE, K], nvfp4: [E, PARTS * SIZE, K/2]
    scale_ptr,  # block: [E, PARTS * ceil(SIZE/128), ceil(K/128)]; row: [E, PARTS * SIZE]; nvfp4: [E, .., K/16]
    multiplier_ptr,  # nvfp4: float32 [E, 3], from the first part's on
    expert,  # int64
    part,  # [BLOCK_N]
    n,  # [BLOCK_N], a row of the part
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # "block", "row" or "nvfp4"
    BLOCK_K: tl.constexpr,  # divides 128 in the block format
):
    """float32 [BLOCK_N, M]: weight rows (part, n) of an expert times the rows of x. Nonsense where n >= SIZE."""
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
        # A product and a sum in one keep Triton from adding inside the MMA, whose adder cuts off instead of rounding.
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
def _gate_up_inner(
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
    """(inner columns [BLOCK_N / 2, 1] of the block, SiLU(gate) * up for them, float32 [BLOCK_N / 2, M])."""
    row = tl.arange(0, BLOCK_N)
    total = _dot_with_rows(
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


@triton.jit(do_not_specialize=["num_pairs"])
def experts_float_gate_up_kernel(
    x_ptr,  # [R, H]
    ids_ptr,  # int32 [R, SLOTS]
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    inner_ptr,  # float32 [R * SLOTS, I]
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
):
    block = tl.program_id(0)
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        place_pair = spread(found, tl.arange(0, ROWS), ROWS)[None, :]
        used = place_pair < num_pairs
        column, inner = _gate_up_inner(
            x_ptr + (place_pair // SLOTS) * H,
            used,
            weight_ptr,
            scale_ptr,
            multiplier_ptr,
            expert.to(tl.int64),
            block,
            H,
            I,
            FORMAT,
            BLOCK_N,
            BLOCK_K,
        )
        tl.store(inner_ptr + place_pair * I + column, inner, mask=used & (column < I))
        pair = following


@triton.jit(do_not_specialize=["num_pairs"])
def experts_float_down_kernel(
    inner_ptr,  # float32 [P, I]
    ids_ptr,  # int32 [P]
    weights_ptr,  # float32 [P]
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [P, H]
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        place_pair = spread(found, tl.arange(0, ROWS), ROWS)[None, :]
        used = place_pair < num_pairs
        total = _dot_with_rows(
            inner_ptr + place_pair * I,
            used,
            weight_ptr,
            scale_ptr,
            multiplier_ptr,
            expert.to(tl.int64),
            tl.zeros_like(n),
            n,
            1,
            H,
            I,
            FORMAT,
            BLOCK_K,
        )
        share = tl.load(weights_ptr + place_pair, mask=used, other=0.0)
        tl.store(out_ptr + place_pair * H + n[:, None], total * share, mask=used & (n < H)[:, None])
        pair = following


@triton.jit
def experts_float_prefill_gate_up_kernel(
    x_ptr,  # bfloat16 [T, H]
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    inner_ptr,  # bfloat16 [T * SLOTS, I]
    pairs_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, tl.program_id(1), BLOCK_M)
    column, inner = _gate_up_inner(
        x_ptr + (pair // SLOTS)[None, :] * H,
        used[None, :],
        weight_ptr,
        scale_ptr,
        multiplier_ptr,
        expert,
        tl.program_id(0),
        H,
        I,
        FORMAT,
        BLOCK_N,
        BLOCK_K,
    )
    place = inner_ptr + pair[None, :] * I + column
    tl.store(place, rounded(inner, tl.bfloat16), mask=used[None, :] & (column < I))


@triton.jit
def experts_float_prefill_down_kernel(
    inner_ptr,  # bfloat16 [P, I]
    weights_ptr,  # float32 [P]
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    slots_ptr,  # float32 [P, H]
    pairs_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, tl.program_id(1), BLOCK_M)
    total = _dot_with_rows(
        inner_ptr + pair[None, :] * I,
        used[None, :],
        weight_ptr,
        scale_ptr,
        multiplier_ptr,
        expert,
        tl.zeros_like(n),
        n,
        1,
        H,
        I,
        FORMAT,
        BLOCK_K,
    )
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0)
    place = slots_ptr + pair[None, :] * H + n[:, None]
    tl.store(place, total * weight[None, :], mask=used[None, :] & (n < H)[:, None])


class Weight(NamedTuple):
    """The stored matrices [E, ...] as the kernels take them."""

    kind: str  # the kernels' FORMAT
    gate_up: tuple[Tensor, Tensor, Tensor | None]  # codes, scale, multiplier
    down: tuple[Tensor, Tensor, Tensor | None]


def _fp8(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Weight:
    kind = "block" if gate_up_scale.ndim == 3 else "row"
    codes = gate_up.view(torch.uint8), down.view(torch.uint8)
    return Weight(kind, (codes[0], gate_up_scale, None), (codes[1], down_scale, None))


def _nvfp4(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, multipliers: Tensor) -> Weight:
    scales = gate_up_scale.view(torch.uint8), down_scale.view(torch.uint8)
    return Weight("nvfp4", (gate_up, scales[0], multipliers), (down, scales[1], multipliers[:, 2:]))


def _decode(x: Tensor, ids: Tensor, weights: Tensor, weight: Weight, inner_size: int) -> Tensor:
    (rows, k), hidden = ids.shape, x.shape[1]
    inner = torch.empty((rows * k, inner_size), dtype=torch.float32, device=x.device)
    slots = torch.empty((rows, k, hidden), dtype=torch.float32, device=x.device)
    shape = {
        "H": hidden,
        "I": inner_size,
        "FORMAT": weight.kind,
        "BLOCK_N": 32,  # with two warps: `mma.sync` on every GPU
        "ROWS": 8,
        "num_warps": 2,
        "num_stages": 4,
        **sharing(ids),
    }
    # 128 bytes of a weight row at a time; with float32 numbers, in three parts, NVFP4 would spill.
    block_k = 256 if weight.kind == "nvfp4" and x.dtype == torch.bfloat16 else 128
    experts_float_gate_up_kernel[(triton.cdiv(inner_size, 16), rows * k)](
        x, ids, *weight.gate_up, inner, rows * k, SLOTS=k, BLOCK_K=block_k, **shape
    )
    experts_float_down_kernel[(triton.cdiv(hidden, 32), rows * k)](
        inner, ids, weights, *weight.down, slots, rows * k, BLOCK_K=128, **shape
    )
    return sum_slots(slots, torch.float32)


def _prefill(x: Tensor, ids: Tensor, weights: Tensor, weight: Weight, inner_size: int) -> Tensor:
    hidden, experts = x.shape[1], weight.down[0].shape[0]
    blocks = group_by_expert(ids, experts)
    inner = torch.empty((ids.numel(), inner_size), dtype=torch.bfloat16, device=x.device)
    slots = torch.empty((*ids.shape, hidden), dtype=torch.float32, device=x.device)
    shape = {
        "H": hidden,
        "I": inner_size,
        "FORMAT": weight.kind,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
        "num_warps": 4,
        "num_stages": 3,
    }
    experts_float_prefill_gate_up_kernel[(triton.cdiv(inner_size, 64), len(blocks.expert))](
        x, *weight.gate_up, inner, *blocks, experts, SLOTS=ids.shape[1], **shape
    )
    experts_float_prefill_down_kernel[(triton.cdiv(hidden, 128), len(blocks.expert))](
        inner, weights, *weight.down, slots, *blocks, experts, **shape
    )
    return sum_slots(slots, x.dtype)


def routed_experts_fp8(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    return _decode(x, ids, weights, _fp8(gate_up, gate_up_scale, down, down_scale), down.shape[2])


def routed_experts_nvfp4(x, ids, weights, gate_up, gate_up_scale, down, down_scale, multipliers):
    weight = _nvfp4(gate_up, gate_up_scale, down, down_scale, multipliers)
    return _decode(x, ids, weights, weight, 2 * down.shape[2])


def prefill_experts_fp8(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    return _prefill(x, ids, weights, _fp8(gate_up, gate_up_scale, down, down_scale), down.shape[2])


def prefill_experts_nvfp4(x, ids, weights, gate_up, gate_up_scale, down, down_scale, multipliers):
    weight = _nvfp4(gate_up, gate_up_scale, down, down_scale, multipliers)
    return _prefill(x, ids, weights, weight, 2 * down.shape[2])
