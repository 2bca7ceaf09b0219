"""The plain twins of Gated DeltaNet. The delta rule token by token is the definition; prefill takes it 64 at a time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights

__all__ = ["delta_net_prefill", "delta_net_step", "gated_norm"]

_CHUNK = 64
_L2_EPS = 1e-6


class _Tokens(NamedTuple):
    """What N tokens bring to the delta rule, float32."""

    query: Tensor  # [N, heads, Dk], unit length times Dk ** -0.5
    key: Tensor  # [N, heads, Dk], unit length
    value: Tensor  # [N, heads, Dv]
    log_decay: Tensor  # [N, heads], the logarithm of what is left of the state, at most 0
    write: Tensor  # [N, heads], the part of an error that is corrected, 0..1


def delta_net_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    keep: Tensor,
) -> Tensor:
    """See `onebox.kernels.delta_net.delta_net_step`."""
    edges, taps = cu_rows.tolist(), weights.conv.shape[1]
    outputs = qkv.new_empty(qkv.shape[0], *pool.matrices.shape[1::2])
    for sequence, (slot, kept) in enumerate(zip(slots.tolist(), keep.tolist(), strict=True)):
        new = slice(edges[sequence], edges[sequence + 1])
        gates = torch.stack([a[new], b[new]], dim=1).to(torch.float32)
        rows = torch.cat([part.to(torch.float32) for part in (pool.pending_rows[slot, :kept], qkv[new])])
        extended = torch.cat([pool.conv_rows[slot].to(torch.float32), rows])
        tokens = _tokens(extended, torch.cat([pool.pending_gates[slot, :kept], gates]), weights, pool)
        outputs[new] = _recur(tokens, pool.matrices[slot], kept)
        pool.conv_rows[slot] = extended[kept : kept + taps - 1]
        pool.pending_rows[slot, : gates.shape[0]] = qkv[new]
        pool.pending_gates[slot, : gates.shape[0]] = gates
    return outputs


def delta_net_prefill(
    qkv: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, pool: DeltaPool, cu_rows: Tensor, slots: Tensor
) -> Tensor:
    """See `onebox.kernels.delta_net.delta_net_prefill`."""
    edges = cu_rows.tolist()
    outputs = qkv.new_empty(qkv.shape[0], *pool.matrices.shape[1::2])
    for sequence, slot in enumerate(slots.tolist()):
        new = slice(edges[sequence], edges[sequence + 1])
        extended = torch.cat([part.to(torch.float32) for part in (pool.conv_rows[slot], qkv[new])])
        gates = torch.stack([a[new], b[new]], dim=1).to(torch.float32)
        tokens = _tokens(extended, gates, weights, pool)
        for start in range(0, gates.shape[0], _CHUNK):
            chunk = _Tokens(*(part[start : start + _CHUNK].transpose(0, 1) for part in tokens))
            mixed, pool.matrices[slot] = _delta_chunk(chunk, pool.matrices[slot])
            outputs[new][start : start + _CHUNK] = mixed.transpose(0, 1)
        pool.conv_rows[slot] = extended[gates.shape[0] :]
    return outputs


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `onebox.kernels.delta_net.gated_norm`."""
    mixed = o.to(torch.float32)
    normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps)
    gate = F.silu(z.to(torch.float32)).view(o.shape)
    return (weight.to(torch.float32) * normed * gate).flatten(1).to(z.dtype)


def _tokens(extended: Tensor, gates: Tensor, weights: DeltaWeights, pool: DeltaPool) -> _Tokens:
    """From rows [taps - 1 + N, conv_dim] (the first are those before the N tokens) and gates [N, 2, heads]."""
    num_tokens, _, heads = gates.shape
    _, _, key_dim, value_dim = pool.matrices.shape
    conv, a_log, dt_bias = (weight.to(torch.float32) for weight in weights)
    mixed = conv[:, 0] * extended[:num_tokens]
    for tap in range(1, conv.shape[1]):
        mixed = mixed + conv[:, tap] * extended[tap : tap + num_tokens]
    keys_width = pool.num_key_heads * key_dim
    query, key, value = F.silu(mixed).tensor_split([keys_width, 2 * keys_width], dim=-1)
    repeats = heads // pool.num_key_heads
    query, key = (_unit(part.reshape(num_tokens, pool.num_key_heads, key_dim)) for part in (query, key))
    return _Tokens(
        query.repeat_interleave(repeats, dim=1) * key_dim**-0.5,
        key.repeat_interleave(repeats, dim=1),
        value.reshape(num_tokens, heads, value_dim),
        -a_log.exp() * F.softplus(gates[:, 0] + dt_bias),
        gates[:, 1].sigmoid(),
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _recur(tokens: _Tokens, state: Tensor, kept: int) -> Tensor:
    """Outputs [N - kept, heads, Dv] of the tokens after the kept ones; state [heads, Dk, Dv] then holds the kept ones.

    A head's matrix fades, is asked for what it holds under the new key, and is corrected by a part of the error.
    """
    matrices = state.clone()
    outputs = torch.empty_like(tokens.value)
    for t in range(outputs.shape[0]):
        query, key, value, log_decay, write = (part[t] for part in tokens)
        matrices = matrices * log_decay.exp()[:, None, None]
        recalled = (matrices * key[:, :, None]).sum(1)
        correction = write[:, None] * (value - recalled)
        matrices = matrices + key[:, :, None] * correction[:, None, :]
        outputs[t] = (matrices * query[:, :, None]).sum(1)
        if t == kept - 1:
            state.copy_(matrices)
    return outputs[kept:]


def _delta_chunk(tokens: _Tokens, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [heads, N, Dv] of one chunk, heads first in every part of `tokens`, and the matrices after it.

    Token i's correction needs those before it: c_i = write_i (v_i - fade_i k_i S - sum_j<i fade_ij (k_i . k_j) c_j).
    That is a unit lower triangular system in all corrections of the chunk.
    """
    query, key, value, log_decay, write = tokens
    total = log_decay.cumsum(dim=-1)
    fade = total.exp().unsqueeze(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    # The upper half would overflow in exp, so it is cut before, not after.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    system = write.unsqueeze(-1) * (key @ key.mT) * between
    target = write.unsqueeze(-1) * (value - fade * (key @ matrices))
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    outputs = fade * (query @ matrices) + ((query @ key.mT) * between) @ corrections
    to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
    return outputs, fade[:, -1:] * matrices + (key * to_end).mT @ corrections
