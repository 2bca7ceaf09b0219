"""Completing the logits of a head in two planes, in Triton.

Three launches: the chunks' peaks, completed; each row's bound from them; then every chunk finds its candidates and
completes 16 of them at a time. A token's low codes are one contiguous range of memory, and 16 such rows, wherever they
lie, are the left operand of the int8 MMA, as the tiles are in `int_linear`: groups are exact integers, scaled and added
in order, so a logit's bits depend on nothing but its token and its row.
"""

import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import loop_bound, ordered_bits
from onebox.kernels.common.launch import ceil_div, divisor, next_power_of_2
from onebox.kernels.head.reference import MAX_TOP_K, SLACK, LowPlane, chunk_rows

__all__ = ["complete_candidates", "complete_logits"]

_MAX_ROWS = 16
"""Rows of a program: their planes are the columns of one MMA."""

_MAX_CHUNK = 64
"""Tokens of a program that completes: all of them against 16 places have to fit in its registers."""

_MAX_TOP_K = tl.constexpr(MAX_TOP_K)
_SLACK = tl.constexpr(SLACK)
_CENTRE = tl.constexpr(1.5)
_TOKENS = tl.constexpr(16)
"""Tokens that are completed together."""


@triton.jit
def _low_sums(
    tokens,  # int32 [16]
    inside,  # which of them count
    planes_ptr,
    scale_ptr,
    low_ptr,
    first_row,
    R,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """float32 [16, COLUMNS / 2]: the low plane's sums of these tokens for the rows from `first_row` on."""
    columns = 2 * first_row + tl.arange(0, COLUMNS)
    rows = first_row + tl.arange(0, COLUMNS // 2)
    low_ptrs = low_ptr + tokens.to(tl.int64)[:, None] * (K // 4) + tl.arange(0, 32)[None, :]
    plane_ptrs = planes_ptr + columns[None, :] * K + tl.arange(0, 32)[:, None]
    columns_inside = (columns < 2 * R)[None, :]
    total = tl.zeros((_TOKENS, COLUMNS // 2), tl.float32)
    for first in range(0, K // 128, UNROLL):
        packed = ()
        # All loads are issued before the first use: a program has few bytes to read and waits for each of them.
        for step in tl.static_range(UNROLL):
            packed += (tl.load(low_ptrs + (first + step) * 32, mask=inside[:, None], other=0),)  # type: ignore[assignment]
        for step in tl.static_range(UNROLL):
            group = first + step
            dots = tl.zeros((_TOKENS, COLUMNS), tl.int32)
            for field in tl.static_range(4):
                codes = ((packed[step] >> (2 * field)) & 3).to(tl.int8)
                planes = tl.load(plane_ptrs + group * 128 + field * 32, mask=columns_inside, other=0)
                dots = tl.dot(codes, planes, dots, out_dtype=tl.int32)
            high, low = tl.split(tl.reshape(dots, (_TOKENS, COLUMNS // 2, 2)))
            scale = tl.load(scale_ptr + rows * (K // 128) + group, mask=rows < R, other=0.0)
            total = tl.fma((high * 256 + low).to(tl.float32), tl.broadcast_to(scale[None, :], total.shape), total)
    return total


@triton.jit(do_not_specialize=["R"])
def head_peak_kernel(
    logits_ptr,  # float32 [R, V], incomplete
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    low_ptr,  # uint8 [V, K/4]
    weight_scale_ptr,  # [V]
    is_complete_ptr,  # int32 [1]
    peaks_ptr,  # float32 [R, chunks]
    R,
    V: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    ROWS: tl.constexpr = COLUMNS // 2
    if tl.load(is_complete_ptr) == 0:
        chunk, first_row = tl.program_id(0), tl.program_id(1) * ROWS
        rows = first_row + tl.arange(0, ROWS)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = (rows < R)[:, None] & (tokens < V)[None, :]
        logits = tl.load(
            logits_ptr + rows.to(tl.int64)[:, None] * V + tokens[None, :], mask=inside, other=float("-inf")
        )
        peaks, places = tl.max(logits, 1, return_indices=True)
        # The peak of row i is the i-th token of the operand; rows may be fewer than 16.
        is_own = tl.arange(0, _TOKENS)[:, None] == tl.arange(0, ROWS)[None, :]
        own = chunk * CHUNK + tl.sum(tl.where(is_own, places[None, :], 0), 1)
        sums = _low_sums(own, own < V, planes_ptr, scale_ptr, low_ptr, first_row, R, K, COLUMNS, UNROLL)
        added = tl.sum(tl.where(is_own, sums, 0.0), 0)
        token = tl.minimum(chunk * CHUNK + places, V - 1)
        peaks = tl.fma(added, tl.load(weight_scale_ptr + token).to(tl.float32), peaks)
        tl.store(peaks_ptr + rows * tl.num_programs(0) + chunk, peaks, mask=rows < R)


# Views of a step's packed inputs: how they are aligned depends on the number of rows and must not compile anew.
@triton.jit(do_not_specialize=["temperature_ptr", "top_k_ptr"])
def head_bound_kernel(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    temperature_ptr,  # [R]
    top_k_ptr,  # [R]
    is_complete_ptr,  # int32 [1]
    peaks_ptr,  # float32 [R, NUM_CHUNKS]
    bounds_ptr,  # float32 [R, 3]: the least of the best, 1.5 sum x, |x| with slack
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    if tl.load(is_complete_ptr) == 0:
        row = tl.program_id(0).to(tl.int64)
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        is_drawn = tl.load(temperature_ptr + row).to(tl.float64) > 0
        best = tl.where(is_drawn, top_k, 1)
        is_known = (best > 0) & (best <= _MAX_TOP_K) & (best <= NUM_CHUNKS)
        chunks = tl.arange(0, CHUNKS)
        peaks = tl.load(peaks_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf"))
        keys = ordered_bits(tl.where(peaks == 0, 0.0, peaks).to(tl.int32, bitcast=True)).to(tl.int64)
        keys = tl.where(chunks < NUM_CHUNKS, keys, -(2**31))
        # The largest key that `best` peaks reach, bit by bit.
        least = tl.full([], -(2**31), tl.int64)
        for step in range(32):
            raised = least + (tl.full([], 1, tl.int64) << (31 - step))
            num_above = tl.sum((keys >= raised).to(tl.int64), 0)
            least = tl.where((num_above >= best) & (raised < 2**31), raised, least)
        least_logit = ordered_bits(least.to(tl.int32)).to(tl.float32, bitcast=True)
        groups = tl.arange(0, GROUPS)
        columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = columns < K
        at = planes_ptr + row * 2 * K + columns
        high = tl.load(at, mask=inside, other=0).to(tl.int32)
        steps = high * 256 + tl.load(at + K, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scale_ptr + row * (K // 128) + groups, mask=groups * 128 < K, other=0.0)
        centre = _CENTRE * tl.sum(tl.sum(steps, 1).to(tl.float32) * scale, 0)
        # Relative to the largest scale: the square of a small one would be zero.
        largest = tl.max(tl.where(scale == scale, scale, 1.0), 0)
        squares = tl.sum(steps.to(tl.float32) * steps.to(tl.float32), 1)
        length = largest * tl.sqrt(tl.sum(squares * (scale / largest) * (scale / largest), 0))
        at = bounds_ptr + row * 3
        tl.store(at, tl.where(is_known, least_logit, float("-inf")))
        tl.store(at + 1, centre)
        tl.store(at + 2, length * _SLACK)


@triton.jit
def _is_candidate(
    logits_ptr, weight_scale_ptr, radius_ptr, bounds_ptr, rows, rows_inside, tokens, tokens_inside, V: tl.constexpr
):
    """Booleans [CHUNK]: whether one of the rows may have this token among its best."""
    logits = tl.load(
        logits_ptr + rows.to(tl.int64)[:, None] * V + tokens[None, :],
        mask=rows_inside[:, None] & tokens_inside[None, :],
        other=0.0,
    )
    weight_scale = tl.load(weight_scale_ptr + tokens, mask=tokens_inside, other=0.0).to(tl.float32)
    radius = tl.load(radius_ptr + tokens, mask=tokens_inside, other=0.0)
    least = tl.load(bounds_ptr + rows * 3, mask=rows_inside, other=0.0)
    centre = tl.load(bounds_ptr + rows * 3 + 1, mask=rows_inside, other=0.0)
    length = tl.load(bounds_ptr + rows * 3 + 2, mask=rows_inside, other=0.0)
    reach = tl.abs(weight_scale) * radius
    most = logits + (weight_scale[None, :] * centre[:, None] + reach[None, :] * length[:, None])
    # So that what is not a number is a candidate.
    is_candidate = (most >= least[:, None]) | (most != most) | (least != least)[:, None]
    return tl.max((is_candidate & rows_inside[:, None]).to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["num_rows_ptr", "R"])
def head_complete_kernel(
    logits_ptr,  # float32 [R, V]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    low_ptr,  # uint8 [V, K/4]
    radius_ptr,  # float32 [V]
    weight_scale_ptr,  # [V]
    bounds_ptr,  # float32 [R, 3], or None to complete all
    num_rows_ptr,  # int32 [1], or None for R
    is_complete_ptr,  # int32 [1], or None
    R,
    V: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    ROWS: tl.constexpr = COLUMNS // 2
    first_row = tl.program_id(1) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    tokens = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_wanted = tokens < V
    if bounds_ptr is not None:
        is_counted = rows < (tl.load(num_rows_ptr) if num_rows_ptr is not None else R)
        is_wanted &= _is_candidate(
            logits_ptr, weight_scale_ptr, radius_ptr, bounds_ptr, rows, is_counted, tokens, is_wanted, V
        )
        is_wanted &= tl.load(is_complete_ptr) == 0
    places = tl.cumsum(is_wanted.to(tl.int32), 0) - 1
    count = tl.sum(is_wanted.to(tl.int32), 0)
    for batch in range(loop_bound((count + _TOKENS - 1) // _TOKENS)):
        place = batch * _TOKENS + tl.arange(0, _TOKENS)
        is_own = (places[None, :] == place[:, None]) & is_wanted[None, :]
        own = tl.sum(tl.where(is_own, tokens[None, :], 0), 1)
        inside = place < count
        sums = _low_sums(own, inside, planes_ptr, scale_ptr, low_ptr, first_row, R, K, COLUMNS, UNROLL)
        weight_scale = tl.load(weight_scale_ptr + own, mask=inside, other=0.0).to(tl.float32)
        at = logits_ptr + rows.to(tl.int64)[None, :] * V + own[:, None]
        are_inside = inside[:, None] & (rows < R)[None, :]
        logits = tl.load(at, mask=are_inside, other=0.0)
        tl.store(at, tl.fma(sums, tl.broadcast_to(weight_scale[:, None], sums.shape), logits), mask=are_inside)


def complete_logits(logits, planes, scale, plane):
    if len(logits):
        _complete(logits, planes, scale, plane, None, None, None)


def complete_candidates(logits, planes, scale, plane, temperature, top_k, num_rows, is_complete):
    rows = len(logits)
    if not rows:
        return
    (num_chunks, num_parts), options = _grid(logits, planes)
    peaks, bounds = logits.new_empty(rows, num_chunks), logits.new_empty(rows, 3)
    head_peak_kernel[(num_chunks, num_parts)](
        logits, planes, scale, plane.low, plane.scale, is_complete, peaks, rows, **options
    )
    width = planes.shape[2]
    head_bound_kernel[(rows,)](
        planes,
        scale,
        temperature,
        top_k,
        is_complete,
        peaks,
        bounds,
        K=width,
        GROUPS=next_power_of_2(width // 128),
        NUM_CHUNKS=num_chunks,
        CHUNKS=next_power_of_2(num_chunks),
        num_warps=4,
    )
    _complete(logits, planes, scale, plane, bounds, num_rows, is_complete)


def _complete(
    logits: Tensor,
    planes: Tensor,
    scale: Tensor,
    plane: LowPlane,
    bounds: Tensor | None,
    num_rows: Tensor | None,
    is_complete: Tensor | None,
) -> None:
    (_, num_parts), options = _grid(logits, planes)
    chunk = min(_MAX_CHUNK, options["CHUNK"])
    head_complete_kernel[(ceil_div(logits.shape[1], chunk), num_parts)](
        logits,
        planes,
        scale,
        plane.low,
        plane.radius,
        plane.scale,
        bounds,
        num_rows,
        is_complete,
        len(logits),
        **{**options, "CHUNK": chunk},
    )


def _grid(logits: Tensor, planes: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """(chunks of tokens, chunks of rows), and the constants of kernels on that grid."""
    rows, vocabulary = logits.shape
    chunk = chunk_rows(vocabulary)
    columns = max(8, 2 * min(_MAX_ROWS, next_power_of_2(rows)))  # two planes per row
    grid = ceil_div(vocabulary, chunk), ceil_div(rows, columns // 2)
    width = planes.shape[2]
    return grid, {
        "V": vocabulary,
        "K": width,
        "CHUNK": chunk,
        "COLUMNS": columns,
        "UNROLL": divisor(width // 128, 8 if columns < 32 else 4),
        "num_warps": 1 if columns < 32 else 2,
        "num_stages": 1,
    }
