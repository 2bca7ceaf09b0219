"""Paged attention of a decode step in Triton: packed pages are read as they are, the softmax is float32.

A sequence's tokens are cut into pieces (`pieces.py`), one program per piece, and a second kernel adds the pieces in
order. A program computes a tile of BLOCK_M rows, all query heads of a KV head times a few rows. The tile has the same
size for one row and for sixteen, because another tile shape could sum in another order. Masked positions have a softmax
weight of exactly zero and do not enter the maximum, so tokens past a row's end do not change it. Sizes and tables that
vary between calls are arguments that Triton does not specialise on: calls of one shape share machine code.

Packed codes are decoded in the registers of the tensor cores' operands (`planes.py`). A tile's page number is loaded
one tile ahead, so that prefetching a tile never waits for it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import FP8_BITS, PAGE_MULTIPLE, KVPages
from onebox.kernels.attention.gate import attention_gate_fused
from onebox.kernels.attention.hadamard import hadamard, rotated_query, rotation_constants, rotation_signs
from onebox.kernels.attention.pages import num_stages, page_constants, page_tensors
from onebox.kernels.attention.pieces import count_pieces, piece_bounds
from onebox.kernels.attention.planes import join_planes, load_query, load_tables, num_planes
from onebox.kernels.attention.reference import MAX_ROWS
from onebox.kernels.attention.softmax import attend_tokens, begin, finish, operand_dtype
from onebox.kernels.common.arithmetic import loop_bound, rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_groups
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import MODES, Tunable
from onebox.spec.pieces import doublings, piece_count

__all__ = ["paged_attention", "paged_attention_fused"]

_PIECE, _COMBINE = Tunable("attention_piece"), Tunable("attention_combine")
_PACKED = Tunable("attention_packed", (*MODES, *({"maxnreg": count} for count in (160, 168, 184, 200, 255))))
"""Over packed pages: 65,536 registers hold five programs of 64 threads with 200, six with 168, four with 255."""

_MOST_REGISTERS = 200  # of a thread over packed pages
_GROUP = 128  # columns of a fixed-point group


@triton.jit(
    do_not_specialize=["page_table_ptr", "context_ptr", "cu_rows_ptr", "num_pieces", "table_stride", "num_groups"]
)
def paged_attention_piece_kernel(
    query_ptr,  # [R, Q, D], Hadamard-rotated if the keys are
    partial_ptr,  # float32 [R, pieces, Q, D]: a piece's weighted sum of values, Hadamard-rotated if they are
    best_ptr,  # float32 [R, pieces, Q]: its largest score
    total_ptr,  # float32 [R, pieces, Q]: its sum of softmax weights
    page_table_ptr,  # int32 [S, pages], stride table_stride
    context_ptr,  # int32 [S]
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
    num_pieces,
    table_stride,
    num_groups,  # tiles needed to cover a sequence's rows
    Q: tl.constexpr,
    KV: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,  # how often the piece length doubles
    ROWS: tl.constexpr,  # rows in a tile
    TILE: tl.constexpr,  # tokens loaded at a time, all in one page
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,  # of a program
    DEPENDENT: tl.constexpr,
):
    GROUP_HEADS: tl.constexpr = Q // KV
    release(DEPENDENT)
    # Tiles that read the same keys have adjacent program ids: all but the first find them in L2.
    first_of_tile = (tl.program_id(0) % num_groups) * ROWS
    head = tl.program_id(0) // num_groups
    piece = num_pieces - 1 - tl.program_id(1)  # the longest ones start first
    sequence = tl.program_id(2).to(tl.int64)
    first_row = tl.load(cu_rows_ptr + sequence)
    num_rows = tl.load(cu_rows_ptr + sequence + 1) - first_row
    first_sees = tl.load(context_ptr + sequence) - num_rows + 1  # tokens visible to the sequence's first row
    start, end = piece_bounds(piece, DOUBLINGS)
    end = tl.minimum(end, first_sees + tl.minimum(first_of_tile + ROWS, num_rows) - 1)
    is_used = (first_of_tile < num_rows) & (start < end)
    table_ptr = page_table_ptr + sequence * table_stride
    page = tl.load(table_ptr + start // P, mask=is_used, other=0)
    # Everything read before this wait is an input of the step, complete before the step began.
    wait(DEPENDENT)
    if is_used:
        index = tl.arange(0, BLOCK_M)
        row = first_of_tile + index // GROUP_HEADS
        inside = (index < ROWS * GROUP_HEADS) & (row < num_rows)
        visible = tl.where(inside, first_sees + row, 0)
        row_head = (first_row + row).to(tl.int64) * Q + head * GROUP_HEADS + index % GROUP_HEADS
        query_dtype: tl.constexpr = query_ptr.dtype.element_ty
        KEY_DTYPE: tl.constexpr = operand_dtype(query_dtype, key_codes_ptr.dtype.element_ty, KEY_BITS, True)
        query = load_query(query_ptr, row_head, inside, D, KEY_BITS, KEY_DTYPE, True)
        key_table, value_table = load_tables(key_table_ptr, value_table_ptr, KEY_BITS, VALUE_BITS)
        best, total, mixed = attend_tokens(
            query,
            visible,
            begin(BLOCK_M, D, num_planes(D, VALUE_BITS)),
            start,
            end,
            table_ptr,
            page,
            head,
            (key_codes_ptr, key_scale_ptr, key_levels_ptr, key_table),
            (value_codes_ptr, value_scale_ptr, value_levels_ptr, value_table),
            scale,
            KV,
            P,
            D,
            KEY_BITS,
            VALUE_BITS,
            operand_dtype(query_dtype, value_codes_ptr.dtype.element_ty, VALUE_BITS, False),
            TILE,
            WARPS,
            True,
        )
        cell = ((first_row + row).to(tl.int64) * num_pieces + piece) * Q + head * GROUP_HEADS + index % GROUP_HEADS
        tl.store(best_ptr + cell, best, mask=inside)
        tl.store(total_ptr + cell, total, mask=inside)
        mixed = join_planes(finish(mixed, tl.full([BLOCK_M], 1.0, tl.float32), VALUE_BITS), D, VALUE_BITS, WARPS)
        tl.store(partial_ptr + cell[:, None] * D + tl.arange(0, D)[None, :], mixed, mask=inside[:, None])


@triton.jit(do_not_specialize=["context_ptr", "cu_rows_ptr", "num_sequences", "num_pieces"])
def paged_attention_combine_kernel(
    out_ptr,  # [R, Q, D]
    partial_ptr,
    best_ptr,
    total_ptr,
    context_ptr,
    cu_rows_ptr,
    signs_ptr,  # float32 [D], if values are Hadamard-rotated
    qkv_ptr,  # float32 [PARTS, R, ...], strides part_stride and row_stride: a head's query, then its gate
    planes_ptr,  # int8 [R, 2, Q * D]; this and the next in the layout of `store_groups`
    scale_ptr,  # float32 [R, Q * D / 128]
    part_stride,
    row_stride,
    num_sequences,
    num_pieces,
    Q: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INVERSE_ROOT: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,  # how often the piece length doubles
    COLUMNS: tl.constexpr,  # coordinates per program: D if values are Hadamard-rotated
    CHUNK: tl.constexpr,  # pieces, or sequences, loaded at a time
    PARTS: tl.constexpr,  # 0 if the output is not gated
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.full([], 0, tl.int32)  # number of sequences that end before the row
    for first in range(0, loop_bound(num_sequences), CHUNK):
        number = first + tl.arange(0, CHUNK)
        ends = tl.load(cu_rows_ptr + 1 + number, mask=number < num_sequences, other=2147483647)
        sequence += tl.sum((ends <= row).to(tl.int32), 0)
    is_owned = sequence < num_sequences
    last_row = tl.load(cu_rows_ptr + sequence + 1, mask=is_owned, other=0) - 1
    context = tl.load(context_ptr + sequence, mask=is_owned, other=0)
    count = tl.where(is_owned, count_pieces(context - (last_row - row), DOUBLINGS), 0)
    first_cell = row.to(tl.int64) * num_pieces * Q + head
    # Everything read before this wait is an input of the step, complete before the step began.
    wait(DEPENDENT)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_rotated: tl.constexpr = VALUE_BITS < 8
    if PARTS > 0:
        gate_at = row.to(tl.int64) * row_stride + head * (2 * D) + D + columns
        gate = sum_parts(qkv_ptr, part_stride, gate_at, True, PARTS)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, loop_bound(count), CHUNK):
        piece = first + tl.arange(0, CHUNK)
        inside = piece < count
        cell = first_cell + piece * Q
        bests = tl.load(best_ptr + cell, mask=inside, other=float("-inf"))
        totals = tl.load(total_ptr + cell, mask=inside, other=0.0)
        parts = tl.load(partial_ptr + cell[:, None] * D + columns[None, :], mask=inside[:, None], other=0.0)
        new_best = tl.maximum(best, tl.max(bests, 0))
        fade = tl.exp2(best - new_best)
        weight = tl.exp2(bests - new_best)
        total = total * fade + tl.sum(weight * totals, 0)
        mixed = mixed * fade + tl.sum(weight[:, None] * parts, 0)
        best = new_best
    mixed = mixed / tl.where(count > 0, total, 1.0)
    if is_rotated:
        mixed = hadamard(mixed, D, LOG_D, INVERSE_ROOT) * tl.load(signs_ptr + columns)
    attended = rounded(mixed, out_ptr.dtype.element_ty)
    if PARTS > 0:
        values = attended.to(tl.float32) * tl.sigmoid(gate)
        store_groups(
            values,
            columns - tl.program_id(2) * COLUMNS,
            row.to(tl.int64),
            head * (D // 128) + tl.program_id(2) * (COLUMNS // 128),
            out_ptr,
            planes_ptr,
            scale_ptr,
            Q * D,
        )
    else:
        tl.store(out_ptr + (row.to(tl.int64) * Q + head) * D + columns, attended)


def paged_attention(query, pages, page_table, context, cu_rows, scale, max_rows=MAX_ROWS):
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    pieces = _attend_pieces(query, pages, page_table, context, cu_rows, scale, max_rows)
    _combine(pieces, pages, context, cu_rows, (out, None, None), None)
    return out


def paged_attention_fused(query, pages, page_table, context, cu_rows, scale, qkv_parts, max_rows=MAX_ROWS):
    num_rows, num_heads, dim = query.shape
    if dim % _GROUP:
        mixed = paged_attention(query, pages, page_table, context, cu_rows, scale, max_rows)
        return attention_gate_fused(mixed, qkv_parts)
    rows = new_rows(num_rows, num_heads * dim, query.dtype, query.device)
    pieces = _attend_pieces(query, pages, page_table, context, cu_rows, scale, max_rows)
    _combine(pieces, pages, context, cu_rows, rows, qkv_parts)
    return FixedRows(*rows, None)


def _attend_pieces(
    query: Tensor,
    pages: KVPages,
    page_table: Tensor,
    context: Tensor,
    cu_rows: Tensor,
    scale: float,
    max_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """For each piece: weighted sum of values [R, pieces, Q, D], largest score and sum of weights [R, pieces, Q]."""
    (num_rows, num_heads, dim), num_sequences = query.shape, page_table.shape[0]
    num_pieces = piece_count(page_table.shape[1] * pages.page_tokens, doublings(pages.format))
    shape = _decode_shape(query, pages)
    num_groups = ceil_div(min(num_rows, max_rows), shape["ROWS"])
    partial = query.new_empty((num_rows, num_pieces, num_heads, dim), dtype=torch.float32)
    best, total = (query.new_empty((num_rows, num_pieces, num_heads), dtype=torch.float32) for _ in range(2))
    paged_attention_piece_kernel[(pages.kv_heads * num_groups, num_pieces, num_sequences)](
        rotated_query(query, pages),
        partial,
        best,
        total,
        page_table,
        context,
        cu_rows,
        *page_tensors(pages, dim),
        scale * math.log2(math.e),
        num_pieces,
        page_table.stride(0),
        num_groups,
        Q=num_heads,
        DOUBLINGS=doublings(pages.format),
        **page_constants(pages, dim),
        **shape,
        **_piece_options(num_heads, pages),
    )
    return partial, best, total


def _piece_options(num_heads: int, pages: KVPages) -> dict[str, int | bool]:
    bits = pages.format.key_bits, pages.format.value_bits
    if max(bits) > FP8_BITS:
        return launch_options(_PIECE, num_heads)
    return launch_options(_PACKED, f"{num_heads}_{bits[0]}_{bits[1]}", maxnreg=_MOST_REGISTERS)


def _combine(
    pieces: tuple[Tensor, Tensor, Tensor],
    pages: KVPages,
    context: Tensor,
    cu_rows: Tensor,
    out: tuple[Tensor, Tensor | None, Tensor | None],
    qkv_parts: Tensor | None,
) -> None:
    """Adds the pieces: as they are, or gated and as fixed-point rows for a linear."""
    num_rows, num_pieces, num_heads, dim = pieces[0].shape
    x, planes, scale = out
    signs = rotation_signs(pages.format.value_bits, dim, x.device)
    # The same width with and without the gate, so that both add in the same order.
    columns = _GROUP if signs is None and dim % _GROUP == 0 else dim
    paged_attention_combine_kernel[(num_rows, num_heads, dim // columns)](
        x,
        *pieces,
        context,
        cu_rows,
        signs,
        qkv_parts,
        planes,
        scale,
        0 if qkv_parts is None else qkv_parts.stride(0),
        0 if qkv_parts is None else qkv_parts.stride(1),
        len(context),
        num_pieces,
        Q=num_heads,
        **rotation_constants(dim),
        VALUE_BITS=pages.format.value_bits,
        DOUBLINGS=doublings(pages.format),
        COLUMNS=columns,
        CHUNK=64,
        PARTS=0 if qkv_parts is None else len(qkv_parts),
        num_warps=4 if signs is None else 8,
        **launch_options(_COMBINE, num_heads),
    )


def _decode_shape(query: Tensor, pages: KVPages) -> dict[str, int]:
    """Query heads x rows per decode program, tokens it loads at a time, and its compile options.

    Depends on the format and the dtype only, as in `_prefill_shape`. Where a token is 1 KB, loads dominate: as many
    rows as fit share them, and two tiles of 32 KB are in flight. Packed codes are few bytes to load and many
    instructions to decode: programs are small, so that many of them, each in a different phase, keep a multiprocessor
    busy.
    """
    heads = query.shape[1] // pages.kv_heads
    is_packed = max(pages.format.key_bits, pages.format.value_bits) <= FP8_BITS
    block, num_warps = (16, 2) if is_packed else (32, 4)
    shape = {"ROWS": max(1, block // heads), "BLOCK_M": max(block, next_power_of_2(heads)), "WARPS": num_warps}
    return {**shape, "TILE": PAGE_MULTIPLE, "num_warps": num_warps, "num_stages": num_stages(query, 3)}
