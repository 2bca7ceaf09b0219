"""Routed experts of a decode step in Triton, bfloat16 weights: gate_up, down, sum over a row's slots.

The inner values enter the down MMA as three bfloat16 terms, 24 bits in total.
"""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import dot_bf16, swiglu
from onebox.kernels.common.launch import ceil_div
from onebox.kernels.experts.slots import pair_of_program, sharers, sharing, spread, sum_slots, workspace

__all__ = ["routed_experts_bf16"]


@triton.jit
def _add(total, dots):
    """The sum of both, rounded to nearest, written so that Triton does not fold it into the MMA that computed `dots`.

    Tensor cores truncate when they add to an accumulator; hundreds of truncations, all towards zero, would be a visible
    difference from the twin. So each block along K starts a new accumulator.
    """
    return tl.fma(dots, 1.0, total)


@triton.jit(do_not_specialize=["num_pairs"])
def experts_gate_up_bf16_kernel(
    x_ptr,  # bfloat16 [R, H]
    ids_ptr,  # int32 [R, SLOTS]
    gate_up_ptr,  # bfloat16 [E, 2I, H]
    inner_ptr,  # float32 [R * SLOTS, I]
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
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

    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gate_ptrs = gate_up_ptr + (expert.to(tl.int64) * (2 * I) + n)[:, None] * H + k[None, :]
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        place_pair = spread(found, tl.arange(0, ROWS), ROWS)
        used = place_pair < num_pairs
        x_ptrs = x_ptr + (place_pair // SLOTS)[None, :] * H + k[:, None]
        gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in range(0, H, BLOCK_K):
            inside = (n < I)[:, None] & (start + k < H)[None, :]
            x = tl.load(x_ptrs + start, mask=used[None, :] & (start + k < H)[:, None], other=0.0)
            gate_rows = tl.load(gate_ptrs + start, mask=inside, other=0.0)
            up_rows = tl.load(gate_ptrs + I * H + start, mask=inside, other=0.0)
            gate = _add(gate, dot_bf16(gate_rows, x, tl.zeros_like(gate)))
            up = _add(up, dot_bf16(up_rows, x, tl.zeros_like(up)))
        tl.store(
            inner_ptr + place_pair[None, :] * I + n[:, None],
            swiglu(gate, up),
            mask=used[None, :] & (n < I)[:, None],
        )
        pair = following


@triton.jit(do_not_specialize=["num_pairs"])
def experts_down_bf16_kernel(
    inner_ptr,  # float32 [pairs, I]
    ids_ptr,  # int32 [pairs]
    weights_ptr,  # float32 [pairs]
    down_ptr,  # bfloat16 [E, H, I]
    out_ptr,  # float32 [pairs, H]
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
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

    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    down_ptrs = down_ptr + (expert.to(tl.int64) * H + n)[:, None] * I + k[None, :]
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        place_pair = spread(found, tl.arange(0, ROWS), ROWS)
        used = place_pair < num_pairs
        inner_ptrs = inner_ptr + place_pair[None, :] * I + k[:, None]
        total = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in range(0, I, BLOCK_K):
            inside = (n < H)[:, None] & (start + k < I)[None, :]
            weight = tl.load(down_ptrs + start, mask=inside, other=0.0)
            inner = tl.load(inner_ptrs + start, mask=used[None, :] & (start + k < I)[:, None], other=0.0)
            # Three terms of 8 bits each represent a float32; one bfloat16 would lose bits that the twin keeps.
            dots = tl.zeros_like(total)
            for _ in tl.static_range(3):
                term = inner.to(tl.bfloat16)
                dots = dot_bf16(weight, term, dots)
                inner = inner - term.to(tl.float32)
            total = _add(total, dots)
        share = tl.load(weights_ptr + place_pair, mask=used, other=0.0)
        tl.store(
            out_ptr + place_pair[None, :] * H + n[:, None],
            total * share[None, :],
            mask=used[None, :] & (n < H)[:, None],
        )
        pair = following


def routed_experts_bf16(x, ids, weights, gate_up, down):
    rows, k = ids.shape
    hidden, inner_size = down.shape[1:]
    inner, slots = workspace(ids, inner_size, hidden)
    sizes = {"H": hidden, "I": inner_size, "BLOCK_N": 32, "BLOCK_K": 128, "ROWS": 8, "num_warps": 2, **sharing(ids)}
    experts_gate_up_bf16_kernel[(ceil_div(inner_size, 32), rows * k)](
        x, ids, gate_up, inner, rows * k, SLOTS=k, **sizes
    )
    experts_down_bf16_kernel[(ceil_div(hidden, 32), rows * k)](inner, ids, weights, down, slots, rows * k, **sizes)
    return sum_slots(slots, torch.float32)
