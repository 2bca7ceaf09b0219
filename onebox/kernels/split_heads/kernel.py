"""Attention's heads of a decode step in Triton: one warp for each head of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.dependent import dependent, release, wait
from onebox.kernels.rope.kernel import turned
from onebox.kernels.route_shared.kernel import sum_parts

__all__ = ["split_heads"]


@triton.jit
def split_heads_kernel(
    qkv_ptr,  # float32 [PARTS, R, (2 Q + 2 V) D]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_ptr,  # float32 [R, HALF]
    sin_ptr,  # float32 [R, HALF]
    query_ptr,  # [R, Q, D]
    key_ptr,  # [R, V, D]
    value_ptr,  # [R, V, D]
    eps,
    part_stride,
    row_stride,
    Q: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, head): the Q queries, the V keys, the V values."""
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
    # Queries stand with their gates, keys and values behind all of them.
    start = row * row_stride + tl.where(head < Q, head * 2 * D, (head + Q) * D)
    x = sum_parts(qkv_ptr, part_stride, start + columns, inside, PARTS)
    if head < Q + V:
        partner = sum_parts(qkv_ptr, part_stride, start + partners, columns < 2 * HALF, PARTS)
        cos_at = cos_ptr + row * HALF
        sin_at = sin_ptr + row * HALF
        if head < Q:
            out = turned(x, partner, q_weight_ptr, cos_at, sin_at, eps, D, HALF, BLOCK)
            at = query_ptr + (row * Q + head) * D + columns
            tl.store(at, out.to(query_ptr.dtype.element_ty), mask=inside)
        else:
            out = turned(x, partner, k_weight_ptr, cos_at, sin_at, eps, D, HALF, BLOCK)
            at = key_ptr + (row * V + head - Q) * D + columns
            tl.store(at, out.to(key_ptr.dtype.element_ty), mask=inside)
    else:
        at = value_ptr + (row * V + head - Q - V) * D + columns
        tl.store(at, x.to(value_ptr.dtype.element_ty), mask=inside)


def split_heads(
    qkv_parts: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `onebox.kernels.split_heads.split_heads`."""
    num_parts, rows, width = qkv_parts.shape
    head_dim = len(q_weight)
    num_heads = (width // head_dim - 2 * num_kv_heads) // 2
    query = torch.empty((rows, num_heads, head_dim), dtype=dtype, device=qkv_parts.device)
    key = query.new_empty(rows, num_kv_heads, head_dim)
    value = torch.empty_like(key)
    if rows:
        split_heads_kernel[(rows, num_heads + 2 * num_kv_heads)](
            qkv_parts,
            q_weight,
            k_weight,
            cos,
            sin,
            query,
            key,
            value,
            eps,
            qkv_parts.stride(0),
            qkv_parts.stride(1),
            Q=num_heads,
            V=num_kv_heads,
            D=head_dim,
            HALF=cos.shape[1],
            BLOCK=triton.next_power_of_2(head_dim),
            PARTS=num_parts,
            num_warps=1,
            **dependent(qkv_parts, "split_heads"),
        )
    return query, key, value
