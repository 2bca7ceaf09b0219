"""Gated DeltaNet for the chunks of a prompt, in two Triton kernels.

    chunk     everything independent of the state: decays, scores, the inverse of each chunk's triangular system
    scan      updates the state chunk after chunk, one stripe of value columns per program

Float32 precision comes from halves: a number is the sum of two float16 numbers (22 bits), and a product is three
products on the tensor cores (the fourth, of both low halves, is below float32's last bits). Queries, keys, scores and
inverses are at most about one and are split as they are; a row of the state, or of its update, is first scaled to that
size by a power of two.

The state and everything multiplied with it are kept transposed, one value column per row: a program's state is then the
left operand, stays in registers from chunk to chunk, and its rows are independent of each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import loop_bound, rounded
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.target import has_large_shared_memory
from onebox.kernels.delta_net.memory import DeltaPool

__all__ = ["scan_chunks"]

CHUNK = tl.constexpr(64)
_BLOCK = tl.constexpr(16)
"""Tokens per block of the triangular system that is solved row by row; products join four such blocks."""
_BLOCKS = tl.constexpr(4)
_KEY_TILE = 32
"""Key coordinates (DK) that a product in `chunk` sums at once."""


@triton.jit
def _halves(x):
    """Two float16 tensors with the sum x, up to 2^-22 of x or 2^-25, whichever is larger; x is at most about one."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _scaled_halves(x):
    """(halves of each row divided by a power of two near its largest magnitude; that power, float32 [rows])."""
    largest = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(largest, 1), 253)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    high, low = _halves(x * up[:, None])
    return high, low, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a_high, a_low, b_high, b_low):
    """float32 a @ b of operands in halves, the smallest products added first."""
    total = tl.dot(a_low, b_high)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def _store_halves(ptr, size, at, high, low, mask, BOTH: tl.constexpr):
    """Stores high and low into float16 [2, size]."""
    tl.store(ptr + at, high, mask=mask)
    if BOTH:
        tl.store(ptr + size + at, low, mask=mask)


@triton.jit
def _block_inverse(system):
    """[CHUNK, CHUNK]: inverses of the diagonal blocks of 1 + system, of which only the lower triangle is used."""
    rows = tl.arange(0, CHUNK)
    is_inside = rows[:, None] // _BLOCK == rows[None, :] // _BLOCK
    inside = tl.reshape(tl.where(is_inside, system, 0.0), (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK))
    blocks = tl.sum(inside, 2)  # all but one term are zero
    row = tl.arange(0, _BLOCK)[None, :, None]
    column = tl.arange(0, _BLOCK)[None, None, :]
    inverse = tl.zeros((_BLOCKS, _BLOCK, _BLOCK), tl.float32) + tl.where(row == column, 1.0, 0.0)
    for done in range(_BLOCK - 1):
        # Row `done` is final: eliminate it from all rows below. Each sum has one nonzero term.
        factors = tl.sum(tl.where(column == done, blocks, 0.0), 2)
        final = tl.sum(tl.where(row == done, inverse, 0.0), 1)
        inverse -= factors[:, :, None] * final[:, None, :]
    spread = tl.broadcast_to(inverse[:, :, None, :], (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK))
    return tl.where(is_inside, tl.reshape(spread, (CHUNK, CHUNK)), 0.0)


@triton.jit
def _inverse(system):
    """The inverse of 1 + system, system strictly lower triangular [CHUNK, CHUNK].

    With D the inverse of the diagonal blocks and N the blocks left of the diagonal, it is (1 + D N)^-1 D. D N is
    strictly lower triangular in 4 x 4 blocks, so its fourth power is zero and three steps of R = D - D N R suffice.
    """
    rows = tl.arange(0, CHUNK)
    diagonal = _block_inverse(system)
    d_high, d_low = _halves(diagonal)
    n_high, n_low = _halves(tl.where(rows[:, None] // _BLOCK > rows[None, :] // _BLOCK, system, 0.0))
    m_high, m_low = _halves(_dot(d_high, d_low, n_high, n_low))
    result = diagonal
    for _ in range(_BLOCKS - 1):
        r_high, r_low = _halves(result)
        result = diagonal - _dot(m_high, m_low, r_high, r_low)
    return result


@triton.jit(do_not_specialize=["num_rows"])
def delta_net_chunk_kernel(
    mixed_ptr,  # float32 [T, CONV_DIM]
    log_decay_ptr,  # float32 [T, HEADS]
    write_ptr,  # float32 [T, HEADS]
    cu_rows_ptr,  # int32 [S + 1]
    total_ptr,  # float32 [T, HEADS]: log decay since the start of the chunk
    queries_ptr,  # float16 [1 + WIDE, T, KEY_HEADS, DK]
    keys_ptr,  # float16 [2, T, KEY_HEADS, DK]
    inverse_ptr,  # float16 [2, T, HEADS, CHUNK]
    scores_ptr,  # float16 [1 + WIDE, T, HEADS, CHUNK]
    num_rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,  # also store the low halves of queries and scores
):
    """Program (chunk, key head, sequence). With fade_ij the decay from token j to token i, both of the chunk, j <= i:

    scores_ij = fade_ij (q_i . k_j), and the inverse of 1 + write_i fade_ij (k_i . k_j), j < i, for each head of values.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    key_head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * CHUNK
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    if start >= count:
        return
    places = tl.arange(0, CHUNK)
    is_there = start + places < count
    rows = first + start + places
    size = num_rows.to(tl.int64)
    scores = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    system = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for start_k in range(0, DK, BLOCK_K):
        keys = start_k + tl.arange(0, BLOCK_K)
        mask = is_there[:, None] & (keys < DK)[None, :]
        at = mixed_ptr + rows[:, None] * CONV_DIM + key_head * DK + keys[None, :]
        out = (rows[:, None] * KEY_HEADS + key_head) * DK + keys[None, :]
        q_high, q_low = _halves(tl.load(at, mask=mask, other=0.0))
        k_high, k_low = _halves(tl.load(at + KEY_HEADS * DK, mask=mask, other=0.0))
        _store_halves(queries_ptr, size * (KEY_HEADS * DK), out, q_high, q_low, mask, WIDE)
        _store_halves(keys_ptr, size * (KEY_HEADS * DK), out, k_high, k_low, mask, True)
        scores += _dot(q_high, q_low, tl.trans(k_high), tl.trans(k_low))
        system += _dot(k_high, k_low, tl.trans(k_high), tl.trans(k_low))

    row, column = places[:, None], places[None, :]
    for share in range(HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + share
        log_decay = tl.load(log_decay_ptr + rows * HEADS + head, mask=is_there, other=0.0)
        write = tl.load(write_ptr + rows * HEADS + head, mask=is_there, other=0.0)
        total = tl.cumsum(log_decay, 0)
        tl.store(total_ptr + rows * HEADS + head, total, mask=is_there)
        # The upper triangle would overflow in exp, so it is masked before exp, not after.
        fade = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], -float("inf")))
        square = (rows[:, None] * HEADS + head) * CHUNK + column
        high, low = _halves(scores * fade)
        _store_halves(scores_ptr, size * (HEADS * CHUNK), square, high, low, is_there[:, None], WIDE)
        high, low = _halves(_inverse(tl.where(row > column, system * fade * write[:, None], 0.0)))
        _store_halves(inverse_ptr, size * (HEADS * CHUNK), square, high, low, is_there[:, None], True)


@triton.jit
def _load_halves(ptr, size, at, mask):
    """[CHUNK, N] of float16 [2, size], both halves transposed."""
    high = tl.load(ptr + at, mask=mask, other=0.0)
    low = tl.load(ptr + size + at, mask=mask, other=0.0)
    return tl.trans(high), tl.trans(low)


@triton.jit
def _dot_stored(high, low, ptr, size, at, mask, WIDE: tl.constexpr):
    """float32 product of an operand in halves and the transpose of a stored one; if not WIDE, of high halves only."""
    if WIDE:
        b_high, b_low = _load_halves(ptr, size, at, mask)
        result = _dot(high, low, b_high, b_low)
    else:
        result = tl.dot(high, tl.trans(tl.load(ptr + at, mask=mask, other=0.0)))
    return result


@triton.jit(do_not_specialize=["num_rows"])
def delta_net_scan_kernel(
    mixed_ptr,  # float32 [T, CONV_DIM]
    total_ptr,  # float32 [T, HEADS]
    write_ptr,  # float32 [T, HEADS]
    queries_ptr,  # float16 [1 + WIDE, T, KEY_HEADS, DK]
    keys_ptr,  # float16 [2, T, KEY_HEADS, DK]
    inverse_ptr,  # float16 [2, T, HEADS, CHUNK]
    scores_ptr,  # float16 [1 + WIDE, T, HEADS, CHUNK]
    matrices_ptr,  # float32, bfloat16 or float16 [slots, HEADS, DK, DV]
    cu_rows_ptr,  # int32 [S + 1]
    slots_ptr,  # int32 [S]
    saves_ptr,  # int32 [T]
    out_ptr,  # [T, HEADS, DV]
    num_rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPE: tl.constexpr,
    WIDE: tl.constexpr,  # results are float32; for bfloat16 results, high halves alone have three extra bits
):
    """Program (stripe, head, sequence). After each chunk the state is rounded to the dtype that it is stored in."""
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    columns = tl.program_id(0) * STRIPE + tl.arange(0, STRIPE)
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    count = (tl.load(cu_rows_ptr + sequence + 1) - first).to(tl.int32)
    keys = tl.arange(0, BLOCK_K)
    places = tl.arange(0, CHUNK)
    has_key = (keys < DK)[None, :]
    has_column = (columns < DV)[:, None]
    key_size = num_rows.to(tl.int64) * (KEY_HEADS * DK)
    square_size = num_rows.to(tl.int64) * (HEADS * CHUNK)
    state_at = matrices_ptr + (slot * HEADS + head) * (DK * DV) + keys[None, :] * DV + columns[:, None]
    state = tl.load(state_at, mask=has_key & has_column & (count > 0), other=0.0).to(tl.float32)
    for start in range(0, loop_bound(count), CHUNK):
        is_there = start + places < count
        rows = first + start + places
        total = tl.load(total_ptr + rows * HEADS + head, mask=is_there, other=0.0)
        write = tl.load(write_ptr + rows * HEADS + head, mask=is_there, other=0.0)
        last = tl.load(total_ptr + (first + tl.minimum(start + CHUNK, count) - 1) * HEADS + head)
        value_at = mixed_ptr + rows[None, :] * CONV_DIM + 2 * KEY_HEADS * DK + head * DV + columns[:, None]
        value = tl.load(value_at, mask=has_column & is_there[None, :], other=0.0)
        vector = (rows[:, None] * KEY_HEADS + head // (HEADS // KEY_HEADS)) * DK + keys[None, :]
        square = (rows[:, None] * HEADS + head) * CHUNK + places[None, :]
        fade = tl.exp(total)[None, :]

        high, low, size = _scaled_halves(state)
        k_high, k_low = _load_halves(keys_ptr, key_size, vector, is_there[:, None] & has_key)
        recalled = _dot(high, low, k_high, k_low) * size[:, None]
        out = _dot_stored(high, low, queries_ptr, key_size, vector, is_there[:, None] & has_key, WIDE) * size[:, None]

        high, low, size = _scaled_halves(write[None, :] * (value - fade * recalled))
        corrections = _dot_stored(high, low, inverse_ptr, square_size, square, is_there[:, None], True) * size[:, None]

        high, low, size = _scaled_halves(corrections)
        mixed = _dot_stored(high, low, scores_ptr, square_size, square, is_there[:, None], WIDE)
        out = out * fade + mixed * size[:, None]
        out_at = out_ptr + (rows[None, :] * HEADS + head) * DV + columns[:, None]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=has_column & is_there[None, :])

        high, low, size = _scaled_halves(corrections * tl.exp(last - total)[None, :])
        state = state * tl.exp(last) + _dot(high, low, tl.trans(k_high), tl.trans(k_low)) * size[:, None]
        stored = rounded(state, matrices_ptr.dtype.element_ty)
        state = stored.to(tl.float32)
        save = tl.load(saves_ptr + first + start + CHUNK - 1, mask=start + CHUNK <= count, other=-1).to(tl.int64)
        if save >= 0:
            tl.store(state_at + (save - slot) * (HEADS * DK * DV), stored, mask=has_key & has_column)
    tl.store(state_at, state.to(matrices_ptr.dtype.element_ty), mask=has_key & has_column & (count > 0))


def scan_chunks(
    scratch: tuple[Tensor, Tensor, Tensor], pool: DeltaPool, cu_rows: Tensor, slots: Tensor, saves: Tensor, out: Tensor
) -> None:
    """Writes out [T, HEADS, DV], updates the slots' states with all tokens of their sequences, and saves some.

    `scratch` is the result of `prepare` for the T tokens: (mixed, log decay, write), float32.
    """
    mixed, log_decay, write = scratch
    num_rows, heads, value_dim = out.shape
    key_heads, key_dim = pool.num_key_heads, pool.matrices.shape[2]
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": key_dim, "DV": value_dim}
    sizes["WIDE"] = out.dtype == torch.float32
    block_k = max(16, next_power_of_2(key_dim))
    total = torch.empty_like(log_decay)
    halves = 2 if sizes["WIDE"] else 1
    queries, keys = (mixed.new_empty((n, num_rows, key_heads, key_dim), dtype=torch.float16) for n in (halves, 2))
    scores, inverse = (mixed.new_empty((n, num_rows, heads, CHUNK.value), dtype=torch.float16) for n in (halves, 2))
    # Sequence lengths are known only on the device: the grid has enough chunks for one sequence with all tokens, and
    # programs without tokens return at once.
    delta_net_chunk_kernel[(ceil_div(num_rows, CHUNK.value), key_heads, len(slots))](
        mixed,
        log_decay,
        write,
        cu_rows,
        total,
        queries,
        keys,
        inverse,
        scores,
        num_rows,
        **sizes,
        BLOCK_K=min(_KEY_TILE, block_k),
        num_warps=4,
        num_stages=1,
    )
    # A warp group's product has 64 rows; without shared memory to prefetch the next chunk, short stripes hide its loads
    # better.
    stripe, stages = (64, 2) if has_large_shared_memory() else (16, 1)
    delta_net_scan_kernel[(ceil_div(value_dim, stripe), heads, len(slots))](
        mixed,
        total,
        write,
        queries,
        keys,
        inverse,
        scores,
        pool.matrices,
        cu_rows,
        slots,
        saves,
        out,
        num_rows,
        **sizes,
        BLOCK_K=block_k,
        STRIPE=stripe,
        num_warps=4,
        num_stages=stages,
    )
