"""Prefill attention in Triton: a program computes a tile of query positions of one head over the tokens before them."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import FP8_BITS, PAGE_MULTIPLE, KVPages
from onebox.kernels.attention.hadamard import rotate, rotated_query, rotation_signs
from onebox.kernels.attention.pages import num_stages, page_constants, page_tensors
from onebox.kernels.attention.softmax import attend_tokens
from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.launch import ceil_div
from onebox.kernels.common.target import has_large_shared_memory

__all__ = ["paged_attention_prefill"]


@triton.jit(do_not_specialize=["page_table_ptr", "start_ptr", "cu_rows_ptr", "table_stride"])
def paged_attention_prefill_kernel(
    query_ptr,  # [T, Q, D], Hadamard-rotated if the keys are, in the planes of the keys
    out_ptr,  # [T, Q, D], Hadamard-rotated if the values are, in the planes of the values
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
    # Tiles are aligned to absolute positions: a row has the same place in its tile wherever the prompt was split.
    tile_start = (start // QUERY_TILE + tl.program_id(0)) * QUERY_TILE
    if tile_start < stop:
        positions = tile_start + tl.arange(0, QUERY_TILE)
        inside = (positions >= start) & (positions < stop)
        visible = tl.where(inside, positions + 1, 0)
        row_head = (first_row + positions - start).to(tl.int64) * Q + query_head
        end = tl.minimum(tile_start + QUERY_TILE, stop)
        table_ptr = page_table_ptr + sequence * table_stride
        _, total, mixed_low, mixed_high = attend_tokens(
            query_ptr,
            row_head,
            inside,
            visible,
            tl.full([], 0, tl.int32),
            end,
            table_ptr,
            None,
            query_head // (Q // KV),
            (key_codes_ptr, key_scale_ptr, key_levels_ptr, key_table_ptr),
            (value_codes_ptr, value_scale_ptr, value_levels_ptr, value_table_ptr),
            scale,
            KV,
            P,
            D,
            KEY_BITS,
            VALUE_BITS,
            TILE,
        )
        share = 1.0 / tl.where(total > 0, total, 1.0)
        at = out_ptr + row_head[:, None] * D + tl.arange(0, D // 2)[None, :]
        mixed_low = rounded(mixed_low * share[:, None], out_ptr.dtype.element_ty)
        mixed_high = rounded(mixed_high * share[:, None], out_ptr.dtype.element_ty)
        tl.store(at, mixed_low, mask=inside[:, None])
        tl.store(at + D // 2, mixed_high, mask=inside[:, None])


def paged_attention_prefill(query, pages, page_table, start, cu_rows, scale):
    num_tokens, num_heads, dim = query.shape
    signs = rotation_signs(pages.format.value_bits, dim, query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    mixed = out if signs is None else query.new_empty(query.shape, dtype=torch.float32)
    shape = _prefill_shape(query, pages)
    num_tiles = ceil_div(num_tokens, shape["QUERY_TILE"]) + 1  # one more if the first position is inside a tile
    paged_attention_prefill_kernel[(num_tiles, num_heads, page_table.shape[0])](
        rotated_query(query, pages),
        mixed,
        page_table,
        start,
        cu_rows,
        *page_tensors(pages, dim),
        scale * math.log2(math.e),
        page_table.stride(0),
        Q=num_heads,
        **page_constants(pages, dim),
        **shape,
        num_warps=8,
    )
    if signs is not None:
        rotate(mixed, out, signs, pages.format.value_bits, is_inverse=True)
    return out


def _prefill_shape(query: Tensor, pages: KVPages) -> dict[str, int]:
    """Query positions per prefill program, tokens it loads at a time and pipeline stages.

    Depends on the GPU, the format and the dtype, never on the prompt: otherwise the result's bits would depend on it.
    """
    is_fp8 = FP8_BITS in (pages.format.key_bits, pages.format.value_bits)
    is_small = query.dtype == torch.float32 or is_fp8 or pages.page_tokens % 64 != 0
    if not is_small and has_large_shared_memory():
        return {"QUERY_TILE": 128, "TILE": 64, "num_stages": 2}
    return {"QUERY_TILE": 64, "TILE": PAGE_MULTIPLE, "num_stages": num_stages(query, 2)}
