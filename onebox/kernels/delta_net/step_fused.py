"""A decode step of a DeltaNet layer between its two projections, in one launch: program (head, sequence).

A program has a head's whole matrix in registers, a stripe of value columns a warp, and so computes everything of the
head: convolution, unit query and key, gates, recurrence, gated norm and fixed point. Sums over keys stay in a warp.

Accepted tokens depend on the pool alone: they are folded in before the wait for the projection.

The value heads of a key head read the same rows of queries and keys, each in a program of its own, and the pool's rows
may be overwritten only when all of them have read. So each counts itself as arrived, and the last one writes. Nobody
waits for that: the count comes back while the first new token is computed.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import IS_INTERPRETED, rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_scaled_group
from onebox.kernels.common.launch import next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import MODES, Tunable
from onebox.kernels.delta_net.norm import gated_norm_fused
from onebox.kernels.delta_net.step import convolve, load_gates, load_row, softplus, split_taps, step_from_parts

__all__ = ["arrivals", "delta_net_step_fused"]

_STEP = Tunable("delta_step", (*MODES, *({"maxnreg": count} for count in (128, 168, 200, 255))))

_GROUP = 128
_STRIPES = 8
"""Warps of a program: each has a stripe of the head's value columns."""
_LOW = 8
"""Rows of the matrix side by side in the lanes of a warp."""
_MAX_SEQUENCES = 256
_FEW_PROGRAMS = 128


@triton.jit
def _spread(vector, LOW: tl.constexpr, HIGH: tl.constexpr):
    """[DK] as [LOW, 1, HIGH, 1], in the order of the matrix's rows."""
    return tl.reshape(vector, (LOW, HIGH))[:, None, :, None]


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add_and_largest(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def _sums(a, b, c):
    """The sums of three vectors in one exchange between warps. (The interpreter would take minutes for it.)"""
    if IS_INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    else:
        return tl.reduce((a, b, c), 0, _add_three)


@triton.jit
def _sum_and_largest(a, b):
    if IS_INTERPRETED:
        return tl.sum(a, 0), tl.max(b, 0)
    else:
        return tl.reduce((a, b), 0, _add_and_largest)


@triton.jit
def _load_taps(conv_ptr, channels, TAPS: tl.constexpr, TAPS_BLOCK: tl.constexpr):
    """The convolution's weights of channels [C]: a tuple of TAPS times [C]."""
    places = tl.arange(0, TAPS_BLOCK)[None, :]
    loaded = tl.load(conv_ptr + channels[:, None] * TAPS + places, mask=places < TAPS, other=0.0)
    return split_taps(loaded, TAPS, channels.shape[0])


@triton.jit
def _load_window(conv_rows_ptr, inside, CONV_DIM: tl.constexpr, TAPS: tl.constexpr):
    """The rows before the first token, oldest first: a tuple of TAPS - 1."""
    window = ()
    for place in tl.static_range(TAPS - 1):
        row = tl.load(conv_rows_ptr + place * CONV_DIM, mask=inside, other=0.0)
        window += (row.to(tl.float32),)  # type: ignore[assignment]
    return window


@triton.jit
def _store_window(conv_rows_ptr, window, inside, CONV_DIM: tl.constexpr, TAPS: tl.constexpr):
    for place in tl.static_range(TAPS - 1):
        row = window[place].to(conv_rows_ptr.dtype.element_ty)
        tl.store(conv_rows_ptr + place * CONV_DIM, row, mask=inside)


@triton.jit
def delta_net_step_fused_kernel(
    qkv_ptr,  # float32 [PARTS, R, CONV_DIM], strides part_stride and qkv_stride
    a_ptr,  # float32 [GATE_PARTS, R, HEADS], strides gate_part_stride and a_stride
    b_ptr,  # float32 [GATE_PARTS, R, HEADS]
    z_ptr,  # float32 [Z_PARTS, R, HEADS * DV]
    conv_ptr,  # [CONV_DIM, TAPS]
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,  # [HEADS]
    norm_ptr,  # [DV]
    matrices_ptr,  # float32, bfloat16 or float16 [slots, HEADS, DK, DV]
    conv_rows_ptr,  # [slots, TAPS - 1, CONV_DIM]
    pending_rows_ptr,  # [slots, M, CONV_DIM]
    pending_gates_ptr,  # float32 [slots, M, 2, HEADS]
    arrivals_ptr,  # int32 [sequences, KEY_HEADS], zeros before and after
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    num_accepted_ptr,  # int32 [S]
    x_ptr,  # [R, HEADS * DV]
    planes_ptr,  # int8 [R, 2, HEADS * DV]
    scale_ptr,  # float32 [R, HEADS]
    eps,
    qkv_stride,
    a_stride,
    b_stride,
    z_stride,
    part_stride,
    gate_part_stride,
    z_part_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,  # 128
    TAPS: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,  # 4 or 8
    M: tl.constexpr,
    PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr,
    Z_PARTS: tl.constexpr,
    STRIPES: tl.constexpr,  # warps of the program
    LOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Accepted and new tokens go through one loop with the same instructions.

    So a token's bits do not depend on whether the tokens before it were folded in by an earlier step or are computed in
    this one; the state is rounded after each to the dtype that it is stored in. The iteration of the first new token,
    which comes also without new tokens, waits and brings the pool up to date.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    RATIO: tl.constexpr = HEADS // KEY_HEADS
    WIDTH: tl.constexpr = DV // STRIPES
    HIGH: tl.constexpr = DK // LOW
    release(DEPENDENT)
    head, sequence = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    end = num_accepted + count
    is_alive = end > 0

    stripes, threads = tl.arange(0, STRIPES), tl.arange(0, 32 * STRIPES)
    key_head = head // RATIO
    query_channels = key_head * DK + tl.arange(0, DK)
    key_channels = KEY_HEADS * DK + query_channels
    columns = tl.arange(0, DV)
    value_channels = 2 * KEY_HEADS * DK + head * DV + columns

    # Triton gives lanes, then warps, to the last dimension and then to the others in their order: columns and low rows
    # become lanes, stripes warps, and high rows registers, so that a sum over rows stays in a warp.
    matrix_rows = tl.arange(0, LOW)[:, None, None, None] * HIGH + tl.arange(0, HIGH)[None, None, :, None]
    matrix_columns = stripes[None, :, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, None, :]
    # Four columns a thread, of 16 bits too: with eight, sums over rows would cross more lanes.
    matrix_columns = tl.max_contiguous(matrix_columns, (1, 1, 1, 4))
    state_at = matrices_ptr + (slot * HEADS + head) * (DK * DV) + matrix_rows * DV + matrix_columns
    state = tl.load(state_at, mask=is_alive, other=0.0).to(tl.float32)
    conv_at = conv_rows_ptr + slot * ((TAPS - 1) * CONV_DIM)
    query_window = _load_window(conv_at + query_channels, is_alive, CONV_DIM, TAPS)
    key_window = _load_window(conv_at + key_channels, is_alive, CONV_DIM, TAPS)
    value_window = _load_window(conv_at + value_channels, is_alive, CONV_DIM, TAPS)
    query_taps = _load_taps(conv_ptr, query_channels, TAPS, TAPS_BLOCK)
    key_taps = _load_taps(conv_ptr, key_channels, TAPS, TAPS_BLOCK)
    value_taps = _load_taps(conv_ptr, value_channels, TAPS, TAPS_BLOCK)
    rate = tl.load(a_log_ptr + head).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + columns).to(tl.float32)

    qkv_at = qkv_ptr + first * qkv_stride
    pending_at = pending_rows_ptr + slot * (M * CONV_DIM)
    gates_at = pending_gates_ptr + slot * (M * 2 * HEADS) + head
    z_at = z_ptr + first * z_stride + head * DV + columns
    query_source = (qkv_at + query_channels, pending_at + query_channels, qkv_stride, part_stride)
    key_source = (qkv_at + key_channels, pending_at + key_channels, qkv_stride, part_stride)
    value_source = (qkv_at + value_channels, pending_at + value_channels, qkv_stride, part_stride)
    gate_source = (
        a_ptr + first * a_stride + head,
        b_ptr + first * b_stride + head,
        gates_at,
        a_stride,
        b_stride,
        gate_part_stride,
    )
    has_pending = num_accepted > 0
    query_row = load_row(0, num_accepted, has_pending, query_source, CONV_DIM, PARTS)
    key_row = load_row(0, num_accepted, has_pending, key_source, CONV_DIM, PARTS)
    value_row = load_row(0, num_accepted, has_pending, value_source, CONV_DIM, PARTS)
    a, b = load_gates(0, num_accepted, has_pending, gate_source, HEADS, GATE_PARTS)
    arrived = tl.zeros((32 * STRIPES,), tl.int32)
    arrivals_at = arrivals_ptr + sequence * KEY_HEADS + key_head
    token = 0
    while token < tl.maximum(end, num_accepted + 1):
        is_new = (token >= num_accepted) & (token < end)
        if token == num_accepted:
            # Everything read before is a weight, an input of the step, or a state written by the previous step.
            wait(DEPENDENT)
            query_row = load_row(token, num_accepted, is_new, query_source, CONV_DIM, PARTS)
            key_row = load_row(token, num_accepted, is_new, key_source, CONV_DIM, PARTS)
            value_row = load_row(token, num_accepted, is_new, value_source, CONV_DIM, PARTS)
            a, b = load_gates(token, num_accepted, is_new, gate_source, HEADS, GATE_PARTS)
            # All threads have used what they read of the pool's rows: an earlier iteration computed with it.
            tl.debug_barrier()
            if RATIO > 1:
                # One thread counts. Were the address the same for all, the compiler would have the warp wait for it.
                at = arrivals_at + tl.where(is_alive, 0, threads)
                arrived = tl.atomic_add(at, 1, mask=(threads == 0) & is_alive, sem="relaxed")
            tl.store(state_at, state.to(matrices_ptr.dtype.element_ty), mask=has_pending)
            _store_window(conv_at + value_channels, value_window, has_pending, CONV_DIM, TAPS)
        # The next token's loads are in flight while this token is computed. The first new one is loaded above.
        is_next = (token + 1 < end) & (token + 1 != num_accepted)
        next_query_row = load_row(token + 1, num_accepted, is_next, query_source, CONV_DIM, PARTS)
        next_key_row = load_row(token + 1, num_accepted, is_next, key_source, CONV_DIM, PARTS)
        next_value_row = load_row(token + 1, num_accepted, is_next, value_source, CONV_DIM, PARTS)
        next_a, next_b = load_gates(token + 1, num_accepted, is_next, gate_source, HEADS, GATE_PARTS)
        fresh = (token - num_accepted).to(tl.int64)
        z = sum_parts(z_at, z_part_stride, fresh * z_stride, is_new, Z_PARTS)

        query = convolve(query_taps, query_window, query_row, TAPS)
        key = convolve(key_taps, key_window, key_row, TAPS)
        squares, key_squares, overlap = _sums(query * query, key * key, query * key)
        query_scale, key_scale = tl.rsqrt(squares + 1e-6) * DK**-0.5, tl.rsqrt(key_squares + 1e-6)
        key = _spread(key * key_scale, LOW, HIGH)
        value = tl.reshape(convolve(value_taps, value_window, value_row, TAPS), (STRIPES, WIDTH))
        state *= tl.exp(-tl.exp(rate) * softplus(a + bias))
        recalled = tl.sum(tl.sum(state * key, 2), 0)
        correction = tl.sigmoid(b) * (value - recalled)
        if is_new:
            answer = tl.sum(tl.sum(state * _spread(query * query_scale, LOW, HIGH), 2), 0)
            out = tl.reshape(answer + (overlap * query_scale * key_scale) * correction, (DV,))
            gated = norm * out * (z * tl.sigmoid(z))
            # Rounding keeps the order: the largest product with the norm's factor is the largest one's product.
            magnitudes = gated.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            total, largest = _sum_and_largest(out * out, magnitudes)
            factor = tl.rsqrt(total / DV + eps)
            largest = largest.to(tl.float32, bitcast=True) * factor
            row = first + fresh
            store_scaled_group(gated * factor, largest, row, head, x_ptr, planes_ptr, scale_ptr, HEADS * DV)
            new_at = pending_at + fresh * CONV_DIM + value_channels
            tl.store(new_at, value_row.to(pending_rows_ptr.dtype.element_ty))
            tl.store(gates_at + fresh * (2 * HEADS), a)
            tl.store(gates_at + fresh * (2 * HEADS) + HEADS, b)
        if token >= num_accepted:
            # Only thread 0 has counted. The other term keeps this sum, and the wait for the count, where it is.
            is_last = tl.max(tl.where(threads == 0, arrived, -1 - token), 0) == RATIO - 1
            is_last &= is_alive
            if is_last & (token == num_accepted):
                _store_window(conv_at + query_channels, query_window, has_pending, CONV_DIM, TAPS)
                _store_window(conv_at + key_channels, key_window, has_pending, CONV_DIM, TAPS)
                tl.store(arrivals_at, 0)
            is_own = is_last & is_new
            new_at = pending_at + fresh * CONV_DIM
            tl.store(new_at + query_channels, query_row.to(pending_rows_ptr.dtype.element_ty), mask=is_own)
            tl.store(new_at + key_channels, key_row.to(pending_rows_ptr.dtype.element_ty), mask=is_own)
        if (token < num_accepted) | (token + 1 < end):
            state += key * correction[None, :, None, :]
            state = rounded(state, matrices_ptr.dtype.element_ty).to(tl.float32)
        query_window = query_window[1:] + (query_row,)  # noqa: RUF005 - no starred tuples
        key_window = key_window[1:] + (key_row,)  # noqa: RUF005
        value_window = value_window[1:] + (value_row,)  # noqa: RUF005
        query_row, key_row, value_row, a, b = next_query_row, next_key_row, next_value_row, next_a, next_b
        token += 1


@cache
def arrivals(device: torch.device, num_key_heads: int) -> Tensor:
    """Counters that every launch leaves at zero."""
    return torch.zeros(_MAX_SEQUENCES * num_key_heads, dtype=torch.int32, device=device)


def delta_net_step_fused(parts, weights, norm, pool, cu_rows, slots, num_accepted, dtype):
    _, heads, key_dim, value_dim = pool.matrices.shape
    if value_dim != _GROUP or key_dim < _LOW or next_power_of_2(key_dim) != key_dim:
        # A group has several heads, or the matrix is no power of two: a launch for each operation.
        mixed = step_from_parts(parts, weights, pool, cu_rows, slots, num_accepted)
        return gated_norm_fused(mixed, parts.z, norm.weight, norm.eps, dtype)
    num_rows, num_sequences = parts.qkv.shape[1], len(slots)
    rows = new_rows(num_rows, heads * value_dim, dtype, parts.qkv.device)
    taps = weights.conv.shape[1]
    if num_sequences > _MAX_SEQUENCES:
        raise ValueError(f"A decode step has at most {_MAX_SEQUENCES} sequences, not {num_sequences}.")
    delta_net_step_fused_kernel[(heads, num_sequences)](
        parts.qkv,
        parts.a,
        parts.b,
        parts.z,
        *weights,
        norm.weight,
        *pool,
        arrivals(parts.qkv.device, pool.num_key_heads),
        cu_rows,
        slots,
        num_accepted,
        *rows,
        norm.eps,
        parts.qkv.stride(1),
        parts.a.stride(1),
        parts.b.stride(1),
        parts.z.stride(1),
        parts.qkv.stride(0),
        parts.a.stride(0),
        parts.z.stride(0),
        KEY_HEADS=pool.num_key_heads,
        HEADS=heads,
        DK=key_dim,
        DV=value_dim,
        TAPS=taps,
        TAPS_BLOCK=4 if taps <= 4 else 8,
        M=pool.pending_rows.shape[1],
        PARTS=len(parts.qkv),
        GATE_PARTS=len(parts.a),
        Z_PARTS=len(parts.z),
        STRIPES=_STRIPES,
        LOW=_LOW,
        num_warps=_STRIPES,
        **_options(heads, num_sequences),
    )
    return FixedRows(*rows, None)


def _options(heads: int, num_sequences: int) -> dict[str, int | bool]:
    """With more programs than multiprocessors two should share one, so that one loads while the other computes."""
    is_few = heads * num_sequences <= _FEW_PROGRAMS
    return launch_options(_STEP, f"{'few' if is_few else 'many'}_{heads}", maxnreg=168 if is_few else 128)
