"""The rotation of a few rows on a CPU."""

import numpy as np
from torch import Tensor

from onebox.kernels.arrays import Array, array, inverse_rms, quietly, tensor
from onebox.kernels.rope.reference import rotary_table

__all__ = ["qk_norm_rope", "rotary_table"]


@quietly
def qk_norm_rope(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `onebox.kernels.rope.qk_norm_rope`."""
    head_dim, rows = q_weight.shape[0], len(k)
    pairs = array(q_gate).reshape(rows, q_gate.shape[1] // (2 * head_dim), 2, head_dim)
    key = array(k).reshape(rows, k.shape[1] // head_dim, head_dim)
    turn = array(cos)[:, None], array(sin)[:, None]
    query = _norm_and_rotate(pairs[:, :, 0], array(q_weight), *turn, eps)
    gate = np.ascontiguousarray(pairs[:, :, 1])
    turned_key = _norm_and_rotate(key, array(k_weight), *turn, eps)
    return tensor(query, q_gate.dtype), tensor(gate, q_gate.dtype), tensor(turned_key, k.dtype)


def _norm_and_rotate(heads: Array, weight: Array, cos: Array, sin: Array, eps: float) -> Array:
    """Heads [R, heads, D] normed by weight [D] and turned by cos and sin [R, 1, rotary_dim / 2]."""
    # Contiguous, so that the sum over a head runs in one order whatever it was cut from.
    x = np.ascontiguousarray(heads)
    x = x * inverse_rms(x, eps)
    x *= weight + 1
    half = cos.shape[-1]
    first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
    x[..., :half] = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin
    return x
