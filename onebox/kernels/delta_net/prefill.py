"""Gated DeltaNet for the tokens of a prompt in Triton: convolution, norms and gates here, the chunks in `chunks.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.delta_net.chunks import scan_chunks
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.delta_net.step import softplus

__all__ = ["delta_net_prefill"]

_TILE = 16
"""Tokens per program of `prepare`; divides the chunks of 64 after which states may be saved."""


_LEAST_PROGRAMS = 8
"""Of each sequence and head in `prepare`, where it has so many tiles."""


@triton.jit
def _load_rows(
    tokens,  # [N]; negative: the slot's conv rows
    end,  # number of tokens; later ones do not exist
    inside,  # [C]
    qkv_ptr,  # [C], at the sequence's first row; the next at the slot's first row
    conv_rows_ptr,  # [C]
    qkv_stride,
    CONV_DIM: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Rows before the convolution, float32 [N, C], zero if absent; new ones rounded to the dtype of the pool."""
    mask = (tokens < end)[:, None] & inside[None, :]
    before = conv_rows_ptr[None, :] + (TAPS - 1 + tokens)[:, None] * CONV_DIM
    rows = tl.load(before, mask=mask & (tokens < 0)[:, None], other=0.0).to(tl.float32)
    new = qkv_ptr[None, :] + tokens.to(tl.int64)[:, None] * qkv_stride
    new_rows = tl.load(new, mask=mask & (tokens >= 0)[:, None], other=0.0).to(tl.float32)
    return rows + rounded(new_rows, conv_rows_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _save_rows(
    shift,  # from the sequence's slot to the one that is written
    position,  # number of tokens before the saved state
    end,
    inside,
    qkv_ptr,  # this and the following as in `_load_rows`
    conv_rows_ptr,
    qkv_stride,
    CONV_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Writes the conv rows of the state after `position` tokens."""
    places = tl.arange(0, TOKENS)
    recent = position - (TAPS - 1) + places
    rows = _load_rows(recent, end, inside, qkv_ptr, conv_rows_ptr, qkv_stride, CONV_DIM, TAPS)
    # A thread may write other elements than it reads: all reads come first.
    tl.debug_barrier()
    at = conv_rows_ptr[None, :] + (shift * (TAPS - 1) + places)[:, None] * CONV_DIM
    tl.store(at, rows.to(conv_rows_ptr.dtype.element_ty), mask=(places < TAPS - 1)[:, None] & inside[None, :])


@triton.jit
def delta_net_prepare_kernel(
    qkv_ptr,  # [T, CONV_DIM]
    a_ptr,  # [T, HEADS]
    b_ptr,  # [T, HEADS]
    conv_ptr,  # [CONV_DIM, TAPS]
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,  # [HEADS]
    conv_rows_ptr,  # [slots, TAPS - 1, CONV_DIM]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    saves_ptr,  # int32 [T]
    mixed_ptr,  # float32 [T, CONV_DIM]
    log_decay_ptr,  # float32 [T, HEADS]
    write_ptr,  # float32 [T, HEADS]
    qkv_stride,
    a_stride,
    b_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of the wider kind of head, rounded up to a power of two
    TOKENS: tl.constexpr,  # at least TAPS, so that only the first program of a sequence reads its conv rows
):
    """Program (tile of tokens, sequence, head): query heads, key heads, value heads; value heads also do the gates."""
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    sequence, head = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    end = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)

    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    start = tl.where(is_value, 2 * KEY_HEADS * DK + value_head * DV, head * DK)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < tl.where(is_value, DV, DK)
    channels = start + lanes
    qkv_at = qkv_ptr + first * qkv_stride + channels
    conv_at = conv_rows_ptr + slot * ((TAPS - 1) * CONV_DIM) + channels
    a_ptr += first * a_stride + value_head
    b_ptr += first * b_stride + value_head

    base = tl.program_id(0) * TOKENS
    while base < end:
        tokens = base + tl.arange(0, TOKENS)
        wanted = tokens < end
        mixed = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            met = tokens - (TAPS - 1 - tap)
            rows = _load_rows(met, end, inside, qkv_at, conv_at, qkv_stride, CONV_DIM, TAPS)
            weight = tl.load(conv_ptr + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            mixed += weight[None, :] * rows
        mixed *= tl.sigmoid(mixed)
        scale = tl.rsqrt(tl.sum(mixed * mixed, 1) + 1e-6) * tl.where(head < KEY_HEADS, DK**-0.5, 1.0)
        mixed *= tl.where(is_value, 1.0, scale)[:, None]
        at = mixed_ptr + (first + tokens)[:, None] * CONV_DIM + channels[None, :]
        tl.store(at, mixed, mask=wanted[:, None] & inside[None, :])
        if is_value:
            fresh = tokens.to(tl.int64)
            a = tl.load(a_ptr + fresh * a_stride, mask=wanted, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + fresh * b_stride, mask=wanted, other=0.0).to(tl.float32)
            rate = tl.exp(tl.load(a_log_ptr + value_head).to(tl.float32))
            bias = tl.load(dt_bias_ptr + value_head).to(tl.float32)
            gate_at = (first + tokens) * HEADS + value_head
            tl.store(log_decay_ptr + gate_at, -rate * softplus(a + bias), mask=wanted)
            tl.store(write_ptr + gate_at, tl.sigmoid(b), mask=wanted)
        # TOKENS divides the chunks after which states are saved.
        save = tl.load(saves_ptr + first + base + TOKENS - 1, mask=base + TOKENS <= end, other=-1).to(tl.int64)
        if save >= 0:
            _save_rows(save - slot, base + TOKENS, end, inside, qkv_at, conv_at, qkv_stride, CONV_DIM, TAPS, TOKENS)
        base += tl.num_programs(0) * TOKENS

    # Updates the slot's conv rows to the end of all tokens.
    if (tl.program_id(0) == 0) & (end > 0):
        _save_rows(0, end, end, inside, qkv_at, conv_at, qkv_stride, CONV_DIM, TAPS, TOKENS)


def delta_net_prefill(qkv, a, b, weights, pool, cu_rows, slots, saves):
    num_tokens = len(qkv)
    _, heads, _, value_dim = pool.matrices.shape
    out = qkv.new_empty(num_tokens, heads, value_dim)
    if not num_tokens:
        return out
    mixed, log_decay, write = _prepare(qkv, a, b, weights, pool, cu_rows, slots, saves)
    scan_chunks((mixed, log_decay, write), pool, cu_rows, slots, saves, out)
    return out


def _prepare(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    saves: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Results of `prepare`: (mixed, log_decay, write), float32."""
    num_tokens, (conv_dim, taps) = len(qkv), weights.conv.shape
    _, heads, key_dim, value_dim = pool.matrices.shape
    mixed = qkv.new_empty(num_tokens, conv_dim, dtype=torch.float32)
    log_decay, write = (qkv.new_empty(num_tokens, heads, dtype=torch.float32) for _ in range(2))
    # The programs of a sequence share its tiles; there are fewer of them where there is room for several sequences.
    num_tiles = ceil_div(num_tokens, _TILE)
    num_programs = min(num_tiles, max(_LEAST_PROGRAMS, ceil_div(num_tiles, len(slots))))
    grid = (num_programs, len(slots), 2 * pool.num_key_heads + heads)
    delta_net_prepare_kernel[grid](
        qkv,
        a,
        b,
        *weights,
        pool.conv_rows,
        cu_rows,
        slots,
        saves,
        mixed,
        log_decay,
        write,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        KEY_HEADS=pool.num_key_heads,
        HEADS=heads,
        DK=key_dim,
        DV=value_dim,
        TAPS=taps,
        BLOCK=next_power_of_2(max(key_dim, value_dim)),
        TOKENS=_TILE,
        num_warps=4,
    )
    return mixed, log_decay, write
