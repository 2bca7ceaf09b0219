"""The rotary embedding of a few rows on a CPU."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from onebox.kernels.common.arrays import Array, array, inverse_rms, quietly, sigmoid, tensor

__all__ = ["attention_gate", "qk_norm_rope", "rotary_table"]


def rotary_table(positions, frequencies, mrope_section, scale):
    places: Array = positions.numpy().T.astype(np.float32)
    angles = places.take(_axes(len(frequencies), *mrope_section[1:]), axis=1)
    angles *= array(frequencies)
    # Computed in float64, as in the twin: the last bit of a cosine is then the same on every device.
    wide = angles.astype(np.float64)
    cos, sin = (turn(wide).astype(np.float32) * np.float32(scale) for turn in (np.cos, np.sin))
    return torch.from_numpy(cos), torch.from_numpy(sin)


@lru_cache(maxsize=16)
def _axes(num_pairs: int, height: int, width: int) -> NDArray[np.int64]:
    """The axis (time, height, width) of each frequency's position."""
    axes = np.zeros(num_pairs, dtype=np.int64)
    axes[1 : 3 * height : 3] = 1
    axes[2 : 3 * width : 3] = 2
    return axes


@quietly
def qk_norm_rope(q_gate, k, q_weight, k_weight, cos, sin, eps):
    head_dim, rows = q_weight.shape[0], len(k)
    pairs = array(q_gate).reshape(rows, q_gate.shape[1] // (2 * head_dim), 2, head_dim)
    key = array(k).reshape(rows, k.shape[1] // head_dim, head_dim)
    turn = array(cos)[:, None], array(sin)[:, None]
    query = _norm_and_rotate(pairs[:, :, 0], array(q_weight), *turn, eps)
    gate = np.ascontiguousarray(pairs[:, :, 1])
    turned_key = _norm_and_rotate(key, array(k_weight), *turn, eps)
    return tensor(query, q_gate.dtype), tensor(gate, q_gate.dtype), tensor(turned_key, k.dtype)


def _norm_and_rotate(heads: Array, weight: Array, cos: Array, sin: Array, eps: float) -> Array:
    """Heads [R, heads, D] normed by weight [D] and rotated by cos and sin [R, 1, rotary_dim / 2]."""
    # Contiguous, so that the sum over a head has one order, whatever tensor the head is a view of.
    x = np.ascontiguousarray(heads)
    x = x * inverse_rms(x, eps)
    x *= weight + 1
    half = cos.shape[-1]
    first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
    x[..., :half] = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin
    return x


@quietly
def attention_gate(attended, gate):
    gated = sigmoid(array(gate))
    gated *= array(attended)
    return tensor(gated.reshape(len(gated), gated.shape[1] * gated.shape[2]), attended.dtype)
