"""The bookkeeping of a step in Triton: one launch each, a program a sequence or a block of tokens."""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.launch import ceil_div, next_power_of_2

__all__ = ["next_inputs", "slot_mapping", "verify_drafts"]

_BLOCK = 64
_MAX_ROWS = 128
"""The most rows of a sequence, or of none, in a step."""


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_pages", "table_stride"])
def slot_mapping_kernel(
    page_table_ptr,  # int32 [S, num_pages]
    sequences_ptr,  # int64 [T], and so the next two
    positions_ptr,
    slots_ptr,
    num_tokens,
    num_sequences,
    num_pages,
    table_stride,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    sequence = tl.load(sequences_ptr + token, mask=inside, other=0)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    has_slot = (sequence < num_sequences) & (position < num_pages.to(tl.int64) * P)
    at = page_table_ptr + sequence * table_stride + position // P
    page = tl.load(at, mask=inside & has_slot, other=0).to(tl.int64)
    tl.store(slots_ptr + token, tl.where(has_slot, page * P + position % P, -1), mask=inside)


def slot_mapping(page_table, sequences, positions, page_tokens):
    slots = torch.empty_like(positions)
    if len(slots):
        slot_mapping_kernel[(ceil_div(len(slots), _BLOCK),)](
            page_table,
            sequences,
            positions,
            slots,
            len(slots),
            *page_table.shape,
            page_table.stride(0),
            P=page_tokens,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return slots


@triton.jit(do_not_specialize=["sampled_ptr", "next_ids_ptr", "checks_ptr", "R", "S"])
def verify_drafts_kernel(
    verified_ptr,  # int64 [2 R + S]: token_ids, num_accepted, is_finite
    sampled_ptr,  # int64 [R], and so the next two
    next_ids_ptr,
    checks_ptr,
    cu_rows_ptr,  # int32 [S + 1]
    R,
    S,
    BLOCK: tl.constexpr,
):
    """Program s: a sequence; the last program: the rows of no sequence."""
    sequence = tl.program_id(0)
    first = tl.load(cu_rows_ptr + sequence)
    end = tl.load(cu_rows_ptr + sequence + 1, mask=sequence < S, other=0)
    num_rows = tl.where(sequence < S, end, R) - first
    place = tl.arange(0, BLOCK)
    inside = place < num_rows
    sampled = tl.load(sampled_ptr + first + place, mask=inside, other=0)
    known = tl.load(next_ids_ptr + first + place, mask=inside, other=0)
    check = tl.load(checks_ptr + first + place, mask=inside, other=0)
    is_right = (check == 1) | ((check == 0) & (sampled == known) & (sampled >= 0))
    tl.store(verified_ptr + first + place, tl.where(is_right, known, tl.maximum(sampled, 0)), mask=inside)
    tl.store(verified_ptr + R + S + first + place, (sampled >= 0).to(tl.int64), mask=inside)
    first_wrong = tl.min(tl.where(inside & ~is_right, place, BLOCK), 0)
    tl.store(verified_ptr + R + sequence, tl.minimum(first_wrong + 1, num_rows).to(tl.int64), mask=sequence < S)


def verify_drafts(verified, sampled, next_ids, checks, cu_rows):
    num_sequences = len(cu_rows) - 1
    verify_drafts_kernel[(num_sequences + 1,)](
        verified, sampled, next_ids, checks, cu_rows, len(sampled), num_sequences, BLOCK=_MAX_ROWS, num_warps=1
    )


@triton.jit(
    do_not_specialize=[
        *("step_token_ids_ptr", "positions_ptr", "slot_mapping_ptr", "token_ids_ptr", "num_accepted_ptr", "drafts_ptr"),
        *("num_pages", "table_stride", "depth"),
    ]
)
def next_inputs_kernel(
    step_token_ids_ptr,  # int64 [R], and so the next two; the first five are written in place
    positions_ptr,
    slot_mapping_ptr,
    step_num_accepted_ptr,  # int32 [S]
    seen_ptr,  # int32 [S]
    cu_rows_ptr,  # int32 [S + 1]
    page_table_ptr,  # int32 [S, num_pages]
    token_ids_ptr,  # int64 [R]
    num_accepted_ptr,  # int64 [S]
    drafts_ptr,  # int64 [S, depth]
    num_pages,
    table_stride,
    depth,
    P: tl.constexpr,
    BLOCK: tl.constexpr,  # at least a sequence's rows
):
    """Program s: a sequence."""
    sequence = tl.program_id(0)
    first = tl.load(cu_rows_ptr + sequence)
    num_rows = tl.load(cu_rows_ptr + sequence + 1) - first
    accepted = tl.load(num_accepted_ptr + sequence)
    seen = tl.load(seen_ptr + sequence)
    if (num_rows > 0) & (num_rows <= 1 + depth):
        place = tl.arange(0, BLOCK)
        inside = place < num_rows
        rows = first + place
        last = tl.load(token_ids_ptr + first + accepted - 1)
        draft = tl.load(drafts_ptr + sequence * depth + place - 1, mask=inside & (place > 0), other=0)
        tl.store(step_token_ids_ptr + rows, tl.where(place == 0, last, draft), mask=inside)
        position = tl.load(positions_ptr + rows, mask=inside, other=0)
        tl.store(positions_ptr + rows, position + accepted, mask=inside)
        at = seen - num_rows + accepted + place
        has_slot = at < num_pages.to(tl.int64) * P
        page = tl.load(page_table_ptr + sequence * table_stride + at // P, mask=inside & has_slot, other=0).to(tl.int64)
        tl.store(slot_mapping_ptr + rows, tl.where(has_slot, page * P + at % P, -1), mask=inside)
        tl.store(step_num_accepted_ptr + sequence, accepted.to(tl.int32))
        tl.store(seen_ptr + sequence, (seen + accepted).to(tl.int32))


def next_inputs(step, cu_rows, page_table, token_ids, num_accepted, drafts, page_tokens):
    num_sequences, num_pages = page_table.shape
    depth = drafts.shape[1]
    if num_sequences:
        next_inputs_kernel[(num_sequences,)](
            *step,
            cu_rows,
            page_table,
            token_ids,
            num_accepted,
            drafts,
            num_pages,
            page_table.stride(0),
            depth,
            P=page_tokens,
            BLOCK=next_power_of_2(1 + depth),
            num_warps=1,
        )
