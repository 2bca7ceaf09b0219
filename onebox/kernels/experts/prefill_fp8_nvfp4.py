"""Routed experts of a prefill in Triton, FP8 and NVFP4 weights: gate_up, down, sum over a token's slots."""

import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.launch import ceil_div
from onebox.kernels.experts.blocks import BLOCK_M, block_pairs, group_by_expert, prefill_workspace
from onebox.kernels.experts.float_tiles import (
    StoredExperts,
    dot_with_rows,
    fp8_experts,
    gate_up_inner,
    nvfp4_experts,
)
from onebox.kernels.experts.slots import sum_slots

__all__ = ["prefill_experts_fp8", "prefill_experts_nvfp4"]


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
    column, inner = gate_up_inner(
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
    inner_ptr,  # bfloat16 [pairs, I]
    weights_ptr,  # float32 [pairs]
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    slots_ptr,  # float32 [pairs, H]
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
    total = dot_with_rows(
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


def _prefill(x: Tensor, ids: Tensor, weights: Tensor, weight: StoredExperts, inner_size: int) -> Tensor:
    hidden, experts = x.shape[1], weight.down[0].shape[0]
    blocks = group_by_expert(ids, experts)
    inner, slots = prefill_workspace(ids, inner_size, hidden)
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
    experts_float_prefill_gate_up_kernel[(ceil_div(inner_size, 64), len(blocks.expert))](
        x, *weight.gate_up, inner, *blocks, experts, SLOTS=ids.shape[1], **shape
    )
    experts_float_prefill_down_kernel[(ceil_div(hidden, 128), len(blocks.expert))](
        inner, weights, *weight.down, slots, *blocks, experts, **shape
    )
    return sum_slots(slots, x.dtype)


def prefill_experts_fp8(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    return _prefill(x, ids, weights, fp8_experts(gate_up, gate_up_scale, down, down_scale), down.shape[2])


def prefill_experts_nvfp4(x, ids, weights, gate_up, gate_up_scale, down, down_scale, multipliers):
    weight = nvfp4_experts(gate_up, gate_up_scale, down, down_scale, multipliers)
    return _prefill(x, ids, weights, weight, 2 * down.shape[2])
