"""The plain twin of attention's heads in a decode step."""

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.kv_write.reference import kv_write
from onebox.kernels.rope.reference import qk_norm_rope
from onebox.kernels.route_shared.reference import in_order

__all__ = ["split_heads", "write_heads"]


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
    head_dim = len(q_weight)
    kv_width = num_kv_heads * head_dim
    q_gate, k, v = torch.split(in_order(qkv_parts), [qkv_parts.shape[2] - 2 * kv_width, kv_width, kv_width], dim=-1)
    query, _, key = qk_norm_rope(q_gate, k, q_weight, k_weight, cos, sin, eps)
    return query.to(dtype), key.to(dtype), v.reshape(len(v), num_kv_heads, head_dim).to(dtype)


def write_heads(
    qkv_parts: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    dtype: torch.dtype,
    pages: KVPages,
    slots: Tensor,
) -> Tensor:
    """See `onebox.kernels.split_heads.write_heads`."""
    query, key, value = split_heads(qkv_parts, q_weight, k_weight, cos, sin, eps, pages.kv_heads, dtype)
    kv_write(pages, key, value, slots)
    return query
