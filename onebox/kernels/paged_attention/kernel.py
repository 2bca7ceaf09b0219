"""Paged attention in Triton: packed pages are read as they are, the softmax is float32.

Decoding cuts a sequence's tokens into pieces, one program a piece, and a second kernel adds the pieces up in order:

    tokens     0 ... 2,048      ... 6,144      ... 14,336     ...
    pieces     16 of 128        16 of 256      16 of 512      of 1,024 each

The cuts are a function of the position alone, so a row's arithmetic is a function of what it sees. Pieces grow because
short contexts need many programs to fill the GPU, while at long ones a piece's float32 sums must stay small beside the
bytes it read. A program takes a tile of BLOCK_M rows, all query heads of a KV head times a few rows, of the same size
for one row and for nine: other tile shapes could sum in another order. Masked positions have a share of exactly zero
and no part in the maximum, so tokens behind a row's end change nothing in it. Sizes and tables that
vary from call to call are plain arguments that Triton does not specialise on: calls of a shape share machine code.

A head's coordinates come in two planes of D/2: the halves, or for 4 bits the even and the odd ones, which are the low
and the high nibbles of the bytes. Dot products add the planes; nothing is ever interleaved.

TurboQuant's rotation keeps inner products and is linear: the query is rotated once, values are mixed in the rotated
space and the result is rotated back once.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import FP8_BITS, KVPages, turboquant_tables
from onebox.kernels.dependent import dependent, release, wait
from onebox.kernels.kv_write.kernel import IS_INTERPRETED, hadamard, rounded
from onebox.kernels.target import has_large_shared_memory

__all__ = ["paged_attention", "paged_attention_prefill"]

BF16_BITS = 16
MAX_ROWS = 9  # of one sequence in a decode or verify step
BLOCK_M = 32  # query heads x rows in a decode program
TILE = tl.constexpr(32)  # tokens read at a time in a decode program, within one page

FIRST_PIECE = tl.constexpr(128)  # tokens
SAME_PIECES = tl.constexpr(16)  # of one length, before the length doubles
DOUBLINGS = tl.constexpr(3)
SPAN = tl.constexpr(2048)  # tokens in the pieces of the first length


@triton.jit
def _piece_bounds(piece):
    """The first token of a piece and the first one after it."""
    level = tl.minimum(piece // SAME_PIECES, DOUBLINGS)
    length = FIRST_PIECE << level
    start = ((1 << level) - 1) * SPAN + (piece - level * SAME_PIECES) * length
    return start, start + length


@triton.jit
def _piece_count(tokens):
    """How many pieces hold the first `tokens` tokens."""
    level = 0
    for doubling in tl.static_range(DOUBLINGS):
        level += (tokens > ((2 << doubling) - 1) * SPAN).to(tl.int32)
    rest = tl.maximum(tokens - ((1 << level) - 1) * SPAN, 0)
    length = FIRST_PIECE << level
    return level * SAME_PIECES + (rest + length - 1) // length


def piece_count(tokens: int) -> int:
    """How many pieces hold the first `tokens` tokens, for the host."""
    level = sum(tokens > ((2 << doubling) - 1) * SPAN.value for doubling in range(DOUBLINGS.value))
    rest = tokens - ((1 << level) - 1) * SPAN.value
    count: int = level * SAME_PIECES.value + triton.cdiv(rest, FIRST_PIECE.value << level)
    return count


@triton.jit
def _bound(x):
    """An integer as a loop bound. The interpreter's scalars are arrays of one element, which numpy refuses as that."""
    if IS_INTERPRETED:
        return x.handle.data.item()
    else:
        return x


@triton.jit
def _dot(a, b, total):
    """The product a @ b + total in float32. The interpreter cannot multiply bfloat16 itself."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _plane_dims(PLANE: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Which coordinates of a head a plane holds: [D/2]."""
    index = tl.arange(0, D // 2)
    if BITS == 4:
        return 2 * index + PLANE
    else:
        return PLANE * (D // 2) + index


@triton.jit
def _narrow_codes(codes_ptr, row, inside, PLANE: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Codes of 2 or 3 bits, int32 [tokens, D/2]; one of 3 bits may reach into the next byte."""
    first_bit = _plane_dims(PLANE, D, BITS) * BITS
    byte = first_bit // 8
    at = codes_ptr + row * (D * BITS // 8) + byte[None, :]
    word = tl.load(at, mask=inside, other=0).to(tl.int32)
    if BITS == 3:
        has_next = byte[None, :] + 1 < D * BITS // 8
        word |= tl.load(at + 1, mask=inside & has_next, other=0).to(tl.int32) << 8
    return (word >> (first_bit % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _load_planes(
    codes_ptr, scale_ptr, levels_ptr, vectors, loaded, D: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr
):
    """Two planes [tokens, D/2] in DTYPE and the factor, float32 [tokens], that makes them the stored vectors."""
    TILE: tl.constexpr = vectors.shape[0]
    row = vectors[:, None]
    inside = loaded[:, None]
    if BITS >= 8:
        low = tl.load(codes_ptr + row * D + _plane_dims(0, D, BITS)[None, :], mask=inside, other=0.0)
        high = tl.load(codes_ptr + row * D + _plane_dims(1, D, BITS)[None, :], mask=inside, other=0.0)
        if BITS == 16:
            factor = tl.full([TILE], 1.0, tl.float32)
        else:
            factor = tl.load(scale_ptr + vectors, mask=loaded, other=0.0).to(tl.float32)
        return low.to(DTYPE), high.to(DTYPE), factor
    else:
        if BITS == 4:
            byte = tl.load(codes_ptr + row * (D // 2) + tl.arange(0, D // 2)[None, :], mask=inside, other=0)
            low_code = (byte & 15).to(tl.int32)
            high_code = (byte >> 4).to(tl.int32)
        else:
            low_code = _narrow_codes(codes_ptr, row, inside, 0, D, BITS)
            high_code = _narrow_codes(codes_ptr, row, inside, 1, D, BITS)
        # Levels are looked up in the registers of a warp; Triton wants 16 a row for that, so a shorter table repeats.
        table = tl.load(levels_ptr + tl.arange(0, 16) % (1 << BITS))
        levels = tl.broadcast_to(table[None, :], [TILE, 16])
        low = tl.gather(levels, low_code, 1)
        high = tl.gather(levels, high_code, 1)
        # The centroids are put back on the unit sphere, as the codec says.
        norm = tl.load(scale_ptr + vectors, mask=loaded, other=0.0).to(tl.float32)
        factor = norm * tl.rsqrt(tl.sum(low * low, 1) + tl.sum(high * high, 1))
        return rounded(low, DTYPE), rounded(high, DTYPE), factor


@triton.jit
def _attend_tile(
    query_low,
    query_high,
    visible,  # int32 [M]: tokens that each row sees
    best,  # float32 [M]: the running maximum, of scores in powers of two
    total,  # float32 [M]: the running sum of shares
    mixed_low,  # float32 [M, D/2]: the running values
    mixed_high,
    position,  # of the tile's first token, a multiple of TILE
    end,  # tokens from here on are not read
    table_ptr,  # the sequence's page table
    head,
    key_codes_ptr,
    key_scale_ptr,
    key_levels_ptr,
    value_codes_ptr,
    value_scale_ptr,
    value_levels_ptr,
    scale,  # of scores, times log2(e)
    V: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One step of the running softmax over TILE tokens."""
    page = tl.load(table_ptr + position // P).to(tl.int64)
    offset = tl.arange(0, TILE)
    vectors = (page * V + head) * P + position % P + offset
    loaded = position + offset < end
    DTYPE: tl.constexpr = query_low.dtype
    key_low, key_high, key_factor = _load_planes(
        key_codes_ptr, key_scale_ptr, key_levels_ptr, vectors, loaded, D, KEY_BITS, DTYPE
    )
    scores = _dot(query_low, tl.trans(key_low), tl.zeros([query_low.shape[0], TILE], tl.float32))
    scores = _dot(query_high, tl.trans(key_high), scores)
    scores = scores * (key_factor * scale)[None, :]
    scores = tl.where((position + offset)[None, :] < visible[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing yet
    fade = tl.exp2(best - base)
    shares = tl.exp2(scores - base[:, None])
    total = total * fade + tl.sum(shares, 1)
    value_low, value_high, value_factor = _load_planes(
        value_codes_ptr, value_scale_ptr, value_levels_ptr, vectors, loaded, D, VALUE_BITS, DTYPE
    )
    weights = shares * value_factor[None, :]
    if tl.float16 == DTYPE:
        weights = tl.minimum(weights, 65504.0)
    weights = rounded(weights, DTYPE)
    mixed_low = _dot(weights, value_low, mixed_low * fade[:, None])
    mixed_high = _dot(weights, value_high, mixed_high * fade[:, None])
    return new_best, total, mixed_low, mixed_high


@triton.jit(do_not_specialize=["page_table_ptr", "context_ptr", "cu_rows_ptr", "num_pieces", "max_pages", "num_groups"])
def paged_attention_piece_kernel(
    query_ptr,  # [R, Q, D], rotated where keys are
    partial_ptr,  # float32 [R, pieces, Q, D]: a piece's mixed values
    best_ptr,  # float32 [R, pieces, Q]: its maximum
    total_ptr,  # float32 [R, pieces, Q]: its sum of shares
    page_table_ptr,  # int32 [S, max_pages]
    context_ptr,  # int32 [S]
    cu_rows_ptr,  # int32 [S + 1]
    key_codes_ptr,
    key_scale_ptr,
    key_levels_ptr,
    value_codes_ptr,
    value_scale_ptr,
    value_levels_ptr,
    scale,
    num_pieces,
    max_pages,
    num_groups,  # tiles that cover a sequence's rows
    Q: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROWS: tl.constexpr,  # rows in a tile
    BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GROUP_HEADS: tl.constexpr = Q // V
    release(DEPENDENT)
    # Tiles of the same keys are neighbours, so that all but one find them in L2.
    first_of_tile = (tl.program_id(0) % num_groups) * ROWS
    head = tl.program_id(0) // num_groups
    piece = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    first_row = tl.load(cu_rows_ptr + sequence)
    num_rows = tl.load(cu_rows_ptr + sequence + 1) - first_row
    first_sees = tl.load(context_ptr + sequence) - num_rows + 1  # tokens, of the sequence's first row
    start, end = _piece_bounds(piece)
    end = tl.minimum(end, first_sees + tl.minimum(first_of_tile + ROWS, num_rows) - 1)
    # What it has read so far are inputs of the step, complete before the step began.
    wait(DEPENDENT)
    if (first_of_tile < num_rows) & (start < end):
        index = tl.arange(0, BLOCK_M)
        row = first_of_tile + index // GROUP_HEADS
        inside = (index < ROWS * GROUP_HEADS) & (row < num_rows)
        visible = tl.where(inside, first_sees + row, 0)
        row_head = (first_row + row).to(tl.int64) * Q + head * GROUP_HEADS + index % GROUP_HEADS
        at = query_ptr + row_head[:, None] * D
        query_low = tl.load(at + _plane_dims(0, D, KEY_BITS)[None, :], mask=inside[:, None], other=0.0)
        query_high = tl.load(at + _plane_dims(1, D, KEY_BITS)[None, :], mask=inside[:, None], other=0.0)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mixed_low = tl.zeros([BLOCK_M, D // 2], tl.float32)
        mixed_high = tl.zeros([BLOCK_M, D // 2], tl.float32)
        for position in range(_bound(start), _bound(end), TILE):
            best, total, mixed_low, mixed_high = _attend_tile(
                query_low,
                query_high,
                visible,
                best,
                total,
                mixed_low,
                mixed_high,
                position,
                end,
                page_table_ptr + sequence * max_pages,
                head,
                key_codes_ptr,
                key_scale_ptr,
                key_levels_ptr,
                value_codes_ptr,
                value_scale_ptr,
                value_levels_ptr,
                scale,
                V,
                P,
                D,
                KEY_BITS,
                VALUE_BITS,
                TILE,
            )
        cell = ((first_row + row).to(tl.int64) * num_pieces + piece) * Q + head * GROUP_HEADS + index % GROUP_HEADS
        tl.store(best_ptr + cell, best, mask=inside)
        tl.store(total_ptr + cell, total, mask=inside)
        at = partial_ptr + cell[:, None] * D
        tl.store(at + _plane_dims(0, D, VALUE_BITS)[None, :], mixed_low, mask=inside[:, None])
        tl.store(at + _plane_dims(1, D, VALUE_BITS)[None, :], mixed_high, mask=inside[:, None])


@triton.jit(do_not_specialize=["context_ptr", "cu_rows_ptr", "num_sequences", "num_pieces"])
def paged_attention_combine_kernel(
    out_ptr,  # [R, Q, D]
    partial_ptr,
    best_ptr,
    total_ptr,
    context_ptr,
    cu_rows_ptr,
    signs_ptr,  # float32 [D], where values are rotated
    num_sequences,
    num_pieces,
    Q: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INVERSE_ROOT: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CHUNK: tl.constexpr,  # pieces, or sequences, read at a time
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.full([], 0, tl.int32)  # how many sequences end before the row
    for first in range(0, _bound(num_sequences), CHUNK):
        number = first + tl.arange(0, CHUNK)
        ends = tl.load(cu_rows_ptr + 1 + number, mask=number < num_sequences, other=2147483647)
        sequence += tl.sum((ends <= row).to(tl.int32), 0)
    is_owned = sequence < num_sequences
    last_row = tl.load(cu_rows_ptr + sequence + 1, mask=is_owned, other=0) - 1
    context = tl.load(context_ptr + sequence, mask=is_owned, other=0)
    count = tl.where(is_owned, _piece_count(context - (last_row - row)), 0)
    first_cell = row.to(tl.int64) * num_pieces * Q + head
    # What it has read so far are inputs of the step, complete before the step began.
    wait(DEPENDENT)
    best = tl.full([], float("-inf"), tl.float32)
    for first in range(0, _bound(count), CHUNK):
        piece = first + tl.arange(0, CHUNK)
        bests = tl.load(best_ptr + first_cell + piece * Q, mask=piece < count, other=float("-inf"))
        best = tl.maximum(best, tl.max(bests, 0))
    columns = tl.arange(0, D)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([D], tl.float32)
    for first in range(0, _bound(count), CHUNK):
        piece = first + tl.arange(0, CHUNK)
        inside = piece < count
        cell = first_cell + piece * Q
        weight = tl.exp2(tl.load(best_ptr + cell, mask=inside, other=float("-inf")) - best)
        total += tl.sum(weight * tl.load(total_ptr + cell, mask=inside, other=0.0), 0)
        part = tl.load(partial_ptr + cell[:, None] * D + columns[None, :], mask=inside[:, None], other=0.0)
        mixed += tl.sum(weight[:, None] * part, 0)
    mixed = mixed / tl.where(count > 0, total, 1.0)
    if VALUE_BITS < 8:
        mixed = hadamard(mixed, D, LOG_D, INVERSE_ROOT) * tl.load(signs_ptr + columns)
    out = out_ptr + (row.to(tl.int64) * Q + head) * D + columns
    tl.store(out, rounded(mixed, out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["page_table_ptr", "start_ptr", "cu_rows_ptr", "max_pages"])
def paged_attention_prefill_kernel(
    query_ptr,  # [T, Q, D], rotated where keys are
    out_ptr,  # [T, Q, D], rotated where values are
    page_table_ptr,  # int32 [S, max_pages]
    start_ptr,  # int32 [S]
    cu_rows_ptr,  # int32 [S + 1]
    key_codes_ptr,
    key_scale_ptr,
    key_levels_ptr,
    value_codes_ptr,
    value_scale_ptr,
    value_levels_ptr,
    scale,
    max_pages,
    Q: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    sequence = tl.program_id(2).to(tl.int64)
    query_head = tl.program_id(1)
    first_row = tl.load(cu_rows_ptr + sequence)
    start = tl.load(start_ptr + sequence)
    stop = start + tl.load(cu_rows_ptr + sequence + 1) - first_row
    # Tiles lie on the grid of absolute positions: a row has the same place in its tile wherever the prompt was cut.
    tile_start = (start // QUERY_TILE + tl.program_id(0)) * QUERY_TILE
    if tile_start < stop:
        positions = tile_start + tl.arange(0, QUERY_TILE)
        inside = (positions >= start) & (positions < stop)
        visible = tl.where(inside, positions + 1, 0)
        row_head = (first_row + positions - start).to(tl.int64) * Q + query_head
        at = query_ptr + row_head[:, None] * D
        query_low = tl.load(at + _plane_dims(0, D, KEY_BITS)[None, :], mask=inside[:, None], other=0.0)
        query_high = tl.load(at + _plane_dims(1, D, KEY_BITS)[None, :], mask=inside[:, None], other=0.0)
        best = tl.full([QUERY_TILE], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_TILE], tl.float32)
        mixed_low = tl.zeros([QUERY_TILE, D // 2], tl.float32)
        mixed_high = tl.zeros([QUERY_TILE, D // 2], tl.float32)
        end = tl.minimum(tile_start + QUERY_TILE, stop)
        for position in range(0, _bound(end), TILE):
            best, total, mixed_low, mixed_high = _attend_tile(
                query_low,
                query_high,
                visible,
                best,
                total,
                mixed_low,
                mixed_high,
                position,
                end,
                page_table_ptr + sequence * max_pages,
                query_head // (Q // V),
                key_codes_ptr,
                key_scale_ptr,
                key_levels_ptr,
                value_codes_ptr,
                value_scale_ptr,
                value_levels_ptr,
                scale,
                V,
                P,
                D,
                KEY_BITS,
                VALUE_BITS,
                TILE,
            )
        share = 1.0 / tl.where(total > 0, total, 1.0)
        at = out_ptr + row_head[:, None] * D
        mixed_low = rounded(mixed_low * share[:, None], out_ptr.dtype.element_ty)
        mixed_high = rounded(mixed_high * share[:, None], out_ptr.dtype.element_ty)
        tl.store(at + _plane_dims(0, D, VALUE_BITS)[None, :], mixed_low, mask=inside[:, None])
        tl.store(at + _plane_dims(1, D, VALUE_BITS)[None, :], mixed_high, mask=inside[:, None])


@triton.jit
def paged_attention_rotate_kernel(
    x_ptr,  # [rows, D]
    out_ptr,  # [rows, D]
    signs_ptr,  # float32 [D]
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INVERSE_ROOT: tl.constexpr,
    IS_INVERSE: tl.constexpr,
):
    columns = tl.arange(0, D)
    at = tl.program_id(0).to(tl.int64) * D + columns
    x = tl.load(x_ptr + at).to(tl.float32)
    signs = tl.load(signs_ptr + columns)
    if not IS_INVERSE:
        x *= signs
    x = hadamard(x, D, LOG_D, INVERSE_ROOT)
    if IS_INVERSE:
        x *= signs
    tl.store(out_ptr + at, rounded(x, out_ptr.dtype.element_ty))


def paged_attention(
    query: Tensor, pages: KVPages, page_table: Tensor, context: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """See `onebox.kernels.paged_attention.paged_attention`."""
    (num_rows, num_heads, dim), num_sequences = query.shape, page_table.shape[0]
    num_pieces = piece_count(page_table.shape[1] * pages.page_tokens)
    rows_in_tile = max(1, BLOCK_M // (num_heads // pages.kv_heads))
    num_groups = triton.cdiv(min(num_rows, MAX_ROWS), rows_in_tile)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    partial = query.new_empty((num_rows, num_pieces, num_heads, dim), dtype=torch.float32)
    best, total = (query.new_empty((num_rows, num_pieces, num_heads), dtype=torch.float32) for _ in range(2))
    signs = _signs(pages.format.value_bits, dim, query.device)
    paged_attention_piece_kernel[(pages.kv_heads * num_groups, num_pieces, num_sequences)](
        _rotated_for_keys(query, pages),
        partial,
        best,
        total,
        page_table,
        context,
        cu_rows,
        *_stored(pages, dim),
        scale * math.log2(math.e),
        num_pieces,
        page_table.shape[1],
        num_groups,
        Q=num_heads,
        **_page_shape(pages, dim),
        ROWS=rows_in_tile,
        BLOCK_M=max(BLOCK_M, triton.next_power_of_2(num_heads // pages.kv_heads)),
        num_warps=4,
        num_stages=_num_stages(query),
        **dependent(query, "attention_piece"),
    )
    paged_attention_combine_kernel[(num_rows, num_heads)](
        out,
        partial,
        best,
        total,
        context,
        cu_rows,
        signs,
        num_sequences,
        num_pieces,
        Q=num_heads,
        **_rotation_shape(dim),
        VALUE_BITS=pages.format.value_bits,
        CHUNK=16,
        num_warps=4,
        **dependent(query, "attention_combine"),
    )
    return out


def paged_attention_prefill(
    query: Tensor, pages: KVPages, page_table: Tensor, start: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """See `onebox.kernels.paged_attention.paged_attention_prefill`."""
    num_tokens, num_heads, dim = query.shape
    signs = _signs(pages.format.value_bits, dim, query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    mixed = out if signs is None else query.new_empty(query.shape, dtype=torch.float32)
    shape = _prefill_shape(query, pages)
    num_tiles = triton.cdiv(num_tokens, shape["QUERY_TILE"]) + 1  # one more where the first position is inside a tile
    paged_attention_prefill_kernel[(num_tiles, num_heads, page_table.shape[0])](
        _rotated_for_keys(query, pages),
        mixed,
        page_table,
        start,
        cu_rows,
        *_stored(pages, dim),
        scale * math.log2(math.e),
        page_table.shape[1],
        Q=num_heads,
        **_page_shape(pages, dim),
        **shape,
        num_warps=8,
    )
    if signs is not None:
        _rotate(mixed, out, signs, is_inverse=True)
    return out


def _prefill_shape(query: Tensor, pages: KVPages) -> dict[str, int]:
    """Query positions of a prefill program, tokens it reads at a time and keeps in flight.

    A matter of the GPU, the format and the dtype: never of the prompt, or its bits would be too.
    """
    is_plain = pages.format.key_bits == pages.format.value_bits == BF16_BITS and query.dtype == torch.bfloat16
    if is_plain and pages.page_tokens % 64 == 0 and has_large_shared_memory():
        return {"QUERY_TILE": 128, "TILE": 64, "num_stages": 3}
    return {"QUERY_TILE": 64, "TILE": TILE.value, "num_stages": _num_stages(query)}


def _num_stages(query: Tensor) -> int:
    """Tiles in flight. float32 is for tests of small heads: its tiles take twice the room (prefill, D 256: 104 KB)."""
    return 1 if query.dtype == torch.float32 else 2


def _signs(bits: int, dim: int, device: torch.device) -> Tensor | None:
    """The rotation's signs where a codec of `bits` rotates."""
    return turboquant_tables(dim, bits, device).signs if bits < FP8_BITS else None


def _rotated_for_keys(query: Tensor, pages: KVPages) -> Tensor:
    """The query as the kernels take it: turned where keys are, and in the dtype of their products.

    A rotated query and the codebooks' levels are no bfloat16 numbers. float16 has three bits more for them, and all
    that meets it here is far inside its range: queries are normed, levels below one, norms stored as float16.
    """
    is_packed = min(pages.format.key_bits, pages.format.value_bits) < FP8_BITS
    dtype = torch.float16 if is_packed and query.dtype == torch.bfloat16 else query.dtype
    signs = _signs(pages.format.key_bits, query.shape[-1], query.device)
    if signs is None:
        return query.to(dtype).contiguous()
    rotated = torch.empty_like(query, dtype=dtype, memory_format=torch.contiguous_format)
    _rotate(query.contiguous(), rotated, signs, is_inverse=False)
    return rotated


def _rotate(x: Tensor, out: Tensor, signs: Tensor, is_inverse: bool) -> None:
    rows, dim = x.shape[0] * x.shape[1], x.shape[2]
    shape = _rotation_shape(dim)
    paged_attention_rotate_kernel[(rows,)](x, out, signs, **shape, IS_INVERSE=is_inverse, num_warps=1)


def _stored(pages: KVPages, dim: int) -> list[Tensor | None]:
    """Codes, scales and levels of keys, then of values, as the kernels take them."""
    arguments: list[Tensor | None] = []
    for bits, codes, scale in (
        (pages.format.key_bits, pages.key_codes, pages.key_scale),
        (pages.format.value_bits, pages.value_codes, pages.value_scale),
    ):
        levels = turboquant_tables(dim, bits, codes.device).levels if bits < FP8_BITS else None
        arguments += [codes.view(torch.float8_e4m3fn) if bits == FP8_BITS else codes, scale, levels]
    return arguments


def _page_shape(pages: KVPages, dim: int) -> dict[str, int]:
    bits = {"KEY_BITS": pages.format.key_bits, "VALUE_BITS": pages.format.value_bits}
    return {"V": pages.kv_heads, "P": pages.page_tokens, "D": dim, **bits}


def _rotation_shape(dim: int) -> dict[str, float]:
    return {"D": dim, "LOG_D": dim.bit_length() - 1, "INVERSE_ROOT": dim**-0.5}
