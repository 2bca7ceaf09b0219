"""Log-probabilities of tokens under the model itself, and the likeliest alternatives."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebox.engine.request import TokenLogprob

__all__ = ["RowLogprobs"]

_ALIGNED = 64
"""Columns are filled up to a multiple of this, so that every row is summed in the same order wherever it lies."""


class RowLogprobs:
    """Log-probabilities of rows of logits, taken before the logits are adjusted."""

    def __init__(self, logits: Tensor) -> None:
        """Logits float32 [n, V]."""
        self._vocab_size = logits.shape[1]
        padded = pad(logits.to(torch.float64), (0, -logits.shape[1] % _ALIGNED), value=float("-inf"))
        self._values = torch.log_softmax(padded, dim=-1)

    def of(self, rows: list[int], token_ids: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
        """The logprobs of one token in each of these rows, with `num_top` alternatives each."""
        values = self._values[rows, : self._vocab_size]
        tokens = torch.tensor(token_ids, device=values.device)
        own = values.gather(1, tokens[:, None])
        # Among equals the lower id is the likelier one, as everywhere.
        is_lower = torch.arange(self._vocab_size, device=values.device) < tokens[:, None]
        is_ahead = (values > own) | ((values == own) & is_lower)
        ranks = (is_ahead.sum(-1) + 1).tolist()
        likeliest, ids = values.sort(dim=-1, descending=True, stable=True)
        top_values, top_ids = _floats(likeliest[:, :num_top]), ids[:, :num_top].tolist()
        return tuple(
            TokenLogprob(token_id, value, rank, tuple(zip(alternatives, their_values, strict=True)))
            for token_id, value, rank, alternatives, their_values in zip(
                token_ids, _floats(own[:, 0]), ranks, top_ids, top_values, strict=True
            )
        )


def _floats(values: Tensor) -> list:  # type: ignore[type-arg]
    """Python numbers, rounded to float32: more digits than that are not the model's."""
    result: list = values.to(torch.float32).tolist()  # type: ignore[type-arg]
    return result
