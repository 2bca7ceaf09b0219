"""Gated DeltaNet in Triton.

A step is two kernels, a prefill three:

    prepare   convolution, SiLU, unit queries and keys, gates; moves the conv rows on; a step's rows become pending
    recur     (step) walks kept and new tokens one by one, a stripe of value columns in registers
    chunk     (prefill, in `prefill.py`) all that does not need the state
    scan      (prefill, in `prefill.py`) takes the state through the chunks

A column of a head's matrix never meets another one, so stripes share nothing. The scratch between kernels has the
columns of qkv: queries, keys, values. Loops whose length only the device knows are `while` loops: Triton's interpreter
cannot count to a number that a kernel has loaded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.delta_net.prefill import scan_chunks
from onebox.kernels.dependent import dependent, release, wait
from onebox.kernels.kv_write.kernel import rounded

__all__ = ["delta_net_prefill", "delta_net_step", "gated_norm", "step"]

_STEP_TILE = 8
"""Tokens that a program of `prepare` takes at once in a step: one number, as the order of its sums hangs on it."""
_PREFILL_TILE = 16
_STEP_STRIPE = 16
"""Value columns of a program of `recur`: with one warp, its sums over a column need no shared memory."""
_NORM_HEADS = 4


@triton.jit
def _sum_parts(at, part_stride, mask, PARTS: tl.constexpr):
    """What stands at `at` in each part of a linear's result, added first to last, float32."""
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _load_new(at, part_stride, mask, POOL: tl.constexpr, PARTS: tl.constexpr):
    """Rows of this call, as the pool (of the dtype POOL) would give them back: a token must not tell old from new."""
    return rounded(_sum_parts(at, part_stride, mask, PARTS), POOL).to(tl.float32)


@triton.jit
def _load_rows(
    tokens,  # [N]; negative ones are the slot's conv rows, those below keep are pending, the others rows of this call
    end,  # tokens from here on are not there
    keep,
    inside,  # [C]
    qkv_ptr,  # [C], at the sequence's first row, as the next two are at the slot's
    qkv_stride,
    part_stride,
    conv_rows_ptr,  # [C]
    pending_rows_ptr,  # [C]
    CONV_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    IS_STEP: tl.constexpr,
    PARTS: tl.constexpr,
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
    return rows + _load_new(new, part_stride, mask & is_new[:, None], pending_rows_ptr.dtype.element_ty, PARTS)


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
    keep_ptr,  # int32 [S]; None in a prefill
    mixed_ptr,  # float32 [W, CONV_DIM]; in a step, a sequence has 2 M rows: kept tokens and then new ones; else W = T
    log_decay_ptr,  # float32 [W, HEADS]
    write_ptr,  # float32 [W, HEADS]
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
    M: tl.constexpr,
    IS_STEP: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of the wider kind of head, as a power of two
    TOKENS: tl.constexpr,  # at least TAPS, so that only the first program of a sequence reads its conv rows
    PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (tile of tokens, sequence, head): queries' heads, then keys', then values', which have the gates too.

    A step has one program for all tokens of a sequence and head: it reads what is pending before it writes over it.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    release(DEPENDENT)
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

    # What it has read so far are inputs of the step, complete before the step began.
    wait(DEPENDENT)
    base = tl.program_id(0) * TOKENS
    while base < end:
        tokens = base + tl.arange(0, TOKENS)
        wanted = tokens < end
        mixed = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            met = tokens - (TAPS - 1 - tap)
            rows = _load_rows(
                met,
                end,
                keep,
                inside,
                qkv_at,
                qkv_stride,
                part_stride,
                conv_at,
                pending_at,
                CONV_DIM,
                TAPS,
                IS_STEP,
                PARTS,
            )
            weight = tl.load(conv_ptr + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            mixed += weight[None, :] * rows
        mixed *= tl.sigmoid(mixed)
        scale = tl.rsqrt(tl.sum(mixed * mixed, 1) + 1e-6) * tl.where(head < KEY_HEADS, DK**-0.5, 1.0)
        mixed *= tl.where(is_value, 1.0, scale)[:, None]
        at = mixed_ptr + (work + tokens)[:, None] * CONV_DIM + channels[None, :]
        tl.store(at, mixed, mask=wanted[:, None] & inside[None, :])
        if is_value:
            is_new = wanted & (tokens >= keep)
            fresh = (tokens - keep).to(tl.int64)
            a = _sum_parts(a_ptr + fresh * a_stride, gate_part_stride, is_new, GATE_PARTS)
            b = _sum_parts(b_ptr + fresh * b_stride, gate_part_stride, is_new, GATE_PARTS)
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
        rows = _load_rows(
            recent,
            past,
            keep,
            inside,
            qkv_at,
            qkv_stride,
            part_stride,
            conv_at,
            pending_at,
            CONV_DIM,
            TAPS,
            IS_STEP,
            PARTS,
        )
        # Threads hold different elements when they read and when they write: all reads come first.
        tl.debug_barrier()
        at = conv_at[None, :] + places[:, None] * CONV_DIM
        tl.store(at, rows.to(conv_rows_ptr.dtype.element_ty), mask=(places < TAPS - 1)[:, None] & inside[None, :])
        if IS_STEP:
            base = 0
            while base < count:
                tokens = base + tl.arange(0, TOKENS)
                mask = (tokens < count)[:, None] & inside[None, :]
                new = qkv_at[None, :] + tokens.to(tl.int64)[:, None] * qkv_stride
                new = _load_new(new, part_stride, mask, pending_rows_ptr.dtype.element_ty, PARTS)
                at = pending_at[None, :] + tokens[:, None] * CONV_DIM
                tl.store(at, new.to(pending_rows_ptr.dtype.element_ty), mask=mask)
                if is_value:
                    is_new = tokens < count
                    a = _sum_parts(a_ptr + tokens.to(tl.int64) * a_stride, gate_part_stride, is_new, GATE_PARTS)
                    b = _sum_parts(b_ptr + tokens.to(tl.int64) * b_stride, gate_part_stride, is_new, GATE_PARTS)
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
    DEPENDENT: tl.constexpr,
):
    """Program (stripe, head, sequence).

    Kept and new tokens go through one loop: the same instructions, so a token's bits cannot tell whether those before
    it were folded in by an earlier step or are walked through by this one.
    """
    release(DEPENDENT)
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
    # States and a step's own inputs were complete before the step began, so they are read before it waits.
    state = tl.load(state_at, mask=inside & (end > 0), other=0.0)
    wait(DEPENDENT)

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
    return step(qkv, a, b, weights, pool, cu_rows, slots, keep, qkv.dtype)


def step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    keep: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """`delta_net_step` in `dtype`; qkv, a and b may be parts [P, R, ...] of their linears, added in their order."""
    num_rows, (num_sequences,) = qkv.shape[-2], slots.shape
    _, heads, key_dim, value_dim = pool.matrices.shape
    max_tokens = pool.pending_rows.shape[1]
    mixed, log_decay, write = _prepare(
        qkv, a, b, weights, pool, cu_rows, slots, keep, num_sequences * 2 * max_tokens, _STEP_TILE
    )
    out = qkv.new_empty(num_rows, heads, value_dim, dtype=dtype)
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
        **dependent(qkv, "delta_recur"),
    )
    return out


def delta_net_prefill(
    qkv: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, pool: DeltaPool, cu_rows: Tensor, slots: Tensor
) -> Tensor:
    """See `onebox.kernels.delta_net.delta_net_prefill`."""
    num_tokens = len(qkv)
    _, heads, _, value_dim = pool.matrices.shape
    out = qkv.new_empty(num_tokens, heads, value_dim)
    if not num_tokens:
        return out
    mixed, log_decay, write = _prepare(qkv, a, b, weights, pool, cu_rows, slots, None, num_tokens, _PREFILL_TILE)
    scan_chunks((mixed, log_decay, write), pool, cu_rows, slots, out)
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
        M=pool.pending_rows.shape[1],
        IS_STEP=keep is not None,
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
        TOKENS=tile,
        num_warps=4,
        PARTS=len(qkv) if qkv.dim() == 3 else 1,
        GATE_PARTS=len(a) if a.dim() == 3 else 1,
        **dependent(qkv, "delta_prepare"),
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
