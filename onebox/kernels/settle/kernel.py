"""A step's decision in Triton: one launch, a program a sequence and one for the rows of none."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["settle"]

_MOST_ROWS = 64


@triton.jit(do_not_specialize=["R", "S"])
def settle_kernel(
    words_ptr,  # int64 [2 R + S]
    drawn_ptr,  # int64 [R], and so the next two
    next_ids_ptr,
    verdicts_ptr,
    cu_rows_ptr,  # int32 [S + 1]
    R,
    S,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    first = tl.load(cu_rows_ptr + sequence)
    end = tl.load(cu_rows_ptr + sequence + 1, mask=sequence < S, other=0)
    num_rows = tl.where(sequence < S, end, R) - first
    place = tl.arange(0, BLOCK)
    inside = place < num_rows
    drawn = tl.load(drawn_ptr + first + place, mask=inside, other=0)
    known = tl.load(next_ids_ptr + first + place, mask=inside, other=0)
    verdict = tl.load(verdicts_ptr + first + place, mask=inside, other=0)
    is_right = (verdict == 1) | ((verdict == 0) & (drawn == known) & (drawn >= 0))
    tl.store(words_ptr + first + place, tl.where(is_right, known, tl.maximum(drawn, 0)), mask=inside)
    tl.store(words_ptr + R + S + first + place, (drawn >= 0).to(tl.int64), mask=inside)
    first_wrong = tl.min(tl.where(inside & ~is_right, place, BLOCK), 0)
    tl.store(words_ptr + R + sequence, tl.minimum(first_wrong + 1, num_rows).to(tl.int64), mask=sequence < S)


def settle(words: Tensor, drawn: Tensor, next_ids: Tensor, verdicts: Tensor, cu_rows: Tensor) -> None:
    """See `onebox.kernels.settle.settle`."""
    num_sequences = len(cu_rows) - 1
    settle_kernel[(num_sequences + 1,)](
        words, drawn, next_ids, verdicts, cu_rows, len(drawn), num_sequences, BLOCK=_MOST_ROWS, num_warps=1
    )
