"""Attention's queries, keys and values in a decode step, from the parts of their projection."""

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.dispatch import implementation

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
    """(query [R, Q, D], key [R, V, D], value [R, V, D]) of `dtype`; queries and keys as `rope.qk_norm_rope` makes them.

    qkv_parts float32 [P, R, (2Q + 2V) D], added in their order: each head's query and gate (left alone), then keys,
    then values. Weights [D], offsets from one; cos and sin float32 [R, F] from `rope.rotary_table`.
    """
    chosen = implementation(__name__, qkv_parts)
    result: tuple[Tensor, Tensor, Tensor] = chosen.split_heads(
        qkv_parts, q_weight, k_weight, cos, sin, eps, num_kv_heads, dtype
    )
    return result


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
    """The query [R, Q, D] of `split_heads`; its keys and values go where `kv_write` puts them: slots int64 [R]."""
    chosen = implementation(__name__, qkv_parts)
    query: Tensor = chosen.write_heads(qkv_parts, q_weight, k_weight, cos, sin, eps, dtype, pages, slots)
    return query
