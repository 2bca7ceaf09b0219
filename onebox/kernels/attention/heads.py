"""Attention's heads of a decode step in Triton: one warp for each head of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import PLAIN_BITS
from onebox.kernels.attention.rope import load_norm, load_rotation, partner_of, turned
from onebox.kernels.attention.write import kv_write
from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.tuning import Tunable

__all__ = ["split_heads", "write_heads"]

_HEADS = Tunable("split_heads")


@triton.jit(do_not_specialize=["slots_ptr"])
def split_heads_kernel(
    qkv_ptr,  # float32 [PARTS, R, (2 Q + 2 V) D]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_ptr,  # float32 [R, HALF]
    sin_ptr,  # float32 [R, HALF]
    query_ptr,  # [R, Q, D]
    key_ptr,  # [R, V, D], or plain pages [pages, V, P, D], and so the next
    value_ptr,
    slots_ptr,  # int64 [R]: where keys and values go in the pages, nowhere if negative; None where there are none
    eps,
    part_stride,
    row_stride,
    Q: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, head): the Q queries, the V keys, the V values."""
    release(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    # Which kind of head it is decides late and by masks: a branch would make a trip to memory of its own.
    q_weight, q_partner_weight = load_norm(q_weight_ptr, D, HALF, BLOCK)
    k_weight, k_partner_weight = load_norm(k_weight_ptr, D, HALF, BLOCK)
    kv_head = tl.where(head < Q + V, head - Q, head - Q - V)
    vector = row * V + kv_head
    is_kept = head >= Q
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row)  # an input of the step
        vector = ((slot // P) * V + kv_head) * P + slot % P
        is_kept = is_kept & (slot >= 0)
    wait(DEPENDENT)
    # Queries stand with their gates, keys and values behind all of them.
    start = row * row_stride + tl.where(head < Q, head * 2 * D, (head + Q) * D)
    is_turned = (columns < 2 * HALF) & (head < Q + V)
    cos, sin = load_rotation(cos_ptr + row * HALF, sin_ptr + row * HALF, HALF, BLOCK)
    x = sum_parts(qkv_ptr, part_stride, start + columns, inside, PARTS)
    partner = sum_parts(qkv_ptr, part_stride, start + partner_of(columns, HALF), is_turned, PARTS)
    weight = tl.where(head < Q, q_weight, k_weight)
    partner_weight = tl.where(head < Q, q_partner_weight, k_partner_weight)
    out = turned(x, partner, weight, partner_weight, cos, sin, eps, D, HALF, BLOCK)
    at = query_ptr + (row * Q + head) * D + columns
    tl.store(at, rounded(out, query_ptr.dtype.element_ty), mask=inside & (head < Q))
    is_key = is_kept & (head < Q + V)
    tl.store(key_ptr + vector * D + columns, rounded(out, key_ptr.dtype.element_ty), mask=inside & is_key)
    is_value = is_kept & (head >= Q + V)
    tl.store(value_ptr + vector * D + columns, rounded(x, value_ptr.dtype.element_ty), mask=inside & is_value)


def split_heads(qkv_parts, q_weight, k_weight, cos, sin, eps, num_kv_heads, dtype):
    key = torch.empty((qkv_parts.shape[1], num_kv_heads, len(q_weight)), dtype=dtype, device=qkv_parts.device)
    value = torch.empty_like(key)
    query = _split(qkv_parts, (q_weight, k_weight, cos, sin), eps, dtype, (key, value, None), num_kv_heads, 1)
    return query, key, value


def write_heads(qkv_parts, q_weight, k_weight, cos, sin, eps, dtype, pages, slots):
    turning = q_weight, k_weight, cos, sin
    if pages.format.key_bits == pages.format.value_bits == PLAIN_BITS:
        places = pages.key_codes, pages.value_codes, slots
        return _split(qkv_parts, turning, eps, dtype, places, pages.kv_heads, pages.page_tokens)
    query, key, value = split_heads(qkv_parts, *turning, eps, pages.kv_heads, dtype)
    kv_write(pages, key, value, slots)
    return query


def _split(
    qkv_parts: Tensor,
    turning: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    dtype: torch.dtype,
    places: tuple[Tensor, Tensor, Tensor | None],
    num_kv_heads: int,
    page_tokens: int,
) -> Tensor:
    """The queries; keys and values go to `places`: the two tensors, and the slots in them where they are pages."""
    num_parts, rows, width = qkv_parts.shape
    head_dim = len(turning[0])
    num_heads = (width // head_dim - 2 * num_kv_heads) // 2
    query = torch.empty((rows, num_heads, head_dim), dtype=dtype, device=qkv_parts.device)
    if rows:
        split_heads_kernel[(rows, num_heads + 2 * num_kv_heads)](
            qkv_parts,
            *turning,
            query,
            *places,
            eps,
            qkv_parts.stride(0),
            qkv_parts.stride(1),
            Q=num_heads,
            V=num_kv_heads,
            D=head_dim,
            HALF=turning[2].shape[1],
            BLOCK=triton.next_power_of_2(head_dim),
            PARTS=num_parts,
            P=page_tokens,
            num_warps=1,
            maxnreg=168,  # without a limit the compiler saves registers and puts loads off
            **launch_options(qkv_parts, _HEADS, num_heads),
        )
    return query
