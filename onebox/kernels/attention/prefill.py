"""Prefill attention in Triton: a program takes some query positions of one head and walks the tokens before them."""

import triton
import triton.language as tl

from onebox.kernels.attention.planes import load_tables
from onebox.kernels.attention.softmax import attend_tile
from onebox.kernels.common.arithmetic import loop_bound, rounded

__all__ = ["paged_attention_prefill_kernel"]


@triton.jit(do_not_specialize=["page_table_ptr", "start_ptr", "cu_rows_ptr", "max_pages"])
def paged_attention_prefill_kernel(
    query_ptr,  # [T, Q, D], rotated where keys are, in their planes
    out_ptr,  # [T, Q, D], rotated where values are, in theirs
    page_table_ptr,  # int32 [S, max_pages]
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
        half = tl.arange(0, D // 2)[None, :]
        at = query_ptr + row_head[:, None] * D + half
        query_low = tl.load(at, mask=inside[:, None], other=0.0)
        query_high = tl.load(at + D // 2, mask=inside[:, None], other=0.0)
        best = tl.full([QUERY_TILE], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_TILE], tl.float32)
        mixed_low = tl.zeros([QUERY_TILE, D // 2], tl.float32)
        mixed_high = tl.zeros([QUERY_TILE, D // 2], tl.float32)
        end = tl.minimum(tile_start + QUERY_TILE, stop)
        DTYPE: tl.constexpr = query_ptr.dtype.element_ty
        key_table, value_table = load_tables(key_table_ptr, value_table_ptr, KEY_BITS, VALUE_BITS, DTYPE)
        table_ptr = page_table_ptr + sequence * max_pages
        page = tl.load(table_ptr)
        for position in range(0, loop_bound(end), TILE):
            next_position = position + TILE
            next_page = tl.load(table_ptr + next_position // P, mask=next_position < end, other=0)
            best, total, mixed_low, mixed_high = attend_tile(
                query_low,
                query_high,
                visible,
                best,
                total,
                mixed_low,
                mixed_high,
                position,
                end,
                page.to(tl.int64),
                query_head // (Q // V),
                key_codes_ptr,
                key_scale_ptr,
                key_levels_ptr,
                key_table,
                value_codes_ptr,
                value_scale_ptr,
                value_levels_ptr,
                value_table,
                scale,
                V,
                P,
                D,
                KEY_BITS,
                VALUE_BITS,
                TILE,
            )
            page = next_page
        share = 1.0 / tl.where(total > 0, total, 1.0)
        at = out_ptr + row_head[:, None] * D + half
        mixed_low = rounded(mixed_low * share[:, None], out_ptr.dtype.element_ty)
        mixed_high = rounded(mixed_high * share[:, None], out_ptr.dtype.element_ty)
        tl.store(at, mixed_low, mask=inside[:, None])
        tl.store(at + D // 2, mixed_high, mask=inside[:, None])
