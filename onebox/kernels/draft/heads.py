"""Keys and values of a block drafter in Triton: the context's into rings and pages, a block's beside its queries.

One warp per row and head. A head is normed and rotated in registers, from the parts (partial sums) of its projection.
"""

import torch
import triton
import triton.language as tl

from onebox.kernels.attention.rope import load_norm, load_rotation, partner_of, turned
from onebox.kernels.common.arithmetic import loop_bound, rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.launch import next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.tuning import Tunable

__all__ = ["block_heads", "write_context"]

_CONTEXT, _HEADS = Tunable("draft_context"), Tunable("draft_heads")
_SEQUENCES = 32
"""Sequences whose ends are loaded at a time."""


@triton.jit(
    do_not_specialize=["cu_rows_ptr", "slots_ptr", "seen_ptr", "slot_mapping_ptr", "num_sequences", "part_stride"]
)
def write_context_kernel(
    kv_ptr,  # [PARTS, R, L, 2, KV, D], strides part_stride and row_stride
    weights_ptr,  # float32 [L, D]
    cos_ptr,  # float32 [R, D / 2]
    sin_ptr,  # float32 [R, D / 2]
    rings_ptr,  # [slots, sliding layers, 2, KV, ring_tokens, D], stride of a slot ring_stride
    pages_ptr,  # [pages, full layers, 2, KV, P, D], stride of a page page_stride
    places_ptr,  # int32 [L]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    seen_ptr,  # int32 [S]
    slot_mapping_ptr,  # int64 [R]
    num_sequences,
    part_stride,
    row_stride,
    ring_stride,
    page_stride,
    ring_tokens,
    eps,
    KV: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, layer, head): the KV keys, then the KV values."""
    HALF: tl.constexpr = D // 2
    release(DEPENDENT)
    row = tl.program_id(0)
    layer = tl.program_id(1)
    head = tl.program_id(2)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    sequence = tl.full([], 0, tl.int32)  # number of sequences that end before the row
    for first in range(0, loop_bound(num_sequences), SEQUENCES):
        number = first + tl.arange(0, SEQUENCES)
        ends = tl.load(cu_rows_ptr + 1 + number, mask=number < num_sequences, other=2147483647)
        sequence += tl.sum((ends <= row).to(tl.int32), 0)
    mapped = tl.load(slot_mapping_ptr + row)
    is_owned = (sequence < num_sequences) & (mapped >= 0)
    end = tl.load(cu_rows_ptr + sequence + 1, mask=is_owned, other=0)
    seen = tl.load(seen_ptr + sequence, mask=is_owned, other=0)
    slot = tl.load(slots_ptr + sequence, mask=is_owned, other=0).to(tl.int64)
    token = seen - (end - row)
    place = tl.load(places_ptr + layer)
    weight, partner_weight = load_norm(weights_ptr + layer * D, D, HALF, BLOCK)
    # Everything read before this wait is a weight or an input of the step, complete before the step began.
    wait(DEPENDENT)
    at = row.to(tl.int64) * row_stride + (layer * 2 * KV + head) * D
    x = sum_parts(kv_ptr, part_stride, at + columns, inside, PARTS)
    partner = sum_parts(kv_ptr, part_stride, at + partner_of(columns, HALF), inside, PARTS)
    cos, sin = load_rotation(cos_ptr + row.to(tl.int64) * HALF, sin_ptr + row.to(tl.int64) * HALF, HALF, BLOCK)
    key = turned(x, partner, weight, partner_weight, cos, sin, eps, D, HALF, BLOCK)
    values = rounded(tl.where(head < KV, key, x), rings_ptr.dtype.element_ty)
    in_ring = slot * ring_stride + ((place * 2 * KV + head) * ring_tokens + token % ring_tokens).to(tl.int64) * D
    in_page = (mapped // P) * page_stride + (((-1 - place) * 2 * KV + head) * P + mapped % P) * D
    is_recent = token >= seen - ring_tokens
    tl.store(rings_ptr + in_ring + columns, values, mask=inside & is_owned & is_recent & (place >= 0))
    tl.store(pages_ptr + in_page + columns, values, mask=inside & is_owned & (place < 0))


def write_context(kv_parts, weights, rotation, rings, pages, layer_places, rows, eps):
    num_parts, num_rows, _ = kv_parts.shape
    num_layers, dim = weights.shape
    kv_heads = pages.shape[3]
    if num_rows:
        write_context_kernel[(num_rows, num_layers, 2 * kv_heads)](
            kv_parts,
            weights,
            *rotation,
            rings,
            pages,
            layer_places,
            *rows,
            len(rows.slots),
            kv_parts.stride(0),
            kv_parts.stride(1),
            rings.stride(0),
            pages.stride(0),
            rings.shape[4],
            eps,
            KV=kv_heads,
            D=dim,
            P=pages.shape[4],
            BLOCK=next_power_of_2(dim),
            PARTS=num_parts,
            SEQUENCES=_SEQUENCES,
            num_warps=1,
            **launch_options(_CONTEXT, kv_heads),
        )


@triton.jit
def block_heads_kernel(
    qkv_ptr,  # [PARTS, R, Q + 2 KV, D], strides part_stride and row_stride
    q_weight_ptr,  # float32 [D]
    k_weight_ptr,  # float32 [D]
    cos_ptr,  # float32 [R, D / 2]
    sin_ptr,  # float32 [R, D / 2]
    query_ptr,  # [R, Q, D]
    key_ptr,  # [R, KV, D]
    value_ptr,  # [R, KV, D]
    part_stride,
    row_stride,
    eps,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, head): the Q queries, the KV keys, the KV values."""
    HALF: tl.constexpr = D // 2
    release(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    # Masks, not branches, select the kind of head, and late: a branch would cost a memory round trip of its own.
    q_weight, q_partner_weight = load_norm(q_weight_ptr, D, HALF, BLOCK)
    k_weight, k_partner_weight = load_norm(k_weight_ptr, D, HALF, BLOCK)
    wait(DEPENDENT)
    at = row * row_stride + head * D
    x = sum_parts(qkv_ptr, part_stride, at + columns, inside, PARTS)
    partner = sum_parts(qkv_ptr, part_stride, at + partner_of(columns, HALF), inside, PARTS)
    cos, sin = load_rotation(cos_ptr + row * HALF, sin_ptr + row * HALF, HALF, BLOCK)
    weight = tl.where(head < Q, q_weight, k_weight)
    partner_weight = tl.where(head < Q, q_partner_weight, k_partner_weight)
    out = turned(x, partner, weight, partner_weight, cos, sin, eps, D, HALF, BLOCK)
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    tl.store(query_ptr + (row * Q + head) * D + columns, rounded(out, DTYPE), mask=inside & (head < Q))
    kv_at = (row * KV + (head - Q) % KV) * D + columns
    tl.store(key_ptr + kv_at, rounded(out, DTYPE), mask=inside & (head >= Q) & (head < Q + KV))
    tl.store(value_ptr + kv_at, rounded(x, DTYPE), mask=inside & (head >= Q + KV))


def block_heads(qkv_parts, q_weight, k_weight, rotation, eps, num_kv_heads, dtype):
    num_parts, num_rows, width = qkv_parts.shape
    dim = len(q_weight)
    num_heads = width // dim - 2 * num_kv_heads
    query = torch.empty((num_rows, num_heads, dim), dtype=dtype, device=qkv_parts.device)
    key, value = (torch.empty((num_rows, num_kv_heads, dim), dtype=dtype, device=query.device) for _ in range(2))
    if num_rows:
        block_heads_kernel[(num_rows, num_heads + 2 * num_kv_heads)](
            qkv_parts,
            q_weight,
            k_weight,
            *rotation,
            query,
            key,
            value,
            qkv_parts.stride(0),
            qkv_parts.stride(1),
            eps,
            Q=num_heads,
            KV=num_kv_heads,
            D=dim,
            BLOCK=next_power_of_2(dim),
            PARTS=num_parts,
            num_warps=1,
            **launch_options(_HEADS, num_heads),
        )
    return query, key, value
