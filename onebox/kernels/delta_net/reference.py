"""The twins of Gated DeltaNet."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.kernels.common.invariant import add_in_order, sigmoid, silu, softplus
from onebox.kernels.common.rows import FixedRows, unscaled_rows
from onebox.kernels.delta_net.layout import place_tokens
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights

__all__ = ["delta_net_prefill", "delta_net_step", "delta_net_step_fused", "gated_norm", "gated_norm_fused"]

_CHUNK = 64
_L2_EPS = 1e-6


class _Tokens(NamedTuple):
    """Inputs of the delta rule, float32."""

    query: Tensor  # [..., heads, DK], unit length times DK ** -0.5
    key: Tensor  # [..., heads, DK], unit length
    value: Tensor  # [..., heads, DV]
    log_decay: Tensor  # [..., heads], logarithm of the state's factor, at most 0
    write: Tensor  # [..., heads], the fraction of the error that is corrected, 0..1


class _Layout(NamedTuple):
    """`TokenPlaces` as tensors; S, K, N as there."""

    alive: Tensor  # int64 [S]: the sequences that have rows or accepted tokens
    most_accepted: int  # K
    rows: Tensor  # int64 [S * (taps - 1 + K + N)], into conv rows [S * (taps - 1)], pending [S * K], new rows [R]
    gates: Tensor  # int64 [S * (K + N)], into pending gates [S * K], new gates [R]
    filled: Tensor | None  # bool [S, K + N, 1]: padded places (on the left), None if there are none
    sequence: Tensor  # int64 [R]: each new row's sequence, 0..S-1
    place: Tensor  # int64 [R]: its index in that sequence
    output: Tensor  # int64 [R]: its index in [N, S]


def delta_net_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
) -> Tensor:
    """Outputs [R, heads, DV], in the dtype of qkv, of a decode or verify step; the pool is written in place.

    qkv [R, conv_dim] before the convolution, a and b [R, heads] before their activations; rows may be strided. Sequence
    s has the rows cu_rows[s]..cu_rows[s + 1] (int32 [S + 1]), at most M of them and possibly none, and the slot
    slots[s] (int32 [S], all different). Of the slot's pending tokens the first num_accepted[s] (int32 [S], at most as
    many as its last step had; 0 after a prefill) are folded into the state, which is read once and written once; the
    rest are discarded, and this step's tokens become the pending ones. For a sequence with no rows and no accepted
    tokens (padding) the slot is neither read nor written, so any slot id is valid; for one with no rows but accepted
    tokens only the slot is updated. Rows behind the last sequence's belong to none, and their outputs are not set.

    A token's bits depend on its sequence's accepted tokens alone: not on how they were grouped into steps, on
    tokens that were discarded, or on other sequences.
    """
    taps, num_rows = weights.conv.shape[1], len(qkv)
    edges = cu_rows.tolist()
    layout = _layout(tuple(edges), tuple(num_accepted.tolist()), taps)
    own, most_accepted = slots.long()[layout.alive], layout.most_accepted
    if not len(own):
        return _unset(qkv, num_rows, pool)
    qkv, a, b = (part[: edges[-1]] for part in (qkv, a, b))
    gates = torch.stack([a, b], dim=1).to(torch.float32)
    extended, all_gates = _with_pending(qkv, gates, pool, own, layout)
    outputs = _recur(_tokens(extended, all_gates, weights, pool), pool.matrices, own, layout)
    if most_accepted:
        pool.conv_rows[own] = extended[:, most_accepted : most_accepted + taps - 1].to(pool.conv_rows.dtype)
    pool.pending_rows[own[layout.sequence], layout.place] = qkv.to(pool.pending_rows.dtype)
    pool.pending_gates[own[layout.sequence], layout.place] = gates
    found = outputs.index_select(0, layout.output).to(qkv.dtype)
    return torch.cat([found, _unset(qkv, num_rows - len(found), pool)]) if num_rows > len(found) else found


def _unset(qkv: Tensor, num_rows: int, pool: DeltaPool) -> Tensor:
    """Outputs [num_rows, heads, DV] of rows of no sequence: NaN, so that nobody reads them unnoticed."""
    return qkv.new_full((num_rows, *pool.matrices.shape[1::2]), float("nan"))


def _with_pending(qkv: Tensor, gates: Tensor, pool: DeltaPool, own: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Rows [S, taps - 1 + K + N, conv_dim] and gates [S, K + N, 2, heads] in this layout, float32: accepted, new."""
    pending = (own.unsqueeze(-1) * pool.pending_rows.shape[1] + torch.arange(layout.most_accepted)).flatten()
    before = pool.conv_rows.index_select(0, own).flatten(0, 1)
    rows = torch.cat([before, pool.pending_rows.flatten(0, 1).index_select(0, pending), qkv]).to(torch.float32)
    all_gates = torch.cat([pool.pending_gates.flatten(0, 1).index_select(0, pending), gates])
    return (
        rows.index_select(0, layout.rows).view(len(own), -1, qkv.shape[1]),
        all_gates.index_select(0, layout.gates).view(len(own), -1, *gates.shape[1:]),
    )


@lru_cache(maxsize=64)
def _layout(edges: tuple[int, ...], num_accepted: tuple[int, ...], taps: int) -> _Layout:
    """Cached: the layout is the same for every layer of a step, and for many steps."""
    places = place_tokens(edges, num_accepted, taps)
    sequence, place = torch.tensor(places.new, dtype=torch.int64).view(-1, 2).unbind(1)
    return _Layout(
        torch.tensor(places.alive, dtype=torch.int64),
        places.most_accepted,
        torch.tensor(places.rows, dtype=torch.int64).flatten(),
        torch.tensor(places.gates, dtype=torch.int64).flatten(),
        None if places.filled is None else torch.tensor(places.filled).unsqueeze(-1),
        sequence,
        place,
        place * len(places.alive) + sequence,
    )


def delta_net_prefill(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    saves: Tensor,
) -> Tensor:
    """Outputs [T, heads, DV], in the dtype of qkv, of a prefill; all tokens are folded into the pool at once.

    Arguments as for `delta_net_step`, with any number of rows per sequence; pending tokens are neither read nor
    written. Tokens are processed in chunks of 64 from each sequence's first row on: a prompt split at multiples of 64
    gives the same bits as the whole prompt. After row r the state of its sequence is also saved in the slot saves[r]
    (int32 [T]) unless that is negative; only after a multiple of 64 of the sequence's rows. Rows behind the last
    sequence's belong to none, and their outputs are not set.
    """
    edges, saved = cu_rows.tolist(), saves.tolist()
    outputs = _unset(qkv, len(qkv), pool)
    for sequence, slot in enumerate(slots.tolist()):
        new = slice(edges[sequence], edges[sequence + 1])
        extended = torch.cat([part.to(torch.float32) for part in (pool.conv_rows[slot], qkv[new])])
        gates = torch.stack([a[new], b[new]], dim=1).to(torch.float32)
        tokens = _tokens(extended, gates, weights, pool)
        for start in range(0, gates.shape[0], _CHUNK):
            chunk = _Tokens(*(part[start : start + _CHUNK].transpose(0, 1).contiguous() for part in tokens))
            mixed, pool.matrices[slot] = _delta_chunk(chunk, pool.matrices[slot].to(torch.float32))
            outputs[new][start : start + _CHUNK] = mixed.transpose(0, 1)
            end = start + _CHUNK
            if end <= gates.shape[0] and (save := saved[new.start + end - 1]) >= 0:
                pool.matrices[save] = pool.matrices[slot]
                pool.conv_rows[save] = extended[end : end + len(pool.conv_rows[slot])]
        pool.conv_rows[slot] = extended[gates.shape[0] :]
    return outputs


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normed o times weight times silu(z), the norm over each head's DV: [R, heads * DV] in the dtype of z.

    o [R, heads, DV] any float dtype; z [R, heads * DV], rows may be strided; weight [DV], not an offset from one.
    """
    mixed = o.to(torch.float32)
    normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps)
    return (weight.to(torch.float32) * normed * silu(z).view(o.shape)).flatten(1).to(z.dtype)


def _tokens(extended: Tensor, gates: Tensor, weights: DeltaWeights, pool: DeltaPool) -> _Tokens:
    """From rows [..., taps - 1 + N, conv_dim] (the first taps - 1 precede the N tokens), gates [..., N, 2, heads]."""
    num_tokens, _, heads = gates.shape[-3:]
    _, _, key_dim, value_dim = pool.matrices.shape
    conv = weights.conv.to(torch.float32).T.contiguous()
    mixed = conv[0] * extended.narrow(-2, 0, num_tokens)
    for tap in range(1, len(conv)):
        mixed += conv[tap] * extended.narrow(-2, tap, num_tokens)
    both = 2 * pool.num_key_heads
    turned, value = silu(mixed).tensor_split([both * key_dim], dim=-1)
    query, key = _unit(turned.reshape(*turned.shape[:-1], both, key_dim)).chunk(2, dim=-2)
    repeats = heads // pool.num_key_heads
    rate = weights.a_log.to(torch.float64).exp()
    query, key = (part.unsqueeze(-2).expand(*part.shape[:-1], repeats, key_dim) for part in (query, key))
    return _Tokens(
        (query * key_dim**-0.5).flatten(-3, -2),
        key.flatten(-3, -2),
        value.reshape(*value.shape[:-1], heads, value_dim),
        -(rate * softplus(gates[..., 0, :] + weights.dt_bias.to(torch.float32))).to(torch.float32),
        sigmoid(gates[..., 1, :]),
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _recur(tokens: _Tokens, states: Tensor, own: Tensor, layout: _Layout) -> Tensor:
    """Outputs [N * S, heads, DV] of the new tokens; states [slots, heads, DK, DV] of `own` take in the accepted tokens.

    For each token a head's matrix decays, is multiplied by the key, is corrected by a fraction of the error, and is
    rounded to the dtype of states. The output (query times the corrected matrix, not yet rounded) follows from the
    matrix before its correction, so the correction of the last token is not written.
    """
    matrices = states.index_select(0, own).flatten(0, 1).to(torch.float32)
    decay, write = tokens.log_decay.exp(), tokens.write
    if layout.filled is not None:
        decay, write = decay.masked_fill(layout.filled, 1.0), write.masked_fill(layout.filled, 0.0)
    num_tokens, heads = decay.shape[1:]
    key_query = torch.stack([tokens.key, tokens.query], dim=-2)
    overlap = (tokens.key * tokens.query).sum(-1)
    by_token = [part.transpose(0, 1).flatten(1, 2) for part in (key_query, tokens.value, decay, write, overlap)]
    outputs = []
    for t in range(num_tokens):
        asked, value, faded, written, shared = (part[t] for part in by_token)
        recalled, answer = (faded.view(-1, 1, 1) * torch.bmm(asked, matrices)).unbind(1)
        correction = written.unsqueeze(-1) * (value - recalled)
        if t >= layout.most_accepted:
            outputs.append(answer + shared.unsqueeze(-1) * correction)
        if t < max(layout.most_accepted, num_tokens - 1):
            matrices.mul_(faded.view(-1, 1, 1)).baddbmm_(asked[:, :1].mT, correction.unsqueeze(1))
            matrices = matrices.to(states.dtype).to(torch.float32)
        if t == layout.most_accepted - 1:
            for slot, matrix in zip(own.tolist(), torch.split(matrices, heads), strict=True):
                states[slot].copy_(matrix)
    mixed = torch.cat(outputs) if outputs else matrices.new_empty(0, matrices.shape[-1])
    return mixed.view(-1, heads, matrices.shape[-1])


def _delta_chunk(tokens: _Tokens, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [heads, N, DV] of one chunk, heads first in every field of `tokens`, and the matrices after it.

    Token i's correction needs the earlier ones: c_i = write_i (v_i - fade_i k_i S - sum_j<i fade_ij (k_i . k_j) c_j).
    This is a unit lower triangular system in all corrections of the chunk.
    """
    query, key, value, log_decay, write = tokens
    total = log_decay.cumsum(dim=-1)
    fade = total.exp().unsqueeze(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    # The upper triangle would overflow in exp, so it is masked before exp, not after.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    system = write.unsqueeze(-1) * (key @ key.mT) * between
    target = write.unsqueeze(-1) * (value - fade * (key @ matrices))
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    outputs = fade * (query @ matrices) + ((query @ key.mT) * between) @ corrections
    to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
    return outputs, fade[:, -1:] * matrices + (key * to_end).mT @ corrections


def delta_net_step_fused(
    qkv_parts: Tensor,
    a_parts: Tensor,
    b_parts: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
) -> Tensor:
    """`delta_net_step` with outputs float32 [R, heads, DV], from parts (partial sums) that are added in order.

    qkv_parts float32 [parts, R, conv_dim]; a_parts and b_parts float32 [gate parts, R, heads], with the same stride
    over parts. A row of qkv is rounded to the pool's dtype before it is used, so that a later step reads the same
    number from the pool.
    """
    qkv = add_in_order(qkv_parts).to(pool.pending_rows.dtype).to(torch.float32)
    a, b = add_in_order(a_parts), add_in_order(b_parts)
    return delta_net_step(qkv, a, b, weights, pool, cu_rows, slots, num_accepted)


def gated_norm_fused(mixed: Tensor, z_parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> FixedRows:
    """`gated_norm` as rows [R, heads * DV]: norm(mixed) * weight * silu(z), the norm over each head.

    mixed float32 [R, heads, DV], DV divides 128; z_parts float32 [parts, R, heads * DV], added in order, any
    strides over parts and R; weight [DV].
    """
    return unscaled_rows(gated_norm(mixed, add_in_order(z_parts), weight, eps), dtype)
