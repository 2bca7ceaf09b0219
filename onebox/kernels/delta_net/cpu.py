"""DeltaNet's decode step and gated norm for a few rows on a CPU: the twin's arithmetic in few calls.

What depends on the batch alone is computed once and shared by all layers of a step and by all steps with such a batch.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.kernels.common.arrays import Array, array, inverse_rms, quietly, sigmoid, silu, tensor
from onebox.kernels.delta_net.layout import place_tokens
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.delta_net.reference import delta_net_prefill

__all__ = ["delta_net_prefill", "delta_net_step", "gated_norm"]

_L2_EPS = np.float32(1e-6)


class _Layout(NamedTuple):
    """`TokenPlaces` as arrays, with slot ids; S, K, N as there."""

    own: Tensor  # int64 [S]: the slots of the sequences that have rows or accepted tokens
    block: slice | None  # the same slots if they are adjacent, in order, and all have N rows and K accepted tokens
    most_accepted: int  # K
    num_new: int  # N
    pending: Tensor  # int64 [S * K]: the pending tokens that are read, as indices into [slots * M]
    rows: NDArray[np.int64]  # [S, taps - 1 + K + N], into conv rows [S * (taps - 1)], pending [S * K], new rows [R]
    gates: NDArray[np.int64]  # [S, K + N], into pending gates [S * K], new gates [R]
    filled: NDArray[np.bool_] | None  # [K + N, S, 1]: padded places (on the left), None if there are none
    written: Tensor  # int64 [R]: where the new rows are written, as indices into [slots * M]
    output: NDArray[np.int64]  # [R]: index of each new row in [N, S]


class _Constants(NamedTuple):
    """A layer's small weights in the layout of this file's arithmetic."""

    conv: Array  # [taps, conv_dim]
    rate: NDArray[np.float64]  # [heads], negative
    dt_bias: Array  # [heads]


class _Tokens(NamedTuple):
    """Inputs of the delta rule for T tokens of S sequences, token dimension first, float32."""

    key_query: Array  # [T, S * heads, 2, DK]: unit length, the query times DK ** -0.5
    value: Array  # [T, S * heads, DV]
    decay: Array  # [T, S * heads, 1]: factor of the state
    write: Array  # [T, S * heads, 1]: the fraction of the error that is corrected
    overlap: Array  # [T, S * heads, 1]: dot product of key and query


@quietly
def delta_net_step(qkv, a, b, weights, pool, cu_rows, slots, num_accepted):
    taps, max_pending = weights.conv.shape[1], pool.pending_rows.shape[1]
    layout = _layout(tuple(cu_rows.tolist()), tuple(num_accepted.tolist()), tuple(slots.tolist()), taps, max_pending)
    if not len(layout.own):
        return qkv.new_empty(0, *pool.matrices.shape[1::2])
    gates = np.empty((len(qkv), 2, a.shape[1]), dtype=np.float32)
    gates[:, 0], gates[:, 1] = array(a), array(b)
    gather = _neighbours_with_pending if layout.block else _with_pending
    extended, all_gates = gather(array(qkv), gates, pool, layout)
    outputs = _recur(_tokens(extended, all_gates, _constants(weights), pool, layout), pool.matrices, layout)
    if layout.most_accepted:
        accepted = torch.from_numpy(extended[:, layout.most_accepted : layout.most_accepted + taps - 1])
        pool.conv_rows.index_copy_(0, layout.own, accepted.to(pool.conv_rows.dtype))
    pool.pending_rows.flatten(0, 1).index_copy_(0, layout.written, qkv.to(pool.pending_rows.dtype))
    pool.pending_gates.flatten(0, 1).index_copy_(0, layout.written, torch.from_numpy(gates))
    return tensor(outputs.take(layout.output, axis=0), qkv.dtype)


@quietly
def gated_norm(o, z, weight, eps):
    mixed = array(o)
    normed = mixed * inverse_rms(mixed, eps)
    normed *= array(weight)
    flat = normed.reshape(len(normed), normed.shape[1] * normed.shape[2])
    flat *= silu(array(z))
    return tensor(flat, z.dtype)


@lru_cache(maxsize=64)
def _layout(
    edges: tuple[int, ...], num_accepted: tuple[int, ...], slots: tuple[int, ...], taps: int, max_pending: int
) -> _Layout:
    places = place_tokens(edges, num_accepted, taps)
    most_accepted, num_new = places.most_accepted, places.num_new
    own = [slots[s] for s in places.alive]
    is_even = places.filled is None and len(places.new) == len(own) * num_new
    is_block = is_even and num_new > 0 and own == list(range(own[0], own[0] + len(own)))
    return _Layout(
        torch.tensor(own, dtype=torch.int64),
        slice(own[0], own[0] + len(own)) if is_block else None,
        most_accepted,
        num_new,
        torch.tensor([slot * max_pending + place for slot in own for place in range(most_accepted)], dtype=torch.int64),
        np.array(places.rows, dtype=np.int64),
        np.array(places.gates, dtype=np.int64),
        None if places.filled is None else np.array(places.filled).T[:, :, None],
        torch.tensor([own[index] * max_pending + place for index, place in places.new], dtype=torch.int64),
        np.array([place * len(own) + index for index, place in places.new], dtype=np.int64),
    )


@lru_cache(maxsize=1024)
def _constants(weights: DeltaWeights) -> _Constants:
    rate = -weights.a_log.to(torch.float64).exp().numpy()
    return _Constants(array(weights.conv.T.contiguous()), rate, array(weights.dt_bias))


def _with_pending(qkv: Array, gates: Array, pool: DeltaPool, layout: _Layout) -> tuple[Array, Array]:
    """Rows [S, taps - 1 + K + N, conv_dim] and gates [S, K + N, 2, heads] in the layout: accepted, then new."""
    rows = [array(pool.conv_rows.index_select(0, layout.own)).reshape(-1, qkv.shape[1]), qkv]
    all_gates = [gates]
    if layout.most_accepted:
        rows.insert(1, array(pool.pending_rows.flatten(0, 1).index_select(0, layout.pending)))
        all_gates.insert(0, array(pool.pending_gates.flatten(0, 1).index_select(0, layout.pending)))
    return np.concatenate(rows).take(layout.rows, axis=0), np.concatenate(all_gates).take(layout.gates, axis=0)


def _neighbours_with_pending(qkv: Array, gates: Array, pool: DeltaPool, layout: _Layout) -> tuple[Array, Array]:
    """`_with_pending` for a layout with a `block`."""
    num, most_accepted, num_new = len(layout.own), layout.most_accepted, layout.num_new
    rows = [array(pool.conv_rows[layout.block]), qkv.reshape(num, num_new, -1)]
    new_gates = gates.reshape(num, num_new, *gates.shape[1:])
    if not most_accepted:
        return np.concatenate(rows, axis=1), new_gates
    rows.insert(1, array(pool.pending_rows[layout.block, :most_accepted]))
    accepted_gates = array(pool.pending_gates[layout.block, :most_accepted])
    return np.concatenate(rows, axis=1), np.concatenate([accepted_gates, new_gates], axis=1)


def _tokens(extended: Array, gates: Array, constants: _Constants, pool: DeltaPool, layout: _Layout) -> _Tokens:
    """From rows [S, taps - 1 + T, conv_dim] (the first taps - 1 precede the T tokens), gates [S, T, 2, heads]."""
    num, num_tokens, _, heads = gates.shape
    key_dim, value_dim, key_heads = *pool.matrices.shape[2:], pool.num_key_heads
    mixed = extended[:, :num_tokens] * constants.conv[0]
    for tap in range(1, len(constants.conv)):
        mixed += extended[:, tap : tap + num_tokens] * constants.conv[tap]
    by_token = silu(mixed).transpose(1, 0, 2)
    both = 2 * key_heads * key_dim
    unit = _unit(np.ascontiguousarray(by_token[..., :both]).reshape(num_tokens, num, 2, key_heads, 1, key_dim))
    unit[:, :, 0] *= np.float32(key_dim**-0.5)
    key_query = np.empty((num_tokens, num, key_heads, heads // key_heads, 2, key_dim), dtype=np.float32)
    key_query[..., 0, :], key_query[..., 1, :] = unit[:, :, 1], unit[:, :, 0]
    overlap = np.add.reduce(unit[:, :, 0] * unit[:, :, 1], axis=-1, keepdims=True)
    decay, write = _fade(gates.transpose(1, 2, 0, 3), constants, layout)
    return _Tokens(
        key_query.reshape(num_tokens, -1, 2, key_dim),
        np.ascontiguousarray(by_token[..., both:]).reshape(num_tokens, -1, value_dim),
        decay.reshape(num_tokens, -1, 1),
        write.reshape(num_tokens, -1, 1),
        np.repeat(overlap, heads // key_heads, axis=3).reshape(num_tokens, -1, 1),
    )


def _unit(x: Array) -> Array:
    length = np.add.reduce(x * x, axis=-1, keepdims=True)
    length += _L2_EPS
    x /= np.sqrt(length, length)
    return x


def _fade(gates: Array, constants: _Constants, layout: _Layout) -> tuple[Array, Array]:
    """(decay, write), each [T, S, heads], from gates [T, 2, S, heads]."""
    fading = np.logaddexp(0.0, (gates[:, 0] + constants.dt_bias).astype(np.float64))
    fading *= constants.rate
    decay, write = np.exp(fading).astype(np.float32), sigmoid(gates[:, 1])
    if layout.filled is not None:
        decay[np.broadcast_to(layout.filled, decay.shape)] = 1.0
        write[np.broadcast_to(layout.filled, write.shape)] = 0.0
    return decay, write


def _recur(tokens: _Tokens, states: Tensor, layout: _Layout) -> Array:
    """Outputs [N * S, heads, DV] of the new tokens; updates states [slots, heads, DK, DV] with the accepted tokens.

    For each token a head's matrix decays, is multiplied by the key, is corrected by a fraction of the error, and is
    rounded to the dtype of states. The output (query times the corrected matrix, not yet rounded) follows from the
    matrix before its correction, so the correction of the last token is not written.
    """
    most_accepted, num_tokens = layout.most_accepted, layout.most_accepted + layout.num_new
    is_view = layout.block is not None and states.dtype is torch.float32
    matrices = (states[layout.block] if is_view else states.index_select(0, layout.own)).flatten(0, 1)
    matrices = matrices.to(torch.float32)
    outputs = np.empty((layout.num_new, *tokens.value.shape[1:]), dtype=np.float32)
    for t in range(num_tokens):
        asked, decay, write = tokens.key_query[t], tokens.decay[t], tokens.write[t]
        found = np.matmul(asked, matrices.numpy())
        found *= decay[:, :, None]
        correction = tokens.value[t] - found[:, 0]
        correction *= write
        if t >= most_accepted:
            np.multiply(tokens.overlap[t], correction, outputs[t - most_accepted])
            outputs[t - most_accepted] += found[:, 1]
        if t == most_accepted and t < num_tokens - 1 and is_view:
            matrices = matrices.clone()
        if t < max(most_accepted, num_tokens - 1):
            matrices.mul_(torch.from_numpy(decay[:, :, None]))
            matrices.baddbmm_(torch.from_numpy(asked[:, :1]).mT, torch.from_numpy(correction[:, None]))
            matrices = matrices.to(states.dtype).to(torch.float32)
        if t == most_accepted - 1 and not is_view:
            states.index_copy_(0, layout.own, matrices.view(-1, *states.shape[1:]).to(states.dtype))
    return outputs.reshape(-1, *states.shape[1::2])
