"""What a DeltaNet layer does between its projections in a decode step, compiled: convolution, gates, delta rule, norm.

The delta rule is that of `onebox.kernels.delta_net`: pending tokens that are kept are folded into the state first, then
the new ones are answered on top of it, and stay pending.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.kernels.arrays import Array, Stored
from onebox.model.compiled.arithmetic import (
    dot,
    inverse_rms,
    plain_product,
    rounded,
    sigmoid,
    silu,
    widen,
)
from onebox.model.compiled.jit import compiled, inner

__all__ = ["DeltaArrays", "PoolArrays", "delta_step"]

_L2_EPS = np.float32(1e-6)


class DeltaArrays(NamedTuple):
    """A layer's small weights."""

    conv: Array
    """[taps, conv_dim]."""
    rate: NDArray[np.float64]
    """[heads]: what a token's gate is multiplied by to give the logarithm of the decay, negative."""
    dt_bias: Array
    """[heads]."""
    norm: Array
    """[Dv]."""


class PoolArrays(NamedTuple):
    """The layer's `DeltaPool`."""

    matrices: Array
    conv_rows: Stored
    pending_rows: Stored
    pending_gates: Array


@compiled
def delta_step(
    qkvz: Array,
    gates: Array,
    arrays: DeltaArrays,
    pool: PoolArrays,
    cu_rows: NDArray[np.int32],
    slots: NDArray[np.int32],
    keep: NDArray[np.int32],
    eps: float,
) -> Array:
    """Normed and gated answers [R, heads * Dv] to rows of qkvz and of gates [R, 2 heads], b first: then pending."""
    conv_dim = arrays.conv.shape[1]
    _, heads, key_dim, value_dim = pool.matrices.shape
    mixed = np.empty((len(qkvz), heads * value_dim), dtype=np.float32)
    for sequence in range(len(slots)):
        # One kind of integer, so that nothing is compiled twice.
        first, end = int(cu_rows[sequence]), int(cu_rows[sequence + 1])
        slot, num_kept = int(slots[sequence]), int(keep[sequence])
        if end > first or num_kept:
            before = _line_up(qkvz[first:end], pool.conv_rows[slot], pool.pending_rows[slot], num_kept)
            fade = _fade(gates[first:end], pool.pending_gates[slot], arrays.rate, arrays.dt_bias, num_kept)
            tokens = _convolve(before, arrays.conv, key_dim, heads * value_dim)
            for head in range(heads):
                _recur(tokens, fade, pool.matrices[slot, head], num_kept, head, mixed[first:end])
    for row in range(len(mixed)):
        _gate_and_norm(mixed[row], qkvz[row, conv_dim:], arrays.norm, eps)
    return mixed


@inner
def _line_up(qkvz: Array, conv_rows: Stored, pending: Stored, num_kept: int) -> Array:
    """[taps - 1 + T, conv_dim]: the rows before a sequence's tokens, its kept ones, its new ones, which get pending."""
    num_before, conv_dim = conv_rows.shape
    out = np.empty((num_before + num_kept + len(qkvz), conv_dim), dtype=np.float32)
    for row in range(num_before):
        for i in range(conv_dim):
            out[row, i] = widen(conv_rows[row, i])
    for row in range(num_kept):
        for i in range(conv_dim):
            out[num_before + row, i] = widen(pending[row, i])
    for row in range(len(qkvz)):
        for i in range(conv_dim):
            # Through the pool's own dtype, because the next step finds it there.
            brought = rounded(qkvz[row, i], pending)
            pending[row, i] = brought
            out[num_before + num_kept + row, i] = widen(brought)
    for row in range(num_before if num_kept else 0):
        for i in range(conv_dim):
            conv_rows[row, i] = rounded(out[num_kept + row, i], conv_rows)
    return out


@inner
def _fade(gates: Array, pending: Array, rate: NDArray[np.float64], dt_bias: Array, num_kept: int) -> Array:
    """[2, T, heads]: what is left of the state, and the part of an error that is corrected; new gates get pending."""
    heads = len(rate)
    fade = np.empty((2, num_kept + len(gates), heads), dtype=np.float32)
    for token in range(num_kept + len(gates)):
        if token == num_kept:
            for row in range(len(gates)):
                for head in range(heads):
                    pending[row, 0, head] = gates[row, heads + head]
                    pending[row, 1, head] = gates[row, head]
        place = token - num_kept if token >= num_kept else token
        for head in range(heads):
            x = np.float64(pending[place, 0, head] + dt_bias[head])
            softplus = max(x, 0.0) + math.log(1.0 + math.exp(-abs(x)))
            fade[0, token, head] = np.float32(math.exp(rate[head] * softplus))
            fade[1, token, head] = sigmoid(pending[place, 1, head])
    return fade


@inner
def _convolve(before: Array, conv: Array, key_dim: int, value_size: int) -> Array:
    """[T, conv_dim]: queries and keys of unit length, the query times key_dim ** -0.5, then values."""
    num_tokens = len(before) - len(conv) + 1
    out = np.empty((num_tokens, conv.shape[1]), dtype=np.float32)
    scale = np.float32(key_dim**-0.5)
    both = conv.shape[1] - value_size
    for token in range(num_tokens):
        row = out[token]
        for i in range(len(row)):
            row[i] = conv[0, i] * before[token, i]
        for tap in range(1, len(conv)):
            for i in range(len(row)):
                row[i] += conv[tap, i] * before[token + tap, i]
        for i in range(len(row)):
            row[i] = silu(row[i])
        for start in range(0, both, key_dim):
            head = row[start : start + key_dim]
            length = np.sqrt(dot(head, head) + _L2_EPS)
            for i in range(key_dim):
                head[i] = head[i] / length * scale if start < both // 2 else head[i] / length
    return out


@inner
def _recur(tokens: Array, fade: Array, state: Array, num_kept: int, head: int, mixed: Array) -> None:
    """One head: its state [Dk, Dv] takes the kept tokens in; the new ones' answers go into mixed.

    What the state would hold under the query after a correction follows from what it held before, so the last token's
    correction is not written; those of the new ones before it are, into a copy.
    """
    key_dim, value_dim = state.shape
    heads = fade.shape[2]
    both = tokens.shape[1] - heads * value_dim
    query_place = head * (both // 2) // (heads * key_dim) * key_dim
    key_place, value_place = both // 2 + query_place, both + head * value_dim
    asked = np.empty((2, key_dim), dtype=np.float32)
    found = np.empty((2, value_dim), dtype=np.float32)
    correction = np.empty(value_dim, dtype=np.float32)
    for token in range(len(tokens)):
        for k in range(key_dim):
            asked[0, k] = tokens[token, key_place + k]
            asked[1, k] = tokens[token, query_place + k]
        plain_product(asked, state, found)
        decay, write = fade[0, token, head], fade[1, token, head]
        for i in range(value_dim):
            correction[i] = (tokens[token, value_place + i] - found[0, i] * decay) * write
        if token >= num_kept:
            overlap = dot(asked[0], asked[1])
            for i in range(value_dim):
                answer = overlap * correction[i] + found[1, i] * decay
                mixed[token - num_kept, head * value_dim + i] = answer
        if token == num_kept and token < len(tokens) - 1:
            state = _copy(state)
        if token < max(num_kept, len(tokens) - 1):
            for k in range(key_dim):
                key = asked[0, k]
                for i in range(value_dim):
                    state[k, i] = state[k, i] * decay + key * correction[i]


@inner
def _copy(state: Array) -> Array:
    key_dim, value_dim = state.shape
    out = np.empty((key_dim, value_dim), dtype=np.float32)
    for k in range(key_dim):
        for i in range(value_dim):
            out[k, i] = state[k, i]
    return out


@inner
def _gate_and_norm(mixed: Array, z: Array, weight: Array, eps: float) -> None:
    """A row's heads, each normed, times SiLU of z: in place."""
    for start in range(0, len(mixed), len(weight)):
        scale = inverse_rms(mixed[start : start + len(weight)], eps)
        for i in range(len(weight)):
            mixed[start + i] = mixed[start + i] * scale * weight[i] * silu(z[start + i])
