"""The plain twin of a step's decision. On a host a few numbers are quicker as lists than as tensors."""

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["settle"]

_COMPARE, _ACCEPT = 0, 1


def settle(words: Tensor, drawn: Tensor, next_ids: Tensor, verdicts: Tensor, cu_rows: Tensor) -> None:
    """See `onebox.kernels.settle.settle`."""
    rows = list(zip(drawn.tolist(), next_ids.tolist(), verdicts.tolist(), strict=True))
    is_right = [verdict == _ACCEPT or (verdict == _COMPARE and token == known >= 0) for token, known, verdict in rows]
    tokens = [known if right else max(token, 0) for (token, known, _), right in zip(rows, is_right, strict=True)]
    kept = []
    for first, end in pairwise(cu_rows.tolist()):
        wrong = [place for place in range(first, end) if not is_right[place]]
        kept.append(wrong[0] - first + 1 if wrong else end - first)
    words.copy_(torch.tensor([*tokens, *kept, *(int(token >= 0) for token, _, _ in rows)], dtype=torch.int64))
