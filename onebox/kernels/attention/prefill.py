"""Prefill attention in Triton: a program computes a tile of query positions of one head over the tokens before them.

Few tokens, and any number over plain pages, read the pages as they are. Many tokens over packed pages would decode each
page again for every tile and head, 256 times for 2,048 tokens and 16 query heads a KV head: there pages are decoded
once (`decoded.py`), a slice of the context at a time, and the running softmax of all tiles is kept in memory between
slices. Both give tensor cores the same numbers in the same order, so a row's bits do not depend on how many tokens are
computed with it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import PAGE_MULTIPLE, PLAIN_BITS, KVPages
from onebox.kernels.attention.decoded import decode_slice, new_slice, slice_tokens
from onebox.kernels.attention.hadamard import rotate, rotated_query, rotation_signs
from onebox.kernels.attention.pages import num_stages, page_constants, page_tensors
from onebox.kernels.attention.planes import decoded_columns, join_planes, load_query, load_tables, num_planes
from onebox.kernels.attention.softmax import attend_decoded, attend_tokens, begin, finish, operand_dtype
from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.launch import ceil_div
from onebox.kernels.common.target import has_large_shared_memory
from onebox.spec.pieces import DIRECT_TOKENS

__all__ = ["paged_attention_prefill"]


@triton.jit
def _tile(start, stop, QUERY_TILE: tl.constexpr):
    """(first position of this program's tile, positions, which are inside, tokens they see, end of what they see).

    Tiles are aligned to absolute positions: a row has the same place in its tile wherever the prompt was split.
    """
    tile_start = (start // QUERY_TILE + tl.program_id(0)) * QUERY_TILE
    positions = tile_start + tl.arange(0, QUERY_TILE)
    inside = (positions >= start) & (positions < stop)
    return tile_start, positions, inside, tl.where(inside, positions + 1, 0), tl.minimum(tile_start + QUERY_TILE, stop)


@triton.jit
def _store_output(out_ptr, row_head, inside, total, mixed, columns, VALUE_BITS: tl.constexpr, D: tl.constexpr):
    """The weighted sums, planes or [M, D] in the order of `columns`, divided by the sums of their weights."""
    mixed = finish(mixed, 1.0 / tl.where(total > 0, total, 1.0), VALUE_BITS)
    joined = mixed[0] if len(mixed) == 1 else join_planes(mixed, D, VALUE_BITS, 0)
    at = out_ptr + row_head[:, None] * D + columns[None, :]
    tl.store(at, rounded(joined, out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["page_table_ptr", "start_ptr", "cu_rows_ptr", "table_stride"])
def paged_attention_prefill_kernel(
    query_ptr,  # [T, Q, D], Hadamard-rotated if the keys are
    out_ptr,  # [T, Q, D], Hadamard-rotated if the values are
    page_table_ptr,  # int32 [S, pages], stride table_stride
    start_ptr,  # int32 [S]
    cu_rows_ptr,  # int32 [S + 1]
    key_codes_ptr,
    key_scale_ptr,
    key_levels_ptr,
    key_table_ptr,
    value_codes_ptr,
    value_scale_ptr,
    value_levels_ptr,
    value_table_ptr,
    scale,
    table_stride,
    Q: tl.constexpr,
    KV: tl.constexpr,
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
    tile_start, positions, inside, visible, end = _tile(start, stop, QUERY_TILE)
    if tile_start < stop:
        row_head = (first_row + positions - start).to(tl.int64) * Q + query_head
        query_dtype: tl.constexpr = query_ptr.dtype.element_ty
        KEY_DTYPE: tl.constexpr = operand_dtype(query_dtype, key_codes_ptr.dtype.element_ty, KEY_BITS, True)
        VALUE_DTYPE: tl.constexpr = operand_dtype(query_dtype, value_codes_ptr.dtype.element_ty, VALUE_BITS, False)
        query = load_query(query_ptr, row_head, inside, D, KEY_BITS, KEY_DTYPE, False)
        key_table, value_table = load_tables(key_table_ptr, value_table_ptr, KEY_BITS, VALUE_BITS)
        key = key_codes_ptr, key_scale_ptr, key_levels_ptr, key_table
        value = value_codes_ptr, value_scale_ptr, value_levels_ptr, value_table
        table_ptr = page_table_ptr + sequence * table_stride
        state = begin(QUERY_TILE, D, num_planes(D, VALUE_BITS))
        # Every row of the tile sees all tokens before the tile; only those of the tile itself need a mask.
        state = attend_tokens(
            query,
            visible,
            state,
            tl.full([], 0, tl.int32),
            tile_start,
            table_ptr,
            None,
            query_head // (Q // KV),
            key,
            value,
            scale,
            KV,
            P,
            D,
            KEY_BITS,
            VALUE_BITS,
            VALUE_DTYPE,
            TILE,
            0,
            False,
        )
        _, total, mixed = attend_tokens(
            query,
            visible,
            state,
            tile_start,
            end,
            table_ptr,
            None,
            query_head // (Q // KV),
            key,
            value,
            scale,
            KV,
            P,
            D,
            KEY_BITS,
            VALUE_BITS,
            VALUE_DTYPE,
            TILE,
            0,
            True,
        )
        _store_output(out_ptr, row_head, inside, total, mixed, tl.arange(0, D), VALUE_BITS, D)


@triton.jit
def _load_state(state_ptr, cell, inside, D: tl.constexpr):
    """What `_store_state` stored."""
    at = state_ptr + cell * (D + 2)
    best = tl.load(at, mask=inside, other=float("-inf"))
    total = tl.load(at + 1, mask=inside, other=0.0)
    mixed = tl.load(at[:, None] + 2 + tl.arange(0, D)[None, :], mask=inside[:, None], other=0.0)
    return best, total, (mixed,)


@triton.jit
def _store_state(state_ptr, cell, inside, state, D: tl.constexpr):
    at = state_ptr + cell * (D + 2)
    tl.store(at, state[0], mask=inside)
    tl.store(at + 1, state[1], mask=inside)
    tl.store(at[:, None] + 2 + tl.arange(0, D)[None, :], state[2][0], mask=inside[:, None])


@triton.jit(do_not_specialize=["start_ptr", "cu_rows_ptr", "slice_start", "slice_stop", "slice_stride"])
def paged_attention_slice_kernel(
    query_ptr,  # [T, Q, D], Hadamard-rotated if the keys are
    out_ptr,  # [T, Q, D], Hadamard-rotated if the values are
    state_ptr,  # float32 [T, Q, D + 2]: of rows that see tokens in earlier slices and in later ones
    start_ptr,  # int32 [S]
    cu_rows_ptr,  # int32 [S + 1]
    key_ptr,  # [S, KV, slice_stride, D]: decoded planes; so is the value
    key_factor_ptr,  # float32 [S, KV, slice_stride]; so is the value's
    value_ptr,
    value_factor_ptr,
    slice_start,  # the slice's first token, a multiple of QUERY_TILE
    slice_stop,
    slice_stride,  # tokens of a slice
    Q: tl.constexpr,
    KV: tl.constexpr,
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
    tile_start, positions, inside, visible, end = _tile(start, stop, QUERY_TILE)
    if (tile_start < stop) & (slice_start < end):
        row_head = (first_row + positions - start).to(tl.int64) * Q + query_head
        KEY_DTYPE: tl.constexpr = key_ptr.dtype.element_ty
        VALUE_DTYPE: tl.constexpr = value_ptr.dtype.element_ty
        # In the order of the decoded keys, as one plane.
        at = query_ptr + row_head[:, None] * D + decoded_columns(D, KEY_BITS)[None, :]
        query = (tl.load(at, mask=inside[:, None], other=0.0).to(KEY_DTYPE),)
        first = (sequence * KV + query_head // (Q // KV)) * slice_stride - slice_start
        key, value = (key_ptr, key_factor_ptr), (value_ptr, value_factor_ptr)
        state = begin(QUERY_TILE, D, 1)
        if slice_start > 0:
            state = _load_state(state_ptr, row_head, inside, D)
        whole_end = tl.maximum(tl.minimum(tile_start, slice_stop), slice_start)
        state = attend_decoded(
            query,
            visible,
            state,
            slice_start,
            whole_end,
            first,
            key,
            value,
            D,
            KEY_BITS,
            VALUE_BITS,
            VALUE_DTYPE,
            TILE,
            False,
        )
        state = attend_decoded(
            query,
            visible,
            state,
            whole_end,
            tl.minimum(end, slice_stop),
            first,
            key,
            value,
            D,
            KEY_BITS,
            VALUE_BITS,
            VALUE_DTYPE,
            TILE,
            True,
        )
        if end <= slice_stop:
            columns = decoded_columns(D, VALUE_BITS)
            _store_output(out_ptr, row_head, inside, state[1], state[2], columns, VALUE_BITS, D)
        else:
            _store_state(state_ptr, row_head, inside, state, D)


def paged_attention_prefill(query, pages, page_table, start, cu_rows, scale):
    num_tokens, num_heads, dim = query.shape
    signs = rotation_signs(pages.format.value_bits, dim, query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    mixed = out if signs is None else query.new_empty(query.shape, dtype=torch.float32)
    shape = _prefill_shape(query, pages)
    num_tiles = ceil_div(num_tokens, shape["QUERY_TILE"]) + 1  # one more if the first position is inside a tile
    grid = num_tiles, num_heads, page_table.shape[0]
    turned, log2_scale = rotated_query(query, pages), scale * math.log2(math.e)
    if num_tokens <= DIRECT_TOKENS or max(pages.format.key_bits, pages.format.value_bits) == PLAIN_BITS:
        paged_attention_prefill_kernel[grid](
            turned,
            mixed,
            page_table,
            start,
            cu_rows,
            *page_tensors(pages, dim),
            log2_scale,
            page_table.stride(0),
            Q=num_heads,
            **page_constants(pages, dim),
            **shape,
            num_warps=8,
        )
    else:
        _attend_slices(turned, mixed, page_table, start, cu_rows, log2_scale, pages, grid, shape)
    if signs is not None:
        rotate(mixed, out, signs, is_inverse=True)
    return out


def _attend_slices(
    query: Tensor,
    out: Tensor,
    page_table: Tensor,
    start: Tensor,
    cu_rows: Tensor,
    scale: float,
    pages: KVPages,
    grid: tuple[int, int, int],
    shape: dict[str, int],
) -> None:
    """Slice by slice of the context: decodes it, and adds it to all rows that see any of it."""
    num_tokens, num_heads, dim = query.shape
    constants = page_constants(pages, dim)
    del constants["P"]
    if query.dtype == torch.bfloat16:
        query = query.to(torch.float16)  # as FP8 keys are; in the kernel it would keep the query out of shared memory
    state = query.new_empty((num_tokens, num_heads, dim + 2), dtype=torch.float32)
    each = slice_tokens(page_table.shape[0])
    decoded = new_slice(pages, page_table.shape[0], each, query)
    for first in range(0, page_table.shape[1] * pages.page_tokens, each):
        decode_slice(pages, page_table, start, cu_rows, first, scale, decoded, shape["TILE"])
        paged_attention_slice_kernel[grid](
            query,
            out,
            state,
            start,
            cu_rows,
            *decoded,
            first,
            first + each,
            each,
            Q=num_heads,
            **constants,
            **shape,
            num_warps=8,
        )


def _prefill_shape(query: Tensor, pages: KVPages) -> dict[str, int]:
    """Query positions per prefill program, tokens it loads at a time and pipeline stages.

    Depends on the GPU, the page size and the dtype, never on the prompt: otherwise its bits would depend on it.
    """
    if query.dtype != torch.float32 and pages.page_tokens % 64 == 0 and has_large_shared_memory():
        return {"QUERY_TILE": 128, "TILE": 64, "num_stages": 2}
    return {"QUERY_TILE": 64, "TILE": PAGE_MULTIPLE, "num_stages": num_stages(query, 2)}
