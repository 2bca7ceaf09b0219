"""A block drafter's rows in Triton: one launch after the step's sampling, one before the drafter's pass."""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.launch import next_power_of_2
from onebox.kernels.step.reference import MAX_TOP_K
from onebox.kernels.step.tensors import ANCHOR_WORDS, BlockRows, DraftLimits

__all__ = ["block_anchors", "block_rows"]


# Not specialised: how tensors are aligned depends on the numbers of rows and of sequences.
@triton.jit(
    do_not_specialize=[
        *("token_ids_ptr", "places_ptr", "positions_ptr", "num_accepted_ptr", "temperature_ptr", "top_k_ptr"),
        *("top_p_ptr", "min_p_ptr", "seeds_ptr", "num_rows"),
    ]
)
def block_anchors_kernel(
    anchors_ptr,  # int64 [B, WORDS]
    token_ids_ptr,  # int64 [R], and so the next two
    places_ptr,
    positions_ptr,
    cu_rows_ptr,  # int32 [S + 1]
    num_accepted_ptr,  # int64 [S]
    slots_ptr,  # int32 [S]
    temperature_ptr,  # int64 [R]: the bits of a float64; so are top_p and min_p
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    order_ptr,  # int32 [B]
    num_rows,
    MAX_TOP_K: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program i: a block."""
    block = tl.program_id(0)
    sequence = tl.load(order_ptr + block)
    first = tl.load(cu_rows_ptr + sequence).to(tl.int64)
    last = first + tl.load(num_accepted_ptr + sequence) - 1
    last = tl.minimum(tl.maximum(last, 0), num_rows.to(tl.int64) - 1)
    top_k = tl.load(top_k_ptr + last)
    at = anchors_ptr + block * WORDS
    tl.store(at, tl.load(token_ids_ptr + last))
    tl.store(at + 1, tl.load(places_ptr + last) + 1)
    tl.store(at + 2, tl.load(positions_ptr + last) + 1)
    tl.store(at + 3, tl.load(slots_ptr + sequence).to(tl.int64))
    tl.store(at + 4, sequence.to(tl.int64))
    tl.store(at + 5, tl.load(temperature_ptr + last))
    tl.store(at + 6, tl.minimum(tl.where(top_k > 0, top_k, MAX_TOP_K), MAX_TOP_K))
    tl.store(at + 7, tl.load(top_p_ptr + last))
    tl.store(at + 8, tl.load(min_p_ptr + last))
    tl.store(at + 9, tl.load(seeds_ptr + last))


def block_anchors(anchors, rows, limits, order):
    temperature, top_k, top_p, min_p, seeds = limits
    bits = (part.view(torch.int64) for part in (temperature, top_p, min_p))
    temperature, top_p, min_p = bits
    if len(order):
        block_anchors_kernel[(len(order),)](
            anchors,
            *rows,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            order,
            len(rows.token_ids),
            MAX_TOP_K=MAX_TOP_K,
            WORDS=ANCHOR_WORDS,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["num_blocks", "depth", "stride"])
def block_rows_kernel(
    anchors_ptr,  # int64 [B, WORDS]
    rows_ptr,  # int64 [2, B * (1 + depth)]: token ids, positions
    narrow_ptr,  # int32 [3, B], row stride `stride`: length, slots, sequences
    drafts_ptr,  # int64 [6, B * depth]: places, temperature, top_k, top_p, min_p, seeds
    num_blocks,
    depth,
    stride,
    mask_token_id,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least 1 + depth
):
    """Program i: a block."""
    block = tl.program_id(0)
    at = anchors_ptr + block * WORDS
    place = tl.load(at + 1)
    row = tl.arange(0, BLOCK)
    first, count = block * (1 + depth), num_blocks * (1 + depth)
    inside = row <= depth
    tl.store(rows_ptr + first + row, tl.where(row == 0, tl.load(at), mask_token_id), mask=inside)
    tl.store(rows_ptr + count + first + row, tl.load(at + 2) + row, mask=inside)
    tl.store(narrow_ptr + block, place.to(tl.int32))
    tl.store(narrow_ptr + stride + block, tl.load(at + 3).to(tl.int32))
    tl.store(narrow_ptr + 2 * stride + block, tl.load(at + 4).to(tl.int32))
    drafts_ptr += block * depth + row
    is_draft = row < depth
    tl.store(drafts_ptr, place + 1 + row, mask=is_draft)
    for field in tl.static_range(5):
        tl.store(drafts_ptr + (1 + field) * num_blocks * depth, tl.load(at + 5 + field), mask=is_draft)


def block_rows(anchors, depth, mask_token_id):
    count = len(anchors)
    rows = torch.empty((2, count * (1 + depth)), dtype=torch.int64, device=anchors.device)
    narrow = torch.empty((3, -(-count // 4) * 4), dtype=torch.int32, device=anchors.device)
    drafts = torch.empty((6, count * depth), dtype=torch.int64, device=anchors.device)
    if count:
        block_rows_kernel[(count,)](
            anchors,
            rows,
            narrow,
            drafts,
            count,
            depth,
            narrow.stride(0),
            mask_token_id,
            WORDS=ANCHOR_WORDS,
            BLOCK=next_power_of_2(1 + depth),
            num_warps=1,
        )
    places, temperature, top_k, top_p, min_p, seeds = drafts
    temperature, top_p, min_p = (part.view(torch.float64) for part in (temperature, top_p, min_p))
    limits = DraftLimits(temperature, top_k, top_p, min_p, seeds)
    token_ids, positions = rows
    length, slots, sequences = narrow[:, :count]
    return BlockRows(token_ids, positions, length, slots, sequences, places, limits)
