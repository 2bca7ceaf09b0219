"""A DeltaNet mixer's decode step, compiled: projections, convolution, gates, delta rule, norm.

The delta rule is that of `onebox.kernels.delta_net`: accepted pending tokens are folded into the state first, then the
outputs of the new ones are computed on top of it, and these stay pending.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.kernels.common.array_types import Array, Stored, StoredState
from onebox.model.compiled.arithmetic import add_norm, copy, dot, inverse_rms, product, rounded, sigmoid, silu, widen
from onebox.model.compiled.jit import compiled, inner, never_inline
from onebox.model.compiled.states import narrow_state, state_number, widen_state
from onebox.model.compiled.tiles import tile, update_block
from onebox.model.compiled.vectors import BLOCK_COLUMNS

__all__ = ["DeltaArrays", "PoolArrays", "delta_step"]

_ZERO, _L2_EPS = np.float32(0), np.float32(1e-6)
_two = tile(2)


class DeltaArrays(NamedTuple):
    """A layer's weights."""

    input_norm: Array
    """[H]."""
    qkvz: Stored
    """[H, conv_dim + heads * Dv] in blocks."""
    gates: Stored
    """[H, 2 heads] in blocks, b first."""
    out: Stored
    """[heads * Dv, H] in blocks."""
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

    matrices: StoredState
    conv_rows: Stored
    pending_rows: Stored
    pending_gates: Array


@compiled
def delta_step(
    added: Stored,
    residual: Array,
    arrays: DeltaArrays,
    pool: PoolArrays,
    cu_rows: NDArray[np.int32],
    slots: NDArray[np.int32],
    accepted: NDArray[np.int32],
    eps: float,
) -> tuple[Array, Array]:
    """(what the mixer adds, the float32 stream before it), [R, H] each, from rows added to a residual stream.

    `accepted` [S] counts each sequence's accepted pending tokens; the rows' tokens are pending afterwards.
    """
    normed, stream = add_norm(added, residual, arrays.input_norm, eps)
    qkvz, gates = product(normed, arrays.qkvz), product(normed, arrays.gates)
    conv_dim = arrays.conv.shape[1]
    _, heads, key_dim, value_dim = pool.matrices.shape
    mixed = np.empty((len(qkvz), heads * value_dim), dtype=np.float32)
    for sequence in range(len(slots)):
        # One integer type, so that nothing is compiled twice.
        first, end = int(cu_rows[sequence]), int(cu_rows[sequence + 1])
        slot, num_accepted = int(slots[sequence]), int(accepted[sequence])
        if end > first or num_accepted:
            before = _conv_inputs(qkvz[first:end], pool.conv_rows[slot], pool.pending_rows[slot], num_accepted)
            fade = _decays(gates[first:end], pool.pending_gates[slot], arrays.rate, arrays.dt_bias, num_accepted)
            tokens = _convolve(before, arrays.conv, key_dim, heads * value_dim)
            for head in range(heads):
                _recur(tokens, fade, pool.matrices[slot, head], num_accepted, head, mixed[first:end])
    for row in range(len(mixed)):
        _gate_and_norm(mixed[row], qkvz[row, conv_dim:], arrays.norm, eps)
    return product(mixed, arrays.out), stream


@inner
def _conv_inputs(qkvz: Array, conv_rows: Stored, pending: Stored, num_accepted: int) -> Array:
    """[taps - 1 + T, conv_dim]: the rows before a sequence's tokens, its accepted ones and its new ones.

    The new ones become pending.
    """
    never_inline()
    num_before, conv_dim = conv_rows.shape
    out = np.empty((num_before + num_accepted + len(qkvz), conv_dim), dtype=np.float32)
    for row in range(num_before):
        for i in range(conv_dim):
            out[row, i] = widen(conv_rows[row, i])
    for row in range(num_accepted):
        for i in range(conv_dim):
            out[num_before + row, i] = widen(pending[row, i])
    for row in range(len(qkvz)):
        for i in range(conv_dim):
            # Rounded to the pool's dtype, because the next step reads it from there.
            stored = rounded(qkvz[row, i], pending)
            pending[row, i] = stored
            out[num_before + num_accepted + row, i] = widen(stored)
    for row in range(num_before if num_accepted else 0):
        for i in range(conv_dim):
            conv_rows[row, i] = rounded(out[num_accepted + row, i], conv_rows)
    return out


@inner
def _decays(gates: Array, pending: Array, rate: NDArray[np.float64], dt_bias: Array, num_accepted: int) -> Array:
    """[2, T, heads]: the decay of the state, and the part of an error that is corrected; new gates become pending."""
    never_inline()
    heads = len(rate)
    fade = np.empty((2, num_accepted + len(gates), heads), dtype=np.float32)
    for token in range(num_accepted + len(gates)):
        if token == num_accepted:
            for row in range(len(gates)):
                for head in range(heads):
                    pending[row, 0, head] = gates[row, heads + head]
                    pending[row, 1, head] = gates[row, head]
        place = token - num_accepted if token >= num_accepted else token
        for head in range(heads):
            x = np.float64(pending[place, 0, head] + dt_bias[head])
            softplus = max(x, 0.0) + math.log(1.0 + math.exp(-abs(x)))
            fade[0, token, head] = np.float32(math.exp(rate[head] * softplus))
            fade[1, token, head] = sigmoid(pending[place, 1, head])
    return fade


@inner
def _convolve(before: Array, conv: Array, key_dim: int, value_size: int) -> Array:
    """[T, conv_dim]: queries and keys of unit length, the query times key_dim ** -0.5, then values."""
    never_inline()
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
def _recur(tokens: Array, fade: Array, stored: StoredState, num_accepted: int, head: int, mixed: Array) -> None:
    """One head: accepted tokens update its state [Dk, Dv]; the outputs of the new ones are written to mixed.

    After every token the state is rounded to what `stored` stores.

    The state's value under the query after a correction follows from its value before, so the last token's correction
    is not written; those of the new tokens before it are, into a copy.
    """
    never_inline()
    key_dim, value_dim = stored.shape
    state = kept = widen_state(stored)
    heads = fade.shape[2]
    both = tokens.shape[1] - heads * value_dim
    query_place = head * (both // 2) // (heads * key_dim) * key_dim
    key_place, value_place = both // 2 + query_place, both + head * value_dim
    probes = np.empty((2, 2, key_dim), dtype=np.float32)
    found = np.empty((2, value_dim), dtype=np.float32)
    correction = np.empty(value_dim, dtype=np.float32)
    copy(tokens[0, key_place : key_place + key_dim], probes[0, 0])
    copy(tokens[0, query_place : query_place + key_dim], probes[0, 1])
    _read_state(probes[0], state, found)
    for token in range(len(tokens)):
        decay, write = fade[0, token, head], fade[1, token, head]
        own, following = probes[token % 2], probes[(token + 1) % 2]
        _correct(tokens[token, value_place : value_place + value_dim], found[0], decay, write, correction)
        if token >= num_accepted:
            answer = mixed[token - num_accepted, head * value_dim : (head + 1) * value_dim]
            _answer(correction, dot(own[0], own[1]), found[1], decay, answer)
        if token < len(tokens) - 1:
            copy(tokens[token + 1, key_place : key_place + key_dim], following[0])
            copy(tokens[token + 1, query_place : query_place + key_dim], following[1])
        if token < max(num_accepted, len(tokens) - 1):
            before = state
            if token == num_accepted:
                state = np.empty((key_dim, value_dim), dtype=np.float32)
            _update_state(before, state, own[0], correction, decay, following, found, stored)
    if num_accepted:
        narrow_state(kept, stored)


@inner
def _correct(value: Array, found: Array, decay: float, write: float, correction: Array) -> None:
    for i in range(len(correction)):
        correction[i] = (value[i] - found[i] * decay) * write


@inner
def _answer(correction: Array, overlap: float, found: Array, decay: float, answer: Array) -> None:
    for i in range(len(answer)):
        answer[i] = overlap * correction[i] + found[i] * decay


@inner
def _read_state(probes: Array, state: Array, found: Array) -> None:
    """Found [2, Dv]: the values of a state [Dk, Dv] under two probes [2, Dk]; summed as `_update_state` sums."""
    key_dim, value_dim = state.shape
    whole = value_dim // BLOCK_COLUMNS * BLOCK_COLUMNS
    for column in range(0, whole, BLOCK_COLUMNS):
        _two(probes, 0, state, column, value_dim, found, column)
    for row in range(2):
        for column in range(whole, value_dim):
            total = _ZERO
            for k in range(key_dim):
                total += probes[row, k] * state[k, column]
            found[row, column] = total


@inner
def _update_state(
    before: Array,
    state: Array,
    key: Array,
    correction: Array,
    decay: float,
    probes: Array,
    found: Array,
    stored: StoredState,
) -> None:
    """State [Dk, Dv]: `before` decayed and corrected under the key, rounded; then its values under two probes."""
    key_dim, value_dim = state.shape
    whole = value_dim // BLOCK_COLUMNS * BLOCK_COLUMNS
    for column in range(0, whole, BLOCK_COLUMNS):
        update_block(before, state, column, key, correction, decay, probes, found, stored)
    for column in range(whole, value_dim):
        first, second = _ZERO, _ZERO
        for k in range(key_dim):
            held = state_number(before[k, column] * decay + key[k] * correction[column], stored)
            state[k, column] = held
            first += probes[0, k] * held
            second += probes[1, k] * held
        found[0, column], found[1, column] = first, second


@inner
def _gate_and_norm(mixed: Array, z: Array, weight: Array, eps: float) -> None:
    """A row's heads, each normed, times SiLU of z: in place."""
    never_inline()
    for start in range(0, len(mixed), len(weight)):
        _gate_and_norm_head(mixed[start : start + len(weight)], z[start : start + len(weight)], weight, eps)


@inner
def _gate_and_norm_head(head: Array, z: Array, weight: Array, eps: float) -> None:
    scale = inverse_rms(head, eps)
    for i in range(len(weight)):
        head[i] = head[i] * scale * weight[i] * silu(z[i])
