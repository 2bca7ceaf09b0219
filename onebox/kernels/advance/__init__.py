"""The inputs of a decode step made of those of the step before and of what it decided, without asking the host."""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["advance"]


def advance(
    token_ids: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    keep: Tensor,
    seen: Tensor,
    cu_rows: Tensor,
    page_table: Tensor,
    drawn: Tensor,
    num_kept: Tensor,
    drafts: Tensor,
    page_tokens: int,
) -> None:
    """Moves each sequence on by the rows it kept, in place in the first five; it has as many rows as before.

    token_ids, positions and kv_slots int64 [R], keep and seen int32 [S]: as a step takes them. cu_rows int32 [S + 1]
    and page_table int32 [S, pages] stay. drawn int64 [R]: the token after each row; num_kept int64 [S], 0 for a
    sequence without rows; drafts int64 [S, depth], of which a sequence takes one for each of its rows but the first, so
    its rows are at most 1 + depth. A slot beyond the page table is -1. Rows of no sequence are left alone.
    """
    implementation(__name__, token_ids).advance(
        token_ids, positions, kv_slots, keep, seen, cu_rows, page_table, drawn, num_kept, drafts, page_tokens
    )
