"""The MTP head's rows in Triton: one launch for a step's following rows, one for the whole chain of drafts."""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.step.reference import MAX_TOP_K
from onebox.kernels.step.tensors import ChainRows, DraftLimits, FollowingRows

__all__ = ["chain_rows", "following_rows"]

_BLOCK = 64
_HIDDEN_BLOCK = 1024


@triton.jit
def _slots(page_table_ptr, sequence, place, is_there, num_sequences, num_pages, table_stride, P: tl.constexpr):
    """The KV slots of places in sequences, int64; -1 for a place of no sequence or beyond the table."""
    has_slot = (sequence < num_sequences) & (place < num_pages.to(tl.int64) * P)
    at = page_table_ptr + sequence * table_stride + place // P
    page = tl.load(at, mask=is_there & has_slot, other=0).to(tl.int64)
    return tl.where(has_slot, page * P + place % P, -1)


# Not specialised: how tensors are aligned and sizes divisible depends on the numbers of rows and of sequences.
@triton.jit(
    do_not_specialize=[
        *("row_sequence_ptr", "places_ptr", "positions_ptr", "seen_ptr", "out_ptr", "out_seen_ptr"),
        *("num_rows", "out_stride", "num_sequences", "num_pages", "table_stride"),
    ]
)
def following_rows_kernel(
    page_table_ptr,  # int32 [S, num_pages]
    row_sequence_ptr,  # int64 [R], and so the next two
    places_ptr,
    positions_ptr,
    seen_ptr,  # int32 [S]
    out_ptr,  # int64 [3, R], row stride out_stride: places, positions, slots
    out_seen_ptr,  # int32 [S]
    num_rows,
    out_stride,
    num_sequences,
    num_pages,
    table_stride,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs of BLOCK rows and as many sequences."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    sequence = tl.load(row_sequence_ptr + row, mask=inside, other=0)
    place = tl.load(places_ptr + row, mask=inside, other=0) + 1
    position = tl.load(positions_ptr + row, mask=inside, other=0) + 1
    seen = tl.load(seen_ptr + row, mask=row < num_sequences, other=0)
    tl.store(out_ptr + row, place, mask=inside)
    tl.store(out_ptr + out_stride + row, position, mask=inside)
    slots = _slots(page_table_ptr, sequence, place, inside, num_sequences, num_pages, table_stride, P)
    tl.store(out_ptr + 2 * out_stride + row, slots, mask=inside)
    tl.store(out_seen_ptr + row, seen + 1, mask=row < num_sequences)


def _aligned(count: int) -> int:
    """A row length with which every row starts at a multiple of 16 bytes, as kernels that read it were compiled for."""
    return ceil_div(count, 4) * 4


def following_rows(page_table, row_sequence, places, positions, seen, page_tokens):
    num_rows, (num_sequences, num_pages) = len(places), page_table.shape
    out = torch.empty((3, _aligned(num_rows)), dtype=torch.int64, device=places.device)
    out_seen = torch.empty_like(seen)
    following_rows_kernel[(max(1, ceil_div(max(num_rows, num_sequences), _BLOCK)),)](
        page_table,
        row_sequence,
        places,
        positions,
        seen,
        out,
        out_seen,
        num_rows,
        out.stride(0),
        num_sequences,
        num_pages,
        page_table.stride(0),
        P=page_tokens,
        BLOCK=_BLOCK,
        num_warps=2,
    )
    own_places, own_positions, slots = out[:, :num_rows]
    return FollowingRows(own_places, own_positions, slots, out_seen)


@triton.jit(
    do_not_specialize=[
        *("mixed_ptr", "places_ptr", "positions_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"),
        *("seeds_ptr", "num_accepted_ptr", "hidden_ptr", "rows_ptr", "seen_ptr", "out_cu_rows_ptr", "out_limits_ptr"),
        *("out_numbers_ptr", "num_rows", "chain_stride", "num_sequences", "num_pages", "table_stride", "depth"),
    ]
)
def chain_rows_kernel(
    mixed_ptr,  # [R, H]
    places_ptr,  # int64 [R], and so the next
    positions_ptr,
    temperature_ptr,  # float64 [R]
    top_k_ptr,  # int64 [R]
    top_p_ptr,  # float64 [R]
    min_p_ptr,  # float64 [R]
    seeds_ptr,  # int64 [R]
    cu_rows_ptr,  # int32 [S + 1]
    num_accepted_ptr,  # int64 [S]
    page_table_ptr,  # int32 [S, num_pages]
    hidden_ptr,  # [S, H]
    rows_ptr,  # int64 [3, depth, S], stride over depth chain_stride: places, positions, slots
    seen_ptr,  # int32 [depth, S], the same stride
    out_cu_rows_ptr,  # int32 [S + 1]
    out_limits_ptr,  # float64 [3, S]: temperature, top_p, min_p
    out_numbers_ptr,  # int64 [2, S]: top_k, seeds
    num_rows,
    chain_stride,
    num_sequences,
    num_pages,
    table_stride,
    depth,
    H: tl.constexpr,
    P: tl.constexpr,
    MAX_TOP_K: tl.constexpr,
    DEPTH: tl.constexpr,  # rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Program (block of hidden columns, sequence); the first block's also computes the sequence's numbers."""
    sequence = tl.program_id(1)
    last = tl.load(cu_rows_ptr + sequence) + tl.load(num_accepted_ptr + sequence) - 1
    last = tl.minimum(tl.maximum(last, 0), num_rows - 1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hidden = tl.load(mixed_ptr + last * H + columns, mask=columns < H, other=0.0)
    tl.store(hidden_ptr + sequence.to(tl.int64) * H + columns, hidden, mask=columns < H)
    if tl.program_id(0) == 0:
        before = tl.load(places_ptr + last)
        offset = tl.load(positions_ptr + last) - before
        draft = tl.arange(0, DEPTH)
        inside = draft < depth
        place = before + 1 + draft
        at = draft * chain_stride + sequence
        size = depth * chain_stride
        slots = _slots(page_table_ptr, sequence, place, inside, num_sequences, num_pages, table_stride, P)
        tl.store(rows_ptr + at, place, mask=inside)
        tl.store(rows_ptr + size + at, place + offset, mask=inside)
        tl.store(rows_ptr + 2 * size + at, slots, mask=inside)
        tl.store(seen_ptr + at, (place + 1).to(tl.int32), mask=inside)
        tl.store(out_cu_rows_ptr + sequence, sequence)
        tl.store(out_cu_rows_ptr + sequence + 1, sequence + 1, mask=sequence == num_sequences - 1)
        tl.store(out_limits_ptr + sequence, tl.load(temperature_ptr + last))
        tl.store(out_limits_ptr + num_sequences + sequence, tl.load(top_p_ptr + last))
        tl.store(out_limits_ptr + 2 * num_sequences + sequence, tl.load(min_p_ptr + last))
        top_k = tl.load(top_k_ptr + last)
        tl.store(out_numbers_ptr + sequence, tl.where(top_k > 0, tl.minimum(top_k, MAX_TOP_K), MAX_TOP_K))
        tl.store(out_numbers_ptr + num_sequences + sequence, tl.load(seeds_ptr + last))


def chain_rows(mixed, following, limits, cu_rows, num_accepted, page_table, depth, page_tokens):
    (num_rows, width), (num_sequences, num_pages) = mixed.shape, page_table.shape
    mixed, device = mixed.contiguous(), mixed.device
    hidden = torch.empty((num_sequences, width), dtype=mixed.dtype, device=device)
    stride = _aligned(num_sequences)
    rows = torch.empty((3, depth, stride), dtype=torch.int64, device=device)
    seen = torch.empty((depth, stride), dtype=torch.int32, device=device)
    own_rows = torch.empty(num_sequences + 1, dtype=torch.int32, device=device)
    kept = torch.empty((3, num_sequences), dtype=torch.float64, device=device)
    numbers = torch.empty((2, num_sequences), dtype=torch.int64, device=device)
    chain_rows_kernel[(ceil_div(width, _HIDDEN_BLOCK), num_sequences)](
        mixed,
        following.places,
        following.positions,
        *limits,
        cu_rows,
        num_accepted,
        page_table,
        hidden,
        rows,
        seen,
        own_rows,
        kept,
        numbers,
        num_rows,
        stride,
        num_sequences,
        num_pages,
        page_table.stride(0),
        depth,
        H=width,
        P=page_tokens,
        MAX_TOP_K=MAX_TOP_K,
        DEPTH=next_power_of_2(depth),
        BLOCK=_HIDDEN_BLOCK,
        num_warps=4,
    )
    (places, positions, slots), (temperature, top_p, min_p), (top_k, seeds) = rows[:, :, :num_sequences], kept, numbers
    chosen = DraftLimits(temperature, top_k, top_p, min_p, seeds)
    return ChainRows(hidden, places, positions, slots, seen[:, :num_sequences], own_rows, chosen)
