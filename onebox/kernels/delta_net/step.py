"""Gated DeltaNet's decode step in Triton: two launches, one warp per program, tokens one after another.

    prepare   (sequence, head)           convolution, SiLU, unit queries and keys, gates; updates the slot's conv rows
    recur     (stripe, head, sequence)   loops over accepted and new tokens, a stripe of value columns in registers

The columns of a head's matrix are independent, so stripes share nothing. The scratch tensor between the two has the
columns of qkv: queries, keys, values. Loops with a length known only on the device are `while` loops: Triton's
interpreter does not accept a loaded number as the bound of a `for` loop.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights

__all__ = ["delta_net_step", "delta_net_step_fused", "softplus"]

_PREPARE, _RECUR = Tunable("delta_prepare"), Tunable("delta_recur")

_STRIPE = 16
"""Value columns per program of `recur`: with one warp, sums over a column need no shared memory."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)), x itself above 20; the quotient compensates the rounding of 1 + exp(x) for small exp(x)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + grown
    is_lost = rounded == 1.0
    exact = tl.log(rounded) * (grown / tl.where(is_lost, 1.0, rounded - 1.0))
    return tl.where(x > 20.0, x, tl.where(is_lost, grown, exact))


@triton.jit
def _split_taps(all_taps, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """The first TAPS columns of [BLOCK, 4 or 8], each float32 [BLOCK]."""
    if TAPS > 4:
        low, high = tl.split(tl.permute(tl.reshape(all_taps, (BLOCK, 2, 4)), (0, 2, 1)))
        taps = _split_taps(low, 4, BLOCK) + _split_taps(high, TAPS - 4, BLOCK)
    else:
        even, odd = tl.split(tl.reshape(all_taps.to(tl.float32), (BLOCK, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        taps = (first, second, third, fourth)
    return taps


@triton.jit
def _load_row(
    token,  # below num_accepted: a pending token, else a row of this call
    num_accepted,
    is_there,  # [C]
    source,  # qkv [C] at the sequence's first row, pending rows [C] at the slot's, row and part strides of qkv
    CONV_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A row before the convolution, float32 [C]; a new one is rounded to the pool's dtype, as pending ones are."""
    qkv_ptr, pending_ptr, qkv_stride, part_stride = source
    accepted = tl.load(pending_ptr + token * CONV_DIM, mask=is_there & (token < num_accepted), other=0.0).to(tl.float32)
    at = (token - num_accepted).to(tl.int64) * qkv_stride
    new = sum_parts(qkv_ptr, part_stride, at, is_there & (token >= num_accepted), PARTS)
    return accepted + rounded(new, pending_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _load_gates(
    token,  # as in `_load_row`
    num_accepted,
    is_there,
    source,  # a and b at the sequence's first row, pending gates at the slot's, row strides of a and b, part stride
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A token's a and b before their activations, for one head."""
    a_ptr, b_ptr, pending_ptr, a_stride, b_stride, part_stride = source
    at = pending_ptr + token * (2 * HEADS)
    fresh = (token - num_accepted).to(tl.int64)
    is_new = is_there & (token >= num_accepted)
    a = tl.load(at, mask=is_there & (token < num_accepted), other=0.0)
    b = tl.load(at + HEADS, mask=is_there & (token < num_accepted), other=0.0)
    a += sum_parts(a_ptr, part_stride, fresh * a_stride, is_new, PARTS)
    b += sum_parts(b_ptr, part_stride, fresh * b_stride, is_new, PARTS)
    return a, b


@triton.jit
def delta_net_step_prepare_kernel(
    qkv_ptr,  # [PARTS, R, CONV_DIM]
    a_ptr,  # [GATE_PARTS, R, HEADS]
    b_ptr,  # [GATE_PARTS, R, HEADS]
    conv_ptr,  # [CONV_DIM, TAPS]
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,  # [HEADS]
    conv_rows_ptr,  # [slots, TAPS - 1, CONV_DIM]
    pending_rows_ptr,  # [slots, M, CONV_DIM]
    pending_gates_ptr,  # float32 [slots, M, 2, HEADS]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    num_accepted_ptr,  # int32 [S]
    mixed_ptr,  # float32 [S * 2 M, CONV_DIM]: per sequence the accepted tokens, then the new ones
    log_decay_ptr,  # float32 [S * 2 M, HEADS]
    write_ptr,  # float32 [S * 2 M, HEADS]
    qkv_stride,
    a_stride,
    b_stride,
    part_stride,
    gate_part_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,  # 4 or 8
    M: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of the wider kind of head, rounded up to a power of two
    PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (sequence, head): query heads, then key heads, then value heads, which also compute the gates.

    One program processes all tokens of a sequence and head: it reads pending tokens before it overwrites them.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    release(DEPENDENT)
    sequence, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    last = tl.load(cu_rows_ptr + sequence + 1)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    end = num_accepted + (last - first).to(tl.int32)

    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    start = tl.where(is_value, 2 * KEY_HEADS * DK + value_head * DV, head * DK)
    inside = tl.arange(0, BLOCK) < tl.where(is_value, DV, DK)
    channels = start + tl.arange(0, BLOCK)
    places = tl.arange(0, TAPS_BLOCK)[None, :]
    all_taps = tl.load(conv_ptr + channels[:, None] * TAPS + places, inside[:, None] & (places < TAPS), other=0.0)
    rate = tl.load(a_log_ptr + value_head, mask=is_value, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias_ptr + value_head, mask=is_value, other=0.0).to(tl.float32)
    conv_at = conv_rows_ptr + slot * ((TAPS - 1) * CONV_DIM) + channels
    window = ()  # the rows before a token, oldest first
    for place in tl.static_range(TAPS - 1):
        row = tl.load(conv_at + place * CONV_DIM, mask=inside & (end > 0), other=0.0)
        window += (row.to(tl.float32),)  # type: ignore[assignment]
    # Everything read before this wait is a weight, an input of the step, or a state written by the previous step.
    wait(DEPENDENT)

    qkv_ptr += first * qkv_stride + channels
    a_ptr += first * a_stride + value_head
    b_ptr += first * b_stride + value_head
    pending_at = pending_rows_ptr + slot * (M * CONV_DIM) + channels
    pending_gates_ptr += slot * (M * 2 * HEADS) + value_head
    row_source = (qkv_ptr, pending_at, qkv_stride, part_stride)
    gate_source = (a_ptr, b_ptr, pending_gates_ptr, a_stride, b_stride, gate_part_stride)
    row = _load_row(0, num_accepted, inside & (end > 0), row_source, CONV_DIM, PARTS)
    a, b = _load_gates(0, num_accepted, is_value & (end > 0), gate_source, HEADS, GATE_PARTS)
    taps = _split_taps(all_taps, TAPS, BLOCK)  # not earlier: it waits for the taps to exchange them
    work = sequence.to(tl.int64) * (2 * M)
    token = 0
    while token < end:
        # The next token's loads are in flight while this token is computed.
        is_next = token + 1 < end
        next_row = _load_row(token + 1, num_accepted, inside & is_next, row_source, CONV_DIM, PARTS)
        next_a, next_b = _load_gates(token + 1, num_accepted, is_value & is_next, gate_source, HEADS, GATE_PARTS)
        mixed = taps[0] * window[0]  # type: ignore[misc]
        for tap in tl.static_range(1, TAPS - 1):
            mixed = tl.fma(taps[tap], window[tap], mixed)
        mixed = tl.fma(taps[TAPS - 1], row, mixed)
        mixed *= tl.sigmoid(mixed)
        scale = tl.rsqrt(tl.sum(mixed * mixed, 0) + 1e-6) * tl.where(head < KEY_HEADS, DK**-0.5, 1.0)
        mixed *= tl.where(is_value, 1.0, scale)
        tl.store(mixed_ptr + (work + token) * CONV_DIM + channels, mixed, mask=inside)
        gate_at = (work + token) * HEADS + value_head
        tl.store(log_decay_ptr + gate_at, -tl.exp(rate) * softplus(a + bias), mask=is_value)
        tl.store(write_ptr + gate_at, tl.sigmoid(b), mask=is_value)
        fresh = token - num_accepted
        pending = row.to(pending_rows_ptr.dtype.element_ty)
        tl.store(pending_at + fresh * CONV_DIM, pending, mask=inside & (fresh >= 0))
        gates_at = pending_gates_ptr + fresh * (2 * HEADS)
        tl.store(gates_at, a, mask=is_value & (fresh >= 0))
        tl.store(gates_at + HEADS, b, mask=is_value & (fresh >= 0))
        window = window[1:] + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no starred tuples
        row, a, b = next_row, next_a, next_b
        token += 1
        if token == num_accepted:
            # Updates the slot's conv rows to the end of the accepted tokens. A thread may write other elements than it
            # reads; all reads of accepted tokens come first.
            tl.debug_barrier()
            for place in tl.static_range(TAPS - 1):
                tl.store(conv_at + place * CONV_DIM, window[place].to(conv_rows_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_token(
    token,  # its row in the scratch tensors, int64
    is_there,
    head,
    keys,  # [BLOCK_K]
    columns,  # [STRIPE]
    mixed_ptr,
    log_decay_ptr,
    write_ptr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """Query, key [BLOCK_K], value [STRIPE], decay and write of one token for one head."""
    at = mixed_ptr + token * (2 * KEY_HEADS * DK + HEADS * DV)
    shared = head // (HEADS // KEY_HEADS) * DK + keys
    query = tl.load(at + shared, mask=(keys < DK) & is_there, other=0.0)
    key = tl.load(at + KEY_HEADS * DK + shared, mask=(keys < DK) & is_there, other=0.0)
    value = tl.load(at + 2 * KEY_HEADS * DK + head * DV + columns, mask=(columns < DV) & is_there, other=0.0)
    decay = tl.exp(tl.load(log_decay_ptr + token * HEADS + head, mask=is_there, other=0.0))
    write = tl.load(write_ptr + token * HEADS + head, mask=is_there, other=0.0)
    return query, key, value, decay, write


@triton.jit
def delta_net_recur_kernel(
    mixed_ptr,  # float32 [S * 2 M, CONV_DIM]
    log_decay_ptr,  # float32 [S * 2 M, HEADS]
    write_ptr,  # float32 [S * 2 M, HEADS]
    matrices_ptr,  # float32, bfloat16 or float16 [slots, HEADS, DK, DV]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    num_accepted_ptr,  # int32 [S]
    out_ptr,  # [R, HEADS, DV]
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (stripe, head, sequence).

    Accepted and new tokens go through one loop with the same instructions, so a token's bits do not depend on whether
    the tokens before it were folded in by an earlier step or are computed in this one. For the same reason the state is
    rounded after each token to the dtype that it is stored in, also where it stays in registers.
    """
    release(DEPENDENT)
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    end = num_accepted + count
    keys = tl.arange(0, BLOCK_K)
    inside = (keys < DK)[:, None] & (columns < DV)[None, :]
    # Four columns a thread, of 16 bits too: with eight, sums over keys would cross more lanes.
    state_columns = tl.max_contiguous(columns, 4)[None, :]
    state_at = matrices_ptr + (slot * HEADS + head) * (DK * DV) + keys[:, None] * DV + state_columns
    # States and the step's inputs were complete before the step began, so they are loaded before the wait.
    state = tl.load(state_at, mask=inside & (end > 0), other=0.0).to(tl.float32)
    wait(DEPENDENT)

    work = sequence.to(tl.int64) * (2 * M)
    query, key, value, decay, write = _load_token(
        work, end > 0, head, keys, columns, mixed_ptr, log_decay_ptr, write_ptr, KEY_HEADS, HEADS, DK, DV
    )
    t = 0
    while t < end:
        # The next token's loads are in flight while this token is computed.
        next_query, next_key, next_value, next_decay, next_write = _load_token(
            work + t + 1,
            t + 1 < end,
            head,
            keys,
            columns,
            mixed_ptr,
            log_decay_ptr,
            write_ptr,
            KEY_HEADS,
            HEADS,
            DK,
            DV,
        )
        state *= decay
        recalled = tl.sum(state * key[:, None], 0)
        correction = write * (value - recalled)
        state += key[:, None] * correction[None, :]
        out = tl.sum(state * query[:, None], 0)
        stored = rounded(state, matrices_ptr.dtype.element_ty)
        if t == num_accepted - 1:
            tl.store(state_at, stored, mask=inside)
        state = stored.to(tl.float32)
        out_at = out_ptr + ((first + t - num_accepted) * HEADS + head) * DV + columns
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(columns < DV) & (t >= num_accepted))
        query, key, value, decay, write = next_query, next_key, next_value, next_decay, next_write
        t += 1


def delta_net_step(qkv, a, b, weights, pool, cu_rows, slots, num_accepted):
    return _step((qkv, a, b), weights, pool, (cu_rows, slots, num_accepted), qkv.dtype)


def delta_net_step_fused(qkv_parts, a_parts, b_parts, weights, pool, cu_rows, slots, num_accepted):
    return _step((qkv_parts, a_parts, b_parts), weights, pool, (cu_rows, slots, num_accepted), torch.float32)


def _step(
    projected: tuple[Tensor, Tensor, Tensor],
    weights: DeltaWeights,
    pool: DeltaPool,
    sequences: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """`delta_net_step` in `dtype`, from the projections qkv, a and b and the sequences' cu_rows, slots, num_accepted.

    The projections may be parts [parts, R, ...] of their linears, added in order.
    """
    (qkv, a, b), (cu_rows, slots, num_accepted) = projected, sequences
    num_rows, (num_sequences,) = qkv.shape[-2], slots.shape
    _, heads, key_dim, value_dim = pool.matrices.shape
    max_tokens = pool.pending_rows.shape[1]
    conv_dim, taps = weights.conv.shape
    num_work_rows = num_sequences * 2 * max_tokens
    mixed = qkv.new_empty(num_work_rows, conv_dim, dtype=torch.float32)
    log_decay, write = (qkv.new_empty(num_work_rows, heads, dtype=torch.float32) for _ in range(2))
    delta_net_step_prepare_kernel[(num_sequences, 2 * pool.num_key_heads + heads)](
        qkv,
        a,
        b,
        *weights,
        pool.conv_rows,
        pool.pending_rows,
        pool.pending_gates,
        cu_rows,
        slots,
        num_accepted,
        mixed,
        log_decay,
        write,
        qkv.stride(-2),
        a.stride(-2),
        b.stride(-2),
        qkv.stride(0),
        a.stride(0),
        KEY_HEADS=pool.num_key_heads,
        HEADS=heads,
        DK=key_dim,
        DV=value_dim,
        TAPS=taps,
        TAPS_BLOCK=4 if taps <= 4 else 8,
        M=max_tokens,
        BLOCK=next_power_of_2(max(key_dim, value_dim)),
        PARTS=len(qkv) if qkv.dim() == 3 else 1,
        GATE_PARTS=len(a) if a.dim() == 3 else 1,
        num_warps=1,
        maxnreg=168,  # without a limit the compiler saves registers by delaying loads
        **launch_options(_PREPARE, heads),
    )
    out = qkv.new_empty(num_rows, heads, value_dim, dtype=dtype)
    delta_net_recur_kernel[(ceil_div(value_dim, _STRIPE), heads, num_sequences)](
        mixed,
        log_decay,
        write,
        pool.matrices,
        cu_rows,
        slots,
        num_accepted,
        out,
        KEY_HEADS=pool.num_key_heads,
        HEADS=heads,
        DK=key_dim,
        DV=value_dim,
        M=max_tokens,
        BLOCK_K=next_power_of_2(key_dim),
        STRIPE=_STRIPE,
        num_warps=1,
        **launch_options(_RECUR, heads),
    )
    return out
