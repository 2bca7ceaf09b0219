"""The twins of a step's bookkeeping. On a host a few numbers are quicker as lists than as tensors."""

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["next_inputs", "slot_mapping", "verify_drafts"]


def slot_mapping(page_table: Tensor, sequences: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
    """int64 [n]: the slots of the tokens at `positions` of `sequences`, both int64 [n], by page_table int32 [S, pages].

    -1 for a token of no sequence (S or more), or beyond the table.
    """
    num_sequences, num_pages = page_table.shape
    is_kept = (sequences < num_sequences) & (positions < num_pages * page_tokens)
    pages = page_table[sequences.clamp(max=num_sequences - 1), (positions // page_tokens).clamp(max=num_pages - 1)]
    return torch.where(is_kept, pages.to(torch.int64) * page_tokens + positions % page_tokens, -1)


_COMPARE, _ACCEPT = 0, 1


def verify_drafts(words: Tensor, drawn: Tensor, next_ids: Tensor, verdicts: Tensor, cu_rows: Tensor) -> None:
    """Writes into words int64 [2R + S]: the tokens [R], the rows kept [S], and whether a row's logits were numbers [R].

    drawn int64 [R]: the token that each row draws, -1 for a row without numbers. next_ids int64 [R]: the token known or
    drafted to follow it; verdicts int64 [R] say what becomes of that: 0, it is right if it was drawn; 1, it is right;
    2, it is wrong. A row whose next token is right has it as its token, any other the one drawn, 0 in place of -1. Of
    the rows cu_rows[s] .. cu_rows[s + 1] - 1, at most 64, those are kept that come before the first wrong one, and that
    one. cu_rows int32 [S + 1]; rows of no sequence come last and are written too.
    """
    rows = list(zip(drawn.tolist(), next_ids.tolist(), verdicts.tolist(), strict=True))
    is_right = [verdict == _ACCEPT or (verdict == _COMPARE and token == known >= 0) for token, known, verdict in rows]
    tokens = [known if right else max(token, 0) for (token, known, _), right in zip(rows, is_right, strict=True)]
    kept = []
    for first, end in pairwise(cu_rows.tolist()):
        wrong = [place for place in range(first, end) if not is_right[place]]
        kept.append(wrong[0] - first + 1 if wrong else end - first)
    words.copy_(torch.tensor([*tokens, *kept, *(int(token >= 0) for token, _, _ in rows)], dtype=torch.int64))


def next_inputs(
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    num_accepted: Tensor,
    seen: Tensor,
    cu_rows: Tensor,
    page_table: Tensor,
    drawn: Tensor,
    num_kept: Tensor,
    drafts: Tensor,
    page_tokens: int,
) -> None:
    """Moves each sequence on by the rows it kept, in place in the first five; it has as many rows as before.

    token_ids, positions and slot_mapping int64 [R], num_accepted and seen int32 [S]: as a step takes them. cu_rows
    int32 [S + 1] and page_table int32 [S, pages] stay. drawn int64 [R]: the token after each row; num_kept int64
    [S], 0 for a sequence without rows; drafts int64 [S, depth], of which a sequence takes one for each of its rows
    but the first, so its rows are at most 1 + depth. A slot beyond the page table is -1. Rows of no sequence are
    left alone.
    """
    edges = cu_rows.tolist()
    for sequence, (first, end) in enumerate(pairwise(edges)):
        if first == end:
            continue
        kept = int(num_kept[sequence])
        start = int(seen[sequence]) - (end - first) + kept
        places = torch.arange(start, start + end - first, device=token_ids.device)
        inside = places < page_table.shape[1] * page_tokens
        pages = page_table[sequence, (places // page_tokens).clamp(max=page_table.shape[1] - 1)].to(torch.int64)
        token_ids[first] = drawn[first + kept - 1]
        token_ids[first + 1 : end] = drafts[sequence, : end - first - 1]
        positions[first:end] += kept
        slot_mapping[first:end] = torch.where(inside, pages * page_tokens + places % page_tokens, -1)
        num_accepted[sequence] = kept
        seen[sequence] += kept
