"""Routed experts of a prefill in Triton, bfloat16 weights: gate_up, down, sum over a token's slots."""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import dot_bf16, rounded, swiglu
from onebox.kernels.common.launch import ceil_div
from onebox.kernels.experts.blocks import BLOCK_M, block_pairs, group_by_expert, prefill_workspace
from onebox.kernels.experts.slots import sum_slots

__all__ = ["prefill_experts_bf16"]


@triton.jit
def experts_prefill_gate_up_bf16_kernel(
    x_ptr,  # bfloat16 [T, H]
    gate_up_ptr,  # bfloat16 [E, 2I, H]
    inner_ptr,  # bfloat16 [T * SLOTS, I]
    pairs_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, block, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pair // SLOTS)[:, None] * H + k[None, :]
    gate_ptrs = gate_up_ptr + expert * (2 * I * H) + n[None, :] * H + k[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_K):
        inside = (start + k < H)[:, None] & (n < I)[None, :]
        x = tl.load(x_ptrs + start, mask=used[:, None] & (start + k < H)[None, :], other=0.0)
        gate = dot_bf16(x, tl.load(gate_ptrs + start, mask=inside, other=0.0), gate)
        up = dot_bf16(x, tl.load(gate_ptrs + I * H + start, mask=inside, other=0.0), up)
    tl.store(
        inner_ptr + pair[:, None] * I + n[None, :],
        rounded(swiglu(gate, up), tl.bfloat16),
        mask=used[:, None] & (n < I)[None, :],
    )


@triton.jit
def experts_prefill_down_bf16_kernel(
    inner_ptr,  # bfloat16 [pairs, I]
    weights_ptr,  # float32 [pairs]
    down_ptr,  # bfloat16 [E, H, I]
    slots_ptr,  # float32 [pairs, H]
    pairs_ptr,
    expert_ptr,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert >= num_experts:
        return
    pair, used = block_pairs(pairs_ptr, block, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inner_ptrs = inner_ptr + pair[:, None] * I + k[None, :]
    down_ptrs = down_ptr + expert * (H * I) + n[None, :] * I + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, I, BLOCK_K):
        inside = (start + k < I)[:, None] & (n < H)[None, :]
        inner = tl.load(inner_ptrs + start, mask=used[:, None] & (start + k < I)[None, :], other=0.0)
        total = dot_bf16(inner, tl.load(down_ptrs + start, mask=inside, other=0.0), total)
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0)
    tl.store(
        slots_ptr + pair[:, None] * H + n[None, :],
        total * weight[:, None],
        mask=used[:, None] & (n < H)[None, :],
    )


def prefill_experts_bf16(x, ids, weights, gate_up, down):
    experts, hidden, inner_size = down.shape
    blocks = group_by_expert(ids, experts)
    inner, slots = prefill_workspace(ids, inner_size, hidden)
    shape = {"BLOCK_M": BLOCK_M, "BLOCK_K": 64, "num_warps": 4}
    experts_prefill_gate_up_bf16_kernel[(ceil_div(inner_size, 64), len(blocks.expert))](
        x, gate_up, inner, *blocks, experts, H=hidden, I=inner_size, SLOTS=ids.shape[1], BLOCK_N=64, **shape
    )
    experts_prefill_down_bf16_kernel[(ceil_div(hidden, 128), len(blocks.expert))](
        inner, weights, down, slots, *blocks, experts, H=hidden, I=inner_size, BLOCK_N=128, **shape
    )
    return sum_slots(slots, x.dtype)
