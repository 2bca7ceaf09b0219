"""Sampling in Triton, without sorting the vocabulary; the method of each row is chosen on the device.

A row's settings select one of three methods:

- plain (greedy, or temperature alone): the best token of each chunk of the vocabulary, then the best of these;
- top_k up to 64: the best 64 tokens of each chunk, then the best 64 of these, cut by top_p and min_p, are drawn from;
- any other limit: a bisection finds the last token that the limits keep, then the plain method with that bound.

All sums are sums of integers, so the order of summation does not change them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import ordered_bits
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.tuning import Tunable

__all__ = ["sample", "sample_drafts"]

_SAMPLE = Tunable("sample")

_NUM_SORTED = tl.constexpr(64)
"""The largest top_k that is computed by sorting candidates."""

_MAX_CHUNKS = 64
_MIN_CHUNK = 64  # a chunk has 64 candidates
_CUT_BLOCK = 8192

_ONE_SHARE = tl.constexpr(2.0**44)
"""The share of the most likely token; see `reference._SHARE_BITS`."""

_LOWEST_KEY = tl.constexpr(-(2**31))
_HIGHEST_KEY = tl.constexpr(2**31 - 1)
_NO_LIMIT = tl.constexpr(2**63 - 1)


# One number a row, read one by one: how they are aligned depends on the number of rows and must not compile anew.
_ROW_VALUES = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr"]


@triton.jit
def _load_limits(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
    """A row's (temperature, top_k, top_p, min_p, is_sorted, is_cut)."""
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    min_p = tl.load(min_p_ptr + row).to(tl.float64)
    is_drawn = temperature > 0
    is_sorted = is_drawn & (top_k > 0) & (top_k <= _NUM_SORTED)
    is_cut = is_drawn & ((top_k > _NUM_SORTED) | ((top_k <= 0) & ((top_p < 1) | (min_p > 0))))
    return temperature, top_k, top_p, min_p, is_sorted, is_cut


@triton.jit
def _key(logit):
    """int64 within 32 bits, in the same order as the float32 logits; both zeros have one key."""
    logit = tl.where(logit == 0, 0.0, logit)
    return ordered_bits(logit.to(tl.int32, bitcast=True)).to(tl.int64)


@triton.jit
def _logit(key):
    """The float32 logit with this key: the inverse of `_key`."""
    return ordered_bits(key.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _share(logit, peak, temperature):
    """int64: probability of a logit's token relative to the token at the peak; see `reference._SHARE_BITS`."""
    # Rows with values that are not finite get no token in the end; this keeps the arithmetic on them defined.
    peak = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    distance = logit.to(tl.float64) / temperature - peak.to(tl.float64) / temperature
    distance = tl.where(distance <= 0, distance, float("-inf"))
    return (tl.exp(distance) * _ONE_SHARE).to(tl.int64)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(seed, position, ids):
    """The noise of `reference.gumbel` for tokens ids: SplitMix64 and two float64 logarithms."""
    start = _mix(_mix(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    bits = _mix(start + (ids.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * (2.0**-53)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _tokens(token_ids_ptr, columns, inside):
    """The tokens of columns of the logits."""
    tokens = columns
    if token_ids_ptr is not None:
        tokens = tl.load(token_ids_ptr + columns, mask=inside, other=0)
    return tokens


@triton.jit
def _is_kept(keys, ids, cut_key, cut_id):
    """Whether tokens are at or before the cut, in order of falling logit, then rising id."""
    return (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))


@triton.jit(do_not_specialize=_ROW_VALUES)
def sample_peak_kernel(
    logits_ptr,  # float32 [R, V]
    temperature_ptr,  # [R]; so are the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,  # float32 [R, chunks]: the largest logit of each chunk; written for rows that are cut
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    _, _, _, _, _, is_cut = _load_limits(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    if is_cut:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
        tl.store(peaks_ptr + row * tl.num_programs(1) + chunk, tl.max(logits, 0))


@triton.jit(do_not_specialize=_ROW_VALUES)
def sample_share_kernel(
    logits_ptr,  # float32 [R, V]
    temperature_ptr,  # [R]; so are the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,  # float32 [R, chunks]
    shares_ptr,  # int64 [R, V]; written for rows that are cut
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # the number of chunks, rounded up to a power of two
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature, _, _, _, _, is_cut = _load_limits(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    if is_cut:
        chunks = tl.arange(0, CHUNKS)
        num_chunks = tl.num_programs(1)
        peaks = tl.load(peaks_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
        tl.store(shares_ptr + row * V + ids, _share(logits, tl.max(peaks, 0), temperature), mask=ids < V)


@triton.jit
def _weight_ahead(
    logits_ptr, shares_ptr, bound, cut_key, cut_id, V: tl.constexpr, BLOCK: tl.constexpr, BY_SHARE: tl.constexpr
):
    """The weight of kept tokens with keys above the bound: the sum of their shares, or their number."""
    weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = _key(tl.load(logits_ptr + ids, mask=ids < V, other=0.0))
        is_ahead = (ids < V) & (keys > bound) & _is_kept(keys, ids, cut_key, cut_id)
        if BY_SHARE:
            # Loaded for all tokens, counted or not, so that this load does not wait for the other one.
            weight += tl.where(is_ahead, tl.load(shares_ptr + ids, mask=ids < V, other=0), 0)
        else:
            weight += is_ahead.to(tl.int64)
    return tl.sum(weight, 0)


@triton.jit
def _tie_id(logits_ptr, key, number, cut_key, cut_id, V: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the number-th (from one) kept token with this key; V if there are fewer."""
    found = tl.full([], V, tl.int64)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = _key(tl.load(logits_ptr + ids, mask=ids < V, other=0.0))
        is_tied = ((ids < V) & (keys == key) & _is_kept(keys, ids, cut_key, cut_id)).to(tl.int64)
        is_found = (is_tied > 0) & (seen + tl.cumsum(is_tied, 0) == number)
        found = tl.minimum(found, tl.min(tl.where(is_found, ids, V), 0))
        seen += tl.sum(is_tied, 0)
    return found


@triton.jit
def _move_cut(
    logits_ptr, shares_ptr, limit, cut_key, cut_id, V: tl.constexpr, BLOCK: tl.constexpr, BY_SHARE: tl.constexpr
):
    """The new cut: it keeps the kept tokens for which the total weight of the tokens before them is below the limit."""
    # The smallest key with a weight above it that is below the limit: its tokens, or some of them, are the last kept.
    low, high = tl.full([], _LOWEST_KEY - 1, tl.int64), tl.full([], _HIGHEST_KEY, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        is_below = _weight_ahead(logits_ptr, shares_ptr, middle, cut_key, cut_id, V, BLOCK, BY_SHARE) < limit
        high = tl.where(is_below, middle, high)
        low = tl.where(is_below, low, middle)
    room = limit - _weight_ahead(logits_ptr, shares_ptr, high, cut_key, cut_id, V, BLOCK, BY_SHARE)
    # Tokens of one key have equal weight: the lowest ids are kept until the limit is reached.
    if BY_SHARE:
        id_of_one = _tie_id(logits_ptr, high, 1, cut_key, cut_id, V, BLOCK)
        weight = tl.load(shares_ptr + id_of_one, mask=id_of_one < V, other=1)
        number = (room + weight - 1) // weight
    else:
        number = room
    last_id = _tie_id(logits_ptr, high, number, cut_key, cut_id, V, BLOCK)
    # A limit that all tokens meet gives the lowest key and must not loosen an earlier cut.
    is_tighter = high >= cut_key
    return tl.where(is_tighter, high, cut_key), tl.where(is_tighter, last_id, cut_id)


@triton.jit(do_not_specialize=_ROW_VALUES)
def sample_cut_kernel(
    logits_ptr,  # float32 [R, V]
    temperature_ptr,  # [R]; so are the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    shares_ptr,  # int64 [R, V]
    cuts_ptr,  # int64 [R, 2]: key and id of the last kept token; written for every row
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    _, top_k, top_p, min_p, _, is_cut = _load_limits(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    logits_ptr += row * V
    shares_ptr += row * V
    cut_key, cut_id = tl.full([], _LOWEST_KEY, tl.int64), tl.full([], V, tl.int64)
    if is_cut:
        if top_k > 0:
            cut_key, cut_id = _move_cut(logits_ptr, shares_ptr, top_k, cut_key, cut_id, V, BLOCK, False)
        if top_p < 1:
            total = _weight_ahead(logits_ptr, shares_ptr, _LOWEST_KEY - 1, cut_key, cut_id, V, BLOCK, True)
            target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            cut_key, cut_id = _move_cut(logits_ptr, shares_ptr, target, cut_key, cut_id, V, BLOCK, True)
        if min_p > 0:
            lowest = tl.full([BLOCK], _HIGHEST_KEY, tl.int64)
            for start in range(0, V, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                shares = tl.load(shares_ptr + ids, mask=ids < V, other=0)
                is_likely = (ids < V) & (shares.to(tl.float64) >= min_p * _ONE_SHARE)
                keys = _key(tl.load(logits_ptr + ids, mask=ids < V, other=0.0))
                lowest = tl.minimum(lowest, tl.where(is_likely, keys, _HIGHEST_KEY))
            lowest_key = tl.min(lowest, 0)
            cut_id = tl.where(lowest_key > cut_key, V, cut_id)
            cut_key = tl.maximum(lowest_key, cut_key)
    tl.store(cuts_ptr + 2 * row, cut_key)
    tl.store(cuts_ptr + 2 * row + 1, cut_id)


@triton.jit(do_not_specialize=_ROW_VALUES)
def sample_chunk_kernel(
    logits_ptr,  # float32 [R, V]
    temperature_ptr,  # [R]; so are the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    token_ids_ptr,  # int64 [V]: the token of each column, or None if they are the same
    cuts_ptr,  # int64 [R, 2], or None if no row is cut
    candidates_ptr,  # int64 [R, chunks, 64]: (key, falling id) of a chunk's best; written for rows that sort
    values_ptr,  # float64 [R, chunks]: the best logit with its noise; written for the other rows
    ids_ptr,  # int64 [R, chunks]: the id of that token
    peaks_ptr,  # float32 [R, chunks]: the largest logit, NaN if one is
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    out = row * tl.num_programs(1) + chunk
    temperature, _, _, _, is_sorted, _ = _load_limits(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    ids = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
    has_nan = tl.max((logits != logits).to(tl.int32), 0) > 0
    tl.store(peaks_ptr + out, tl.where(has_nan, float("nan"), tl.max(logits, 0)))
    keys = _key(logits)
    if is_sorted:
        # The low word decreases with the id, so that among equal logits the lowest id comes first and no two are equal.
        words = tl.where(ids < V, (keys << 32) + (0xFFFFFFFF - ids), _LOWEST_KEY << 32)
        best = tl.topk(words, _NUM_SORTED)
        tl.store(candidates_ptr + out * _NUM_SORTED + tl.arange(0, _NUM_SORTED), best)
    else:
        values = logits.to(tl.float64)
        if temperature > 0:
            tokens = _tokens(token_ids_ptr, ids, ids < V)
            values = values / temperature + _gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tokens)
        kept = ids < V
        if cuts_ptr is not None:
            kept &= _is_kept(keys, ids, tl.load(cuts_ptr + 2 * row), tl.load(cuts_ptr + 2 * row + 1))
        values = tl.where(kept, values, float("-inf"))
        best_value = tl.max(values, 0)
        tl.store(values_ptr + out, best_value)
        tl.store(ids_ptr + out, tl.min(tl.where(kept & (values == best_value), ids, V), 0))


@triton.jit
def _draw_sorted(
    candidates_ptr,  # int64 [chunks, 64]: of this row
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    column_tokens_ptr,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    """The column drawn from the first top_k of all candidates after the cuts by top_p and min_p."""
    everywhere = tl.arange(0, CHUNKS * _NUM_SORTED)
    inside = everywhere < num_chunks * _NUM_SORTED
    words = tl.topk(tl.load(candidates_ptr + everywhere, mask=inside, other=_LOWEST_KEY << 32), _NUM_SORTED)
    # The padding of a chunk with fewer than 64 tokens has a key that no logit has.
    kept = (tl.arange(0, _NUM_SORTED) < top_k) & (words >> 32 > _LOWEST_KEY)
    logits = tl.where(kept, _logit(words >> 32), float("-inf"))
    shares = _share(logits, tl.max(logits, 0), temperature)
    target = tl.ceil(top_p * tl.sum(shares, 0).to(tl.float64)).to(tl.int64)
    target = tl.where(top_p < 1, target, _NO_LIMIT)
    before = tl.cumsum(shares, 0) - shares
    kept = kept & (before < target) & (shares.to(tl.float64) >= min_p * _ONE_SHARE)
    ids = 0xFFFFFFFF - (words & 0xFFFFFFFF)
    noise = _gumbel(seed, position, _tokens(column_tokens_ptr, ids, kept))
    values = tl.where(kept, logits.to(tl.float64) / temperature + noise, float("-inf"))
    return tl.min(tl.where(values == tl.max(values, 0), ids, _NO_LIMIT), 0)


@triton.jit(do_not_specialize=_ROW_VALUES)
def sample_choose_kernel(
    temperature_ptr,  # [R]; so are the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    column_tokens_ptr,  # int64 [V]: the token of each column, or None if they are the same
    candidates_ptr,  # int64 [R, chunks, 64]
    values_ptr,  # float64 [R, chunks]
    ids_ptr,  # int64 [R, chunks]
    peaks_ptr,  # float32 [R, chunks]
    token_ids_ptr,  # int64 [R]
    num_chunks,
    CHUNKS: tl.constexpr,  # the number of chunks, rounded up to a power of two
    NO_TOKEN: tl.constexpr,  # where nothing can be sampled
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    out = row * num_chunks + chunks
    peaks = tl.load(peaks_ptr + out, mask=chunks < num_chunks, other=float("-inf"))
    has_nan = tl.max((peaks != peaks).to(tl.int32), 0) > 0
    is_number = (tl.abs(tl.max(peaks, 0)) < float("inf")) & ~has_nan
    temperature, top_k, top_p, min_p, is_sorted, _ = _load_limits(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    if is_sorted:
        candidates_ptr += row * num_chunks * _NUM_SORTED
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        limits = temperature, top_k, top_p, min_p
        chosen = _draw_sorted(candidates_ptr, *limits, seed, position, column_tokens_ptr, num_chunks, CHUNKS)
    else:
        values = tl.load(values_ptr + out, mask=chunks < num_chunks, other=float("-inf"))
        ids = tl.load(ids_ptr + out, mask=chunks < num_chunks, other=_NO_LIMIT)
        chosen = tl.min(tl.where(values == tl.max(values, 0), ids, _NO_LIMIT), 0)
    token = _tokens(column_tokens_ptr, chosen, is_number)
    tl.store(token_ids_ptr + row, tl.where(is_number, token, NO_TOKEN))


def sample(logits, temperature, top_k, top_p, min_p, seeds, positions):
    limits = temperature, top_k, top_p, min_p
    return _choose(logits, limits, seeds, positions, _find_cuts(logits, limits), no_token=-1)


def sample_drafts(logits, temperature, top_k, top_p, min_p, seeds, positions, token_ids=None):
    # A top_k of 1 to 64 is sorted: no row is cut.
    limits = temperature, top_k, top_p, min_p
    return _choose(logits, limits, seeds, positions, None, no_token=0, column_tokens=token_ids)


_Limits = tuple[Tensor, Tensor, Tensor, Tensor]
"""Temperature, top_k, top_p and min_p of the rows."""


def _find_cuts(logits: Tensor, limits: _Limits) -> Tensor | None:
    """int64 [R, 2]: key and id of each row's last kept token."""
    rows, vocabulary = logits.shape
    if not rows:
        return None
    grid, chunk = _chunks(rows, vocabulary)
    peaks = logits.new_empty(grid)
    shares = torch.empty(rows, vocabulary, dtype=torch.int64, device=logits.device)
    cuts = shares.new_empty(rows, 2)
    options = launch_options(_SAMPLE, "cut")
    sample_peak_kernel[grid](logits, *limits, peaks, V=vocabulary, CHUNK=chunk, **options)
    chunks = next_power_of_2(grid[1])
    sample_share_kernel[grid](logits, *limits, peaks, shares, V=vocabulary, CHUNK=chunk, CHUNKS=chunks, **options)
    block = min(_CUT_BLOCK, next_power_of_2(vocabulary))
    sample_cut_kernel[(rows,)](logits, *limits, shares, cuts, V=vocabulary, BLOCK=block, num_warps=32, **options)
    return cuts


def _choose(
    logits: Tensor,
    limits: _Limits,
    seeds: Tensor,
    positions: Tensor,
    cuts: Tensor | None,
    *,
    no_token: int,
    column_tokens: Tensor | None = None,
) -> Tensor:
    """Each row's token, int64 [R]; `cuts` may be None if no row is cut, `column_tokens` if columns are tokens."""
    rows, vocabulary = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return token_ids
    grid, chunk = _chunks(rows, vocabulary)
    candidates = token_ids.new_empty(*grid, _NUM_SORTED.value)
    values, ids = torch.empty(grid, dtype=torch.float64, device=logits.device), token_ids.new_empty(grid)
    peaks = logits.new_empty(grid)
    options = launch_options(_SAMPLE, "token")
    sample_chunk_kernel[grid](
        logits,
        *limits,
        seeds,
        positions,
        column_tokens,
        cuts,
        candidates,
        values,
        ids,
        peaks,
        V=vocabulary,
        CHUNK=chunk,
        num_warps=8,
        **options,
    )
    found = candidates, values, ids, peaks
    sample_choose_kernel[(rows,)](
        *limits,
        seeds,
        positions,
        column_tokens,
        *found,
        token_ids,
        grid[1],
        CHUNKS=next_power_of_2(grid[1]),
        NO_TOKEN=no_token,
        num_warps=8,
        **options,
    )
    return token_ids


def _chunks(rows: int, vocabulary: int) -> tuple[tuple[int, int], int]:
    """((rows, chunks), tokens of a chunk)."""
    chunk: int = max(_MIN_CHUNK, next_power_of_2(ceil_div(vocabulary, _MAX_CHUNKS)))
    return (rows, ceil_div(vocabulary, chunk)), chunk
