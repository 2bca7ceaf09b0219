"""What a step decides: the token after each row, how many rows of each sequence are certain, and which are no good."""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["settle"]


def settle(words: Tensor, drawn: Tensor, next_ids: Tensor, verdicts: Tensor, cu_rows: Tensor) -> None:
    """Writes into words int64 [2R + S]: the tokens [R], the rows kept [S], and whether a row's logits were numbers [R].

    drawn int64 [R]: the token that each row draws, -1 for a row without numbers. next_ids int64 [R]: the token known or
    drafted to follow it; verdicts int64 [R] say what becomes of that: 0, it is right if it was drawn; 1, it is right;
    2, it is wrong. A row whose next token is right has it as its token, any other the one drawn, 0 in place of -1. Of
    the rows cu_rows[s] .. cu_rows[s + 1] - 1, at most 64, those are kept that come before the first wrong one, and that
    one. cu_rows int32 [S + 1]; rows of no sequence come last and are written too.
    """
    implementation(__name__, words).settle(words, drawn, next_ids, verdicts, cu_rows)
