"""Routed experts of a decode step in Triton, FP8 and NVFP4 weights: gate_up, down, sum over a row's slots.

The program of the first pair (row and expert slot) with an expert computes all pairs with that expert (`slots.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.launch import ceil_div
from onebox.kernels.experts.float_tiles import (
    StoredExperts,
    dot_with_rows,
    fp8_experts,
    gate_up_inner,
    nvfp4_experts,
)
from onebox.kernels.experts.slots import pair_of_program, sharers, sharing, spread, sum_slots, workspace

__all__ = ["routed_experts_fp8", "routed_experts_nvfp4"]


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
        column, inner = gate_up_inner(
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
    inner_ptr,  # float32 [pairs, I]
    ids_ptr,  # int32 [pairs]
    weights_ptr,  # float32 [pairs]
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [pairs, H]
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
        total = dot_with_rows(
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


def _decode(x: Tensor, ids: Tensor, weights: Tensor, weight: StoredExperts, inner_size: int) -> Tensor:
    (rows, k), hidden = ids.shape, x.shape[1]
    inner, slots = workspace(ids, inner_size, hidden)
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
    # 128 bytes of a weight row at a time; NVFP4 would spill registers with float32 rows, which are three terms.
    block_k = 256 if weight.kind == "nvfp4" and x.dtype == torch.bfloat16 else 128
    experts_float_gate_up_kernel[(ceil_div(inner_size, 16), rows * k)](
        x, ids, *weight.gate_up, inner, rows * k, SLOTS=k, BLOCK_K=block_k, **shape
    )
    experts_float_down_kernel[(ceil_div(hidden, 32), rows * k)](
        inner, ids, weights, *weight.down, slots, rows * k, BLOCK_K=128, **shape
    )
    return sum_slots(slots, torch.float32)


def routed_experts_fp8(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    return _decode(x, ids, weights, fp8_experts(gate_up, gate_up_scale, down, down_scale), down.shape[2])


def routed_experts_nvfp4(x, ids, weights, gate_up, gate_up_scale, down, down_scale, multipliers):
    weight = nvfp4_experts(gate_up, gate_up_scale, down, down_scale, multipliers)
    return _decode(x, ids, weights, weight, 2 * down.shape[2])
