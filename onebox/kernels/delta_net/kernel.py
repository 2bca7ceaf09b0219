"""Gated DeltaNet in Triton.

A step is two kernels, a prefill three:

    prepare   convolution, SiLU, unit queries and keys, gates; moves the conv rows on; a step's rows become pending
    recur     (step) walks kept and new tokens one by one, a stripe of value columns in registers
    chunk     (prefill) all that does not need the state: decays, scores, the inverse of each chunk's triangular system
    scan      (prefill) takes the state through the chunks, a stripe of value columns a program

A column of a head's matrix never meets another one, so stripes share nothing. The scratch between kernels has the
columns of qkv: queries, keys, values. Loops whose length only the device knows are `while` loops: Triton's interpreter
cannot count to a number that a kernel has loaded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights

__all__ = ["delta_net_prefill", "delta_net_step", "gated_norm"]

_CHUNK = 64
_STEP_TILE = 8
"""Tokens that a program of `prepare` takes at once in a step: one number, as the order of its sums hangs on it."""
_PREFILL_TILE = 16
_STEP_STRIPE = 16
"""Value columns of a program of `recur`: with one warp, its sums over a column need no shared memory."""
_SCAN_STRIPE = 32
_KEY_TILE = 16
"""Keys that a product over them takes at once in a prefill."""
_NORM_HEADS = 4


@triton.jit
def _load_rows(
    tokens,  # [N]; negative ones are the slot's conv rows, those below keep are pending, the others rows of this call
    end,  # tokens from here on are not there
    keep,
    inside,  # [C]
    qkv_ptr,  # [C], at the sequence's first row, as the next two are at the slot's
    qkv_stride,
    conv_rows_ptr,  # [C]
    pending_rows_ptr,  # [C]
    CONV_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    IS_STEP: tl.constexpr,
):
    """Rows before the convolution, float32 [N, C], zero where there is none."""
    mask = (tokens < end)[:, None] & inside[None, :]
    before = conv_rows_ptr[None, :] + (TAPS - 1 + tokens)[:, None] * CONV_DIM
    rows = tl.load(before, mask=mask & (tokens < 0)[:, None], other=0.0).to(tl.float32)
    if IS_STEP:
        is_pending = (tokens >= 0) & (tokens < keep)
        pending = pending_rows_ptr[None, :] + tokens[:, None] * CONV_DIM
        rows += tl.load(pending, mask=mask & is_pending[:, None], other=0.0).to(tl.float32)
    is_new = (tokens >= 0) & (tokens >= keep)
    new = qkv_ptr[None, :] + (tokens - keep).to(tl.int64)[:, None] * qkv_stride
    return rows + tl.load(new, mask=mask & is_new[:, None], other=0.0).to(tl.float32)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), x itself above 20; the quotient undoes the rounding of 1 + exp(x) for small exp(x)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + grown
    is_lost = rounded == 1.0
    exact = tl.log(rounded) * (grown / tl.where(is_lost, 1.0, rounded - 1.0))
    return tl.where(x > 20.0, x, tl.where(is_lost, grown, exact))


@triton.jit
def delta_net_prepare_kernel(
    qkv_ptr,  # [R, CONV_DIM]
    a_ptr,  # [R, HEADS]
    b_ptr,  # [R, HEADS]
    conv_ptr,  # [CONV_DIM, TAPS]
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,  # [HEADS]
    conv_rows_ptr,  # [slots, TAPS - 1, CONV_DIM]
    pending_rows_ptr,  # [slots, M, CONV_DIM]
    pending_gates_ptr,  # float32 [slots, M, 2, HEADS]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    keep_ptr,  # int32 [S]; None in a prefill
    mixed_ptr,  # float32 [W, CONV_DIM]; in a step, a sequence has 2 M rows: kept tokens and then new ones; else W = T
    log_decay_ptr,  # float32 [W, HEADS]
    write_ptr,  # float32 [W, HEADS]
    qkv_stride,
    a_stride,
    b_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    M: tl.constexpr,
    IS_STEP: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of the wider kind of head, as a power of two
    TOKENS: tl.constexpr,  # at least TAPS, so that only the first program of a sequence reads its conv rows
):
    """Program (tile of tokens, sequence, head): queries' heads, then keys', then values', which have the gates too.

    A step has one program for all tokens of a sequence and head: it reads what is pending before it writes over it.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    sequence, head = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    keep = 0
    work = first
    if IS_STEP:
        keep = tl.load(keep_ptr + sequence)
        work = sequence.to(tl.int64) * (2 * M)
    end = keep + count

    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    start = tl.where(is_value, 2 * KEY_HEADS * DK + value_head * DV, head * DK)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < tl.where(is_value, DV, DK)
    channels = start + lanes
    qkv_at = qkv_ptr + first * qkv_stride + channels
    conv_at = conv_rows_ptr + slot * ((TAPS - 1) * CONV_DIM) + channels
    pending_at = pending_rows_ptr + slot * (M * CONV_DIM) + channels
    pending_gates_ptr += slot * (M * 2 * HEADS) + value_head
    a_ptr += first * a_stride + value_head
    b_ptr += first * b_stride + value_head

    base = tl.program_id(0) * TOKENS
    while base < end:
        tokens = base + tl.arange(0, TOKENS)
        wanted = tokens < end
        mixed = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            met = tokens - (TAPS - 1 - tap)
            rows = _load_rows(met, end, keep, inside, qkv_at, qkv_stride, conv_at, pending_at, CONV_DIM, TAPS, IS_STEP)
            weight = tl.load(conv_ptr + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            mixed += weight[None, :] * rows
        mixed *= tl.sigmoid(mixed)
        scale = tl.rsqrt(tl.sum(mixed * mixed, 1) + 1e-6) * tl.where(head < KEY_HEADS, DK**-0.5, 1.0)
        mixed *= tl.where(is_value, 1.0, scale)[:, None]
        at = mixed_ptr + (work + tokens)[:, None] * CONV_DIM + channels[None, :]
        tl.store(at, mixed, mask=wanted[:, None] & inside[None, :])
        if is_value:
            is_new = wanted & (tokens >= keep)
            a = tl.load(a_ptr + (tokens - keep).to(tl.int64) * a_stride, mask=is_new, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + (tokens - keep).to(tl.int64) * b_stride, mask=is_new, other=0.0).to(tl.float32)
            if IS_STEP:
                a += tl.load(pending_gates_ptr + tokens * (2 * HEADS), mask=tokens < keep, other=0.0)
                b += tl.load(pending_gates_ptr + tokens * (2 * HEADS) + HEADS, mask=tokens < keep, other=0.0)
            rate = tl.exp(tl.load(a_log_ptr + value_head).to(tl.float32))
            bias = tl.load(dt_bias_ptr + value_head).to(tl.float32)
            gate_at = (work + tokens) * HEADS + value_head
            tl.store(log_decay_ptr + gate_at, -rate * _softplus(a + bias), mask=wanted)
            tl.store(write_ptr + gate_at, tl.sigmoid(b), mask=wanted)
        base += tl.num_programs(0) * TOKENS

    # The slot moves on: past the kept tokens in a step, past all tokens in a prefill.
    if (tl.program_id(0) == 0) & (end > 0):
        past = end
        if IS_STEP:
            past = keep
        places = tl.arange(0, TOKENS)
        recent = past - (TAPS - 1) + places
        rows = _load_rows(recent, past, keep, inside, qkv_at, qkv_stride, conv_at, pending_at, CONV_DIM, TAPS, IS_STEP)
        # Threads hold different elements when they read and when they write: all reads come first.
        tl.debug_barrier()
        at = conv_at[None, :] + places[:, None] * CONV_DIM
        tl.store(at, rows.to(conv_rows_ptr.dtype.element_ty), mask=(places < TAPS - 1)[:, None] & inside[None, :])
        if IS_STEP:
            base = 0
            while base < count:
                tokens = base + tl.arange(0, TOKENS)
                mask = (tokens < count)[:, None] & inside[None, :]
                new = tl.load(qkv_at[None, :] + tokens.to(tl.int64)[:, None] * qkv_stride, mask=mask)
                at = pending_at[None, :] + tokens[:, None] * CONV_DIM
                tl.store(at, new.to(pending_rows_ptr.dtype.element_ty), mask=mask)
                if is_value:
                    a = tl.load(a_ptr + tokens.to(tl.int64) * a_stride, mask=tokens < count).to(tl.float32)
                    b = tl.load(b_ptr + tokens.to(tl.int64) * b_stride, mask=tokens < count).to(tl.float32)
                    tl.store(pending_gates_ptr + tokens * (2 * HEADS), a, mask=tokens < count)
                    tl.store(pending_gates_ptr + tokens * (2 * HEADS) + HEADS, b, mask=tokens < count)
                base += TOKENS


@triton.jit
def _load_token(
    token,  # its row in the scratch, int64
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
    matrices_ptr,  # float32 [slots, HEADS, DK, DV]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    keep_ptr,  # int32 [S]
    out_ptr,  # [R, HEADS, DV]
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPE: tl.constexpr,
):
    """Program (stripe, head, sequence).

    Kept and new tokens go through one loop: the same instructions, so a token's bits cannot tell whether those before
    it were folded in by an earlier step or are walked through by this one.
    """
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    keep = tl.load(keep_ptr + sequence)
    end = keep + count
    keys = tl.arange(0, BLOCK_K)
    inside = (keys < DK)[:, None] & (columns < DV)[None, :]
    state_at = matrices_ptr + (slot * HEADS + head) * (DK * DV) + keys[:, None] * DV + columns[None, :]
    state = tl.load(state_at, mask=inside & (end > 0), other=0.0)

    work = sequence.to(tl.int64) * (2 * M)
    query, key, value, decay, write = _load_token(
        work, end > 0, head, keys, columns, mixed_ptr, log_decay_ptr, write_ptr, KEY_HEADS, HEADS, DK, DV
    )
    t = 0
    while t < end:
        # The next token's loads are under way while this one is computed.
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
        if t == keep - 1:
            tl.store(state_at, state, mask=inside)
        out_at = out_ptr + ((first + t - keep) * HEADS + head) * DV + columns
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(columns < DV) & (t >= keep))
        query, key, value, decay, write = next_query, next_key, next_value, next_decay, next_write
        t += 1


@triton.jit
def delta_net_chunk_kernel(
    mixed_ptr,  # float32 [T, CONV_DIM]
    log_decay_ptr,  # float32 [T, HEADS]
    write_ptr,  # float32 [T, HEADS]
    cu_rows_ptr,  # int32 [S + 1]
    total_ptr,  # float32 [T, HEADS]: log decay since the chunk began
    inverse_ptr,  # float32 [T, HEADS, CHUNK]
    scores_ptr,  # float32 [T, HEADS, CHUNK]
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (chunk, head, sequence). With fade_ij the decay from token j to token i, both of the chunk and j <= i:

    scores_ij = fade_ij (q_i . k_j), and the inverse of 1 + write_i fade_ij (k_i . k_j), j < i.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * CHUNK
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    if start >= count:
        return
    places = tl.arange(0, CHUNK)
    is_there = start + places < count
    rows = first + start + places
    log_decay = tl.load(log_decay_ptr + rows * HEADS + head, mask=is_there, other=0.0)
    write = tl.load(write_ptr + rows * HEADS + head, mask=is_there, other=0.0)
    total = tl.cumsum(log_decay, 0)
    tl.store(total_ptr + rows * HEADS + head, total, mask=is_there)

    scores = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    system = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for start_k in range(0, DK, BLOCK_K):
        keys = start_k + tl.arange(0, BLOCK_K)
        mask = is_there[:, None] & (keys < DK)[None, :]
        at = mixed_ptr + rows[:, None] * CONV_DIM + head // (HEADS // KEY_HEADS) * DK + keys[None, :]
        query = tl.load(at, mask=mask, other=0.0)
        key = tl.load(at + KEY_HEADS * DK, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), scores, input_precision="tf32x3")
        system = tl.dot(key, tl.trans(key), system, input_precision="tf32x3")

    row, column = places[:, None], places[None, :]
    # The upper half would overflow in exp, so it is cut before, not after.
    fade = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], -float("inf")))
    out = (rows[:, None] * HEADS + head) * CHUNK + column
    tl.store(scores_ptr + out, scores * fade, mask=is_there[:, None])
    system = tl.where(row > column, system * fade * write[:, None], 0.0)
    inverse = tl.where(row == column, 1.0, 0.0)
    for done in range(CHUNK - 1):
        # Row `done` is final: take it out of all rows below. Each sum has one term that is not zero.
        factors = tl.sum(tl.where(column == done, system, 0.0), 1)
        final = tl.sum(tl.where(row == done, inverse, 0.0), 0)
        inverse -= factors[:, None] * final[None, :]
    tl.store(inverse_ptr + out, inverse, mask=is_there[:, None])


@triton.jit
def delta_net_scan_kernel(
    mixed_ptr,  # float32 [T, CONV_DIM]
    total_ptr,  # float32 [T, HEADS]
    write_ptr,  # float32 [T, HEADS]
    inverse_ptr,  # float32 [T, HEADS, CHUNK]
    scores_ptr,  # float32 [T, HEADS, CHUNK]
    matrices_ptr,  # float32 [slots, HEADS, DK, DV]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    out_ptr,  # [T, HEADS, DV]
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (stripe, head, sequence).

    The state's stripe stays in memory (in the caches) and is taken BLOCK_K keys at a time: in registers, as the operand
    of a product that splits each float in parts, it would spill.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    keys = tl.arange(0, BLOCK_K)
    places = tl.arange(0, CHUNK)
    shared = head // (HEADS // KEY_HEADS) * DK
    state_at = matrices_ptr + (slot * HEADS + head) * (DK * DV) + keys[:, None] * DV + columns[None, :]
    start = 0
    while start < count:
        is_there = start + places < count
        rows = first + start + places
        row_at = mixed_ptr + rows[:, None] * CONV_DIM
        recalled = tl.zeros([CHUNK, STRIPE], dtype=tl.float32)
        out = tl.zeros([CHUNK, STRIPE], dtype=tl.float32)
        for start_k in range(0, DK, BLOCK_K):
            has_key = start_k + keys < DK
            inside = has_key[:, None] & (columns < DV)[None, :]
            state = tl.load(state_at + start_k * DV, mask=inside, other=0.0)
            query_at = row_at + shared + start_k + keys[None, :]
            query = tl.load(query_at, mask=is_there[:, None] & has_key[None, :], other=0.0)
            key = tl.load(query_at + KEY_HEADS * DK, mask=is_there[:, None] & has_key[None, :], other=0.0)
            recalled = tl.dot(key, state, recalled, input_precision="tf32x3")
            out = tl.dot(query, state, out, input_precision="tf32x3")

        total = tl.load(total_ptr + rows * HEADS + head, mask=is_there, other=0.0)
        write = tl.load(write_ptr + rows * HEADS + head, mask=is_there, other=0.0)
        fade = tl.exp(total)[:, None]
        out_mask = is_there[:, None] & (columns < DV)[None, :]
        value = tl.load(row_at + 2 * KEY_HEADS * DK + head * DV + columns[None, :], mask=out_mask, other=0.0)
        square = (rows[:, None] * HEADS + head) * CHUNK + places[None, :]
        inverse = tl.load(inverse_ptr + square, mask=is_there[:, None], other=0.0)
        corrections = tl.dot(inverse, write[:, None] * (value - fade * recalled), input_precision="tf32x3")
        scores = tl.load(scores_ptr + square, mask=is_there[:, None], other=0.0)
        out = tl.dot(scores, corrections, out * fade, input_precision="tf32x3")
        out_at = out_ptr + (rows[:, None] * HEADS + head) * DV + columns[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)

        last = tl.load(total_ptr + (first + tl.minimum(start + CHUNK, count) - 1) * HEADS + head)
        to_end = tl.exp(last - total)
        for start_k in range(0, DK, BLOCK_K):
            has_key = start_k + keys < DK
            inside = has_key[:, None] & (columns < DV)[None, :]
            state = tl.load(state_at + start_k * DV, mask=inside, other=0.0) * tl.exp(last)
            key_at = row_at + shared + KEY_HEADS * DK + start_k + keys[None, :]
            key = tl.load(key_at, mask=is_there[:, None] & has_key[None, :], other=0.0) * to_end[:, None]
            state = tl.dot(tl.trans(key), corrections, state, input_precision="tf32x3")
            # A thread writes other elements than it read, here and in the next chunk.
            tl.debug_barrier()
            tl.store(state_at + start_k * DV, state, mask=inside)
        tl.debug_barrier()
        start += CHUNK


@triton.jit
def gated_norm_kernel(
    o_ptr,  # [R, HEADS, DV]
    z_ptr,  # [R, HEADS * DV]
    weight_ptr,  # [DV]
    out_ptr,  # [R, HEADS * DV]
    eps,
    z_stride,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, TILE heads)."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < DV)[None, :]
    places = heads[:, None] * DV + columns[None, :]
    o = tl.load(o_ptr + row * (HEADS * DV) + places, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + places, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < DV, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
    out = weight[None, :] * (o * scale[:, None]) * (z * tl.sigmoid(z))
    tl.store(out_ptr + row * (HEADS * DV) + places, out.to(out_ptr.dtype.element_ty), mask=inside)


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
    (num_rows, _), (num_sequences,) = qkv.shape, slots.shape
    _, heads, key_dim, value_dim = pool.matrices.shape
    max_tokens = pool.pending_rows.shape[1]
    mixed, log_decay, write = _prepare(
        qkv, a, b, weights, pool, cu_rows, slots, keep, num_sequences * 2 * max_tokens, _STEP_TILE
    )
    out = qkv.new_empty(num_rows, heads, value_dim)
    delta_net_recur_kernel[(triton.cdiv(value_dim, _STEP_STRIPE), heads, num_sequences)](
        mixed,
        log_decay,
        write,
        pool.matrices,
        cu_rows,
        slots,
        keep,
        out,
        KEY_HEADS=pool.num_key_heads,
        HEADS=heads,
        DK=key_dim,
        DV=value_dim,
        M=max_tokens,
        BLOCK_K=triton.next_power_of_2(key_dim),
        STRIPE=_STEP_STRIPE,
        num_warps=1,
    )
    return out


def delta_net_prefill(
    qkv: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, pool: DeltaPool, cu_rows: Tensor, slots: Tensor
) -> Tensor:
    """See `onebox.kernels.delta_net.delta_net_prefill`."""
    (num_tokens, _), (num_sequences,) = qkv.shape, slots.shape
    _, heads, key_dim, value_dim = pool.matrices.shape
    out = qkv.new_empty(num_tokens, heads, value_dim)
    if not num_tokens:
        return out
    mixed, log_decay, write = _prepare(qkv, a, b, weights, pool, cu_rows, slots, None, num_tokens, _PREFILL_TILE)
    total = torch.empty_like(log_decay)
    inverse, scores = (mixed.new_empty(num_tokens, heads, _CHUNK) for _ in range(2))
    sizes = {"KEY_HEADS": pool.num_key_heads, "HEADS": heads, "DK": key_dim, "DV": value_dim}
    block = max(16, min(_KEY_TILE, triton.next_power_of_2(key_dim)))
    # Only the device knows how long each sequence is: as many chunks as if one had all tokens; the rest return at once.
    delta_net_chunk_kernel[(triton.cdiv(num_tokens, _CHUNK), heads, num_sequences)](
        mixed, log_decay, write, cu_rows, total, inverse, scores, **sizes, BLOCK_K=block, CHUNK=_CHUNK, num_warps=4
    )
    delta_net_scan_kernel[(triton.cdiv(value_dim, _SCAN_STRIPE), heads, num_sequences)](
        mixed,
        total,
        write,
        inverse,
        scores,
        pool.matrices,
        cu_rows,
        slots,
        out,
        **sizes,
        BLOCK_K=block,
        STRIPE=_SCAN_STRIPE,
        CHUNK=_CHUNK,
        num_warps=4,
        num_stages=1,
    )
    return out


def _prepare(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    keep: Tensor | None,
    num_work_rows: int,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scratch of `prepare` (mixed, log_decay, write), float32; `keep` is None in a prefill."""
    conv_dim, taps = weights.conv.shape
    _, heads, key_dim, value_dim = pool.matrices.shape
    mixed = qkv.new_empty(num_work_rows, conv_dim, dtype=torch.float32)
    log_decay, write = (qkv.new_empty(num_work_rows, heads, dtype=torch.float32) for _ in range(2))
    tiles = 1 if keep is not None else triton.cdiv(num_work_rows, tile)
    delta_net_prepare_kernel[(tiles, slots.shape[0], 2 * pool.num_key_heads + heads)](
        qkv,
        a,
        b,
        *weights,
        pool.conv_rows,
        pool.pending_rows,
        pool.pending_gates,
        cu_rows,
        slots,
        keep,
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
        M=pool.pending_rows.shape[1],
        IS_STEP=keep is not None,
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
        TOKENS=tile,
        num_warps=4,
    )
    return mixed, log_decay, write


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `onebox.kernels.delta_net.gated_norm`."""
    rows, heads, value_dim = o.shape
    out = z.new_empty(rows, heads * value_dim)
    gated_norm_kernel[(rows, triton.cdiv(heads, _NORM_HEADS))](
        o,
        z,
        weight,
        out,
        eps,
        z.stride(0),
        HEADS=heads,
        DV=value_dim,
        BLOCK=triton.next_power_of_2(value_dim),
        TILE=_NORM_HEADS,
        num_warps=2,
    )
    return out
