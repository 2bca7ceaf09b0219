"""The next step's inputs in Triton: one launch, a program a sequence."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["advance"]


@triton.jit(do_not_specialize=["num_pages", "depth"])
def advance_kernel(
    token_ids_ptr,  # int64 [R], and so the next two
    positions_ptr,
    kv_slots_ptr,
    keep_ptr,  # int32 [S]
    seen_ptr,  # int32 [S]
    cu_rows_ptr,  # int32 [S + 1]
    page_table_ptr,  # int32 [S, num_pages]
    drawn_ptr,  # int64 [R]
    num_kept_ptr,  # int64 [S]
    drafts_ptr,  # int64 [S, depth]
    num_pages,
    depth,
    P: tl.constexpr,
    BLOCK: tl.constexpr,  # at least a sequence's rows
):
    sequence = tl.program_id(0)
    first = tl.load(cu_rows_ptr + sequence)
    num_rows = tl.load(cu_rows_ptr + sequence + 1) - first
    kept = tl.load(num_kept_ptr + sequence)
    seen = tl.load(seen_ptr + sequence)
    if num_rows > 0:
        place = tl.arange(0, BLOCK)
        inside = place < num_rows
        rows = first + place
        last = tl.load(drawn_ptr + first + kept - 1)
        draft = tl.load(drafts_ptr + sequence * depth + place - 1, mask=inside & (place > 0), other=0)
        tl.store(token_ids_ptr + rows, tl.where(place == 0, last, draft), mask=inside)
        position = tl.load(positions_ptr + rows, mask=inside, other=0)
        tl.store(positions_ptr + rows, position + kept, mask=inside)
        at = seen - num_rows + kept + place
        has_page = at < num_pages.to(tl.int64) * P
        page = tl.load(page_table_ptr + sequence * num_pages + at // P, mask=inside & has_page, other=0).to(tl.int64)
        tl.store(kv_slots_ptr + rows, tl.where(has_page, page * P + at % P, -1), mask=inside)
        tl.store(keep_ptr + sequence, kept.to(tl.int32))
        tl.store(seen_ptr + sequence, (seen + kept).to(tl.int32))


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
    """See `onebox.kernels.advance.advance`."""
    num_sequences, num_pages = page_table.shape
    depth = drafts.shape[1]
    if num_sequences:
        advance_kernel[(num_sequences,)](
            token_ids,
            positions,
            kv_slots,
            keep,
            seen,
            cu_rows,
            page_table,
            drawn,
            num_kept,
            drafts,
            num_pages,
            depth,
            P=page_tokens,
            BLOCK=triton.next_power_of_2(1 + depth),
            num_warps=1,
        )
