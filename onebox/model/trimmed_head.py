"""A head for drafts: the LM head's rows of likely tokens, so that a draft reads a sixth of the head.

A draft that is wrong costs time and changes no answer, so drafts need no row of a token that the model hardly says. The
rows are copies as stored: a listed token's logit has the LM head's bits, or those of its first plane if it has two
(`head.py`). Which tokens are listed may change while the model runs; the memory does not, so that captured graphs go on
reading it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.model.linear import DecodeActivations, Linear, RowLinear
from onebox.spec.errors import UnsupportedError

__all__ = ["TrimmedHead"]

_ROWS_AT_ONCE = 4096
"""Copied together while the model is loaded: what is gathered is in memory twice."""


@dataclass(frozen=True)
class TrimmedHead:
    """D rows of the LM head, in any order."""

    rows: RowLinear
    token_ids: Tensor
    """int64 [D]: the token of each row."""

    @classmethod
    def of(cls, lm_head: Linear, token_ids: Tensor) -> "TrimmedHead":
        """The rows of these tokens, int64 [D], of a head on the same device."""
        if not isinstance(lm_head, RowLinear):
            raise UnsupportedError(
                f"Drafts cannot have a vocabulary of their own beside an LM head that is a {type(lm_head).__name__}: "
                "give --draft-vocab full."
            )
        head = cls(lm_head.blank(len(token_ids)), torch.empty_like(token_ids))
        places = torch.arange(len(token_ids), device=token_ids.device)
        for some, tokens in zip(*(torch.split(part, _ROWS_AT_ONCE) for part in (places, token_ids)), strict=True):
            head.put(lm_head, some, tokens)
        return head

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, D] of hidden states [R, H], at most 128 rows."""
        return self.rows.decode(DecodeActivations(hidden), torch.float32)

    def put(self, lm_head: RowLinear, places: Tensor, token_ids: Tensor) -> None:
        """Replaces rows `places` by those of `token_ids`, both int64 [n], in place."""
        self.rows.copy_rows(lm_head, token_ids, places)
        self.token_ids[places] = token_ids
