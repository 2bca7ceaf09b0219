"""The twins of a step's bookkeeping. On a host a few numbers are quicker as lists than as tensors."""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.kernels.step.tensors import BlockRows, ChainRows, DraftLimits, FollowingRows, LastRows, StepTensors

__all__ = [
    "MAX_TOP_K",
    "block_anchors",
    "block_rows",
    "chain_rows",
    "embed",
    "following_rows",
    "next_inputs",
    "slot_mapping",
    "verify_drafts",
]

MAX_TOP_K = 64
"""Drafts are sampled from so many tokens at most."""

_COMPARE, _ACCEPT = 0, 1


def embed(token_ids: Tensor, embedding: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens' rows of embedding [V, H], in `dtype`: [R, H] for token_ids int64 [R]."""
    return F.embedding(token_ids, embedding).to(dtype)


def slot_mapping(page_table: Tensor, sequences: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
    """int64 [T]: the KV slots of the tokens at `positions` of `sequences`, both int64 [T].

    page_table int32 [S, pages]. The slot is -1 for a token of no sequence (S or more), or beyond the table.
    """
    num_sequences, num_pages = page_table.shape
    has_slot = (sequences < num_sequences) & (positions < num_pages * page_tokens)
    pages = page_table[sequences.clamp(max=num_sequences - 1), (positions // page_tokens).clamp(max=num_pages - 1)]
    return torch.where(has_slot, pages.to(torch.int64) * page_tokens + positions % page_tokens, -1)


def verify_drafts(verified: Tensor, sampled: Tensor, next_ids: Tensor, checks: Tensor, cu_rows: Tensor) -> None:
    """Writes into verified int64 [2R + S]: token_ids [R], num_accepted [S], is_finite [R], one after the other.

    sampled int64 [R]: the token sampled from each row, -1 where its logits were not finite. next_ids int64 [R]: the
    token known or drafted to follow the row. checks int64 [R]: 0, that token is right if it was sampled; 1, it is
    right; 2, it is wrong. A row's token_id is its next_id where that is right, else the sampled token, or 0 for -1.
    Accepted are, of the rows cu_rows[s] .. cu_rows[s + 1] - 1 of a sequence, at most 128, all up to and including the
    first one whose next token is wrong. cu_rows int32 [S + 1]; rows of no sequence come last and are written too.
    """
    rows = list(zip(sampled.tolist(), next_ids.tolist(), checks.tolist(), strict=True))
    is_right = [check == _ACCEPT or (check == _COMPARE and token == known >= 0) for token, known, check in rows]
    token_ids = [known if right else max(token, 0) for (token, known, _), right in zip(rows, is_right, strict=True)]
    num_accepted = []
    for first, end in pairwise(cu_rows.tolist()):
        wrong = [row for row in range(first, end) if not is_right[row]]
        num_accepted.append(wrong[0] - first + 1 if wrong else end - first)
    is_finite = [int(token >= 0) for token, _, _ in rows]
    verified.copy_(torch.tensor([*token_ids, *num_accepted, *is_finite], dtype=torch.int64))


def next_inputs(
    step: StepTensors,
    cu_rows: Tensor,
    page_table: Tensor,
    token_ids: Tensor,
    num_accepted: Tensor,
    drafts: Tensor,
    page_tokens: int,
) -> None:
    """Moves each sequence on by its accepted rows, in place in `step`; it has as many rows as before.

    cu_rows int32 [S + 1] and page_table int32 [S, pages] stay. token_ids int64 [R] and num_accepted int64 [S], 0 for a
    sequence without rows: the results of `verify_drafts`. drafts int64 [S, depth], of which a sequence takes one for
    each of its rows but the first. A slot beyond the page table is -1. Rows of no sequence are left alone, and so is a
    sequence of more than 1 + depth rows: its next ones cannot be foretold.
    """
    for sequence, (first, end) in enumerate(pairwise(cu_rows.tolist())):
        if not 0 < end - first <= 1 + drafts.shape[1]:
            continue
        accepted = int(num_accepted[sequence])
        start = int(step.seen[sequence]) - (end - first) + accepted
        places = torch.arange(start, start + end - first, device=token_ids.device)
        has_slot = places < page_table.shape[1] * page_tokens
        pages = page_table[sequence, (places // page_tokens).clamp(max=page_table.shape[1] - 1)].to(torch.int64)
        step.token_ids[first] = token_ids[first + accepted - 1]
        step.token_ids[first + 1 : end] = drafts[sequence, : end - first - 1]
        step.positions[first:end] += accepted
        step.slot_mapping[first:end] = torch.where(has_slot, pages * page_tokens + places % page_tokens, -1)
        step.num_accepted[sequence] = accepted
        step.seen[sequence] += accepted


def following_rows(
    page_table: Tensor, row_sequence: Tensor, places: Tensor, positions: Tensor, seen: Tensor, page_tokens: int
) -> FollowingRows:
    """A step's rows one token later; the arguments are those of its rows now, and row_sequence int64 [R] as in
    `slot_mapping`.
    """
    following = places + 1
    slots = slot_mapping(page_table, row_sequence, following, page_tokens)
    return FollowingRows(following, positions + 1, slots, seen + 1)


def chain_rows(
    mixed: Tensor,
    following: FollowingRows,
    limits: DraftLimits,
    cu_rows: Tensor,
    num_accepted: Tensor,
    page_table: Tensor,
    depth: int,
    page_tokens: int,
) -> ChainRows:
    """`depth` drafts after each sequence's last accepted row, from the head's output for all rows, mixed [R, H].

    `following` has the rows' following tokens, `limits` how each row's token is sampled [R]; cu_rows int32 [S + 1],
    num_accepted int64 [S]. top_k is cut to 64, and 64 stands for 0: a wider choice costs more than it gains.
    """
    last = (cu_rows[:-1] + num_accepted - 1).clamp(0, len(mixed) - 1)
    drafts = torch.arange(1, depth + 1, device=last.device).unsqueeze(1)
    places = following.places[last] + drafts
    sequences = torch.arange(len(last), device=last.device).repeat(depth)
    slots = slot_mapping(page_table, sequences, places.flatten(), page_tokens)
    chosen = DraftLimits(*(limit[last] for limit in limits))
    top_k = torch.where(chosen.top_k > 0, chosen.top_k, MAX_TOP_K).clamp(max=MAX_TOP_K)
    return ChainRows(
        mixed[last],
        places,
        places + (following.positions - following.places)[last],
        slots.view(places.shape),
        (places + 1).to(torch.int32),
        torch.arange(len(last) + 1, dtype=torch.int32, device=last.device),
        chosen._replace(top_k=top_k),
    )


def block_anchors(anchors: Tensor, rows: LastRows, limits: DraftLimits, order: Tensor) -> None:
    """Writes where the next blocks of B sequences begin; the i-th is sequence order[i] of the step (int32 [B]).

    anchors int64 [B, 10]: the token after the sequence's last accepted row, its place, its position, the slot, the
    sequence, then temperature, top_k, top_p, min_p and seed of the row (`limits`, [R] each; floats as their bits).
    top_k is cut to 64, and 64 stands for 0, as in `chain_rows`.
    """
    which = order.to(torch.int64)
    last = (rows.cu_rows[which] + rows.num_accepted[which] - 1).clamp(0, len(rows.token_ids) - 1)
    top_k = torch.where(limits.top_k > 0, limits.top_k, MAX_TOP_K).clamp(max=MAX_TOP_K)
    fields = (
        rows.token_ids[last],
        rows.places[last] + 1,
        rows.positions[last] + 1,
        rows.slots[which].to(torch.int64),
        which,
        limits.temperature[last].view(torch.int64),
        top_k[last],
        limits.top_p[last].view(torch.int64),
        limits.min_p[last].view(torch.int64),
        limits.seeds[last],
    )
    anchors.copy_(torch.stack(fields, dim=1))


def block_rows(anchors: Tensor, depth: int, mask_token_id: int) -> BlockRows:
    """The rows of blocks of 1 + depth rows, from anchors int64 [B, 10] of `block_anchors`."""
    token, place, position, slot, sequence, *limits = anchors.unbind(1)
    count = torch.arange(1 + depth, device=anchors.device)
    token_ids = torch.full((len(anchors), 1 + depth), mask_token_id, device=anchors.device)
    token_ids[:, 0] = token
    temperature, top_k, top_p, min_p, seeds = (field.repeat_interleave(depth) for field in limits)
    floats = (field.view(torch.float64) for field in (temperature, top_p, min_p))
    temperature, top_p, min_p = floats
    return BlockRows(
        token_ids.flatten(),
        (position.unsqueeze(1) + count).flatten(),
        place.to(torch.int32),
        slot.to(torch.int32),
        sequence.to(torch.int32),
        (place.unsqueeze(1) + count[1:]).flatten(),
        DraftLimits(temperature, top_k, top_p, min_p, seeds),
    )
