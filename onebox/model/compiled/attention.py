"""Attention between its projections in a decode step, compiled: norms, rotation, KV pages, gate."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.kernels.common.array_types import Array, Stored
from onebox.model.compiled.arithmetic import dot, exp, inverse_rms, rounded, sigmoid, widen
from onebox.model.compiled.jit import compiled, inner, never_inline
from onebox.model.compiled.tiles import add_rows
from onebox.model.compiled.vectors import BLOCK_COLUMNS

__all__ = ["Projected", "attend", "gate_heads", "rotate"]

_ONE, _ZERO = np.float32(1), np.float32(0)


class Projected(NamedTuple):
    """Rows after the projection."""

    query: Array
    """[R, Q, D], rotated."""
    gate: Array
    """[R, Q * D]."""
    key: Array
    """[R, V, D], rotated."""
    value: Array
    """[R, V, D]."""


@compiled
def rotate(qkv: Array, q_norm: Array, k_norm: Array, cos: Array, sin: Array, kv_heads: int, eps: float) -> Projected:
    """Splits, norms and rotates qkv [R, (2Q + 2V) * D]: each head's query and gate, then keys, then values.

    q_norm and k_norm [D]; cos and sin [R, rotary_dim / 2].
    """
    rows, dim = len(qkv), len(q_norm)
    heads = qkv.shape[1] // (2 * dim) - kv_heads
    query = np.empty((rows, heads, dim), dtype=np.float32)
    gate = np.empty((rows, heads * dim), dtype=np.float32)
    key = np.empty((rows, kv_heads, dim), dtype=np.float32)
    value = np.empty((rows, kv_heads, dim), dtype=np.float32)
    for row in range(rows):
        for head in range(heads):
            start = 2 * head * dim
            _norm_and_rotate(qkv[row, start : start + dim], q_norm, cos[row], sin[row], query[row, head], eps)
            for i in range(dim):
                gate[row, head * dim + i] = qkv[row, start + dim + i]
        for head in range(kv_heads):
            start = (2 * heads + head) * dim
            _norm_and_rotate(qkv[row, start : start + dim], k_norm, cos[row], sin[row], key[row, head], eps)
            for i in range(dim):
                value[row, head, i] = qkv[row, start + kv_heads * dim + i]
    return Projected(query, gate, key, value)


@inner
def _norm_and_rotate(head: Array, weight: Array, cos: Array, sin: Array, out: Array, eps: float) -> None:
    never_inline()
    scale = inverse_rms(head, eps)
    for i in range(len(head)):
        out[i] = head[i] * scale * (_ONE + weight[i])
    half = len(cos)
    for i in range(half):
        first, second = out[i], out[half + i]
        out[i] = first * cos[i] - second * sin[i]
        out[half + i] = second * cos[i] + first * sin[i]


@compiled
def attend(
    projected: Projected,
    keys: Stored,
    values: Stored,
    slot_mapping: NDArray[np.int64],
    page_table: NDArray[np.int32],
    seen: NDArray[np.int32],
    cu_rows: NDArray[np.int32],
    scale: float,
) -> Array:
    """Mixed values [R, Q * D]; the bfloat16 pages [pages, V, P, D] then hold the rows' own keys and values."""
    _write(projected, keys, values, slot_mapping)
    rows, heads, dim = projected.query.shape
    mixed = np.empty((rows, heads * dim), dtype=np.float32)
    for row in range(rows):
        for i in range(heads * dim):
            mixed[row, i] = _ZERO
    most = page_table.shape[1] * keys.shape[2]
    for sequence in range(len(seen)):
        for row in range(cu_rows[sequence], cu_rows[sequence + 1]):
            visible = min(seen[sequence] - (cu_rows[sequence + 1] - 1 - row), most)
            if visible > 0:
                _attend_row(projected.query[row], keys, values, page_table[sequence], visible, scale, mixed[row])
    return mixed


@compiled
def write_kv(projected: Projected, keys: Stored, values: Stored, slot_mapping: NDArray[np.int64]) -> None:
    """Writes the rows' keys and values into the bfloat16 pages, as `attend` does, and attends to nothing."""
    _write(projected, keys, values, slot_mapping)


@inner
def _write(projected: Projected, keys: Stored, values: Stored, slots: NDArray[np.int64]) -> None:
    never_inline()
    for row in range(len(slots)):
        if slots[row] >= 0:
            page, offset = slots[row] // keys.shape[2], slots[row] % keys.shape[2]
            for head in range(keys.shape[1]):
                for i in range(keys.shape[3]):
                    keys[page, head, offset, i] = rounded(projected.key[row, head, i], keys)
                    values[page, head, offset, i] = rounded(projected.value[row, head, i], values)


@inner
def _attend_row(
    query: Array,
    keys: Stored,
    values: Stored,
    pages: NDArray[np.int32],
    visible: int,
    scale: float,
    mixed: Array,
) -> None:
    """The query heads [Q, D] of one row, which attends to the first `visible` tokens."""
    never_inline()
    _, kv_heads, page_tokens, dim = keys.shape
    group = len(query) // kv_heads
    scores = np.empty(visible, dtype=np.float32)
    for head in range(len(query)):
        kv_head, own = head // group, mixed[head * dim : (head + 1) * dim]
        for first in range(0, visible, page_tokens):
            # The last page is read only up to the visible tokens: what follows may be NaN.
            some = scores[first : first + page_tokens]
            _score(query[head], keys[pages[first // page_tokens], kv_head], np.float32(scale), some)
        whole = _softmax(scores)
        for first in range(0, visible, page_tokens):
            _mix(scores[first : first + page_tokens], values[pages[first // page_tokens], kv_head], own)
        for i in range(dim):
            own[i] /= whole


@inner
def _score(query: Array, keys: Stored, scale: np.float32, scores: Array) -> None:
    """The products of a query head with the first keys of a page [P, D]."""
    for token in range(len(scores)):
        scores[token] = dot(query, keys[token]) * scale


@inner
def _softmax(scores: Array) -> Any:
    """Replaces scores by their exponentials and returns the sum of these."""
    most, whole = -np.float32(np.inf), _ZERO
    for token in range(len(scores)):
        most = max(most, scores[token])
    for token in range(len(scores)):
        scores[token] = exp(scores[token] - most)
    for token in range(len(scores)):
        whole += scores[token]
    return whole


@inner
def _mix(shares: Array, values: Stored, mixed: Array) -> None:
    """Adds the first values of a page [P, D], each times its share, to a head's [D]."""
    tokens, dim = len(shares), values.shape[1]
    whole = dim // BLOCK_COLUMNS * BLOCK_COLUMNS
    for column in range(0, whole, BLOCK_COLUMNS):
        add_rows(shares, values, column, dim, mixed, column)
    for column in range(whole, dim):
        for token in range(tokens):
            mixed[column] += shares[token] * widen(values[token, column])


@compiled
def gate_heads(mixed: Array, gate: Array) -> Array:
    """Mixed values times the sigmoid of their gates, [R, Q * D] each."""
    rows, size = mixed.shape
    gated = np.empty((rows, size), dtype=np.float32)
    for row in range(rows):
        for i in range(size):
            gated[row, i] = mixed[row, i] * sigmoid(gate[row, i])
    return gated
