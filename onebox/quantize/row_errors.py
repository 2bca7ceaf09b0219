"""How wrong a block's output is at each token, by what reads the stream behind the block."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onebox.model.reference import zero_centred_norm

__all__ = ["HEAD_ROWS", "PredictionErrors", "RelativeSquares", "RowErrors", "row_weights"]

HEAD_ROWS = 256
"""Whose logits are computed at a time: those of a large vocabulary take a megabyte a row."""


class RowErrors(Protocol):
    def of(self, missing: Tensor, wanted: Tensor) -> Tensor:
        """Errors [n] of the rows wanted - missing, float32 [n, hidden], where `wanted` is right."""


class RelativeSquares:
    """Squares relative to the stream's mean square: another block norms the stream before it reads it."""

    def of(self, missing: Tensor, wanted: Tensor) -> Tensor:
        return missing.square().mean(-1) * row_weights(wanted)


@dataclass(frozen=True)
class PredictionErrors:
    """The KL divergence of the next token's probabilities, behind the last norm and the head: nothing else reads."""

    norm: Tensor
    """[hidden]."""
    eps: float
    source_head: Tensor
    """float32 [vocabulary, hidden], as is the next one."""
    built_head: Tensor

    def of(self, missing: Tensor, wanted: Tensor) -> Tensor:
        pairs = zip(torch.split(missing, HEAD_ROWS), torch.split(wanted, HEAD_ROWS), strict=True)
        # Logits are computed again for the gradients: kept for all rows they would not fit.
        parts: list[Tensor] = [checkpoint(self._part, *pair, use_reentrant=False) for pair in pairs]
        return torch.cat(parts)

    def _part(self, missing: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            right = self._log_probabilities(wanted, self.source_head)
        found = self._log_probabilities(wanted - missing, self.built_head)
        return (right.exp() * (right - found)).sum(-1)

    def _log_probabilities(self, rows: Tensor, head: Tensor) -> Tensor:
        return F.linear(zero_centred_norm(rows, self.norm, self.eps), head).log_softmax(-1)


def row_weights(stream: Tensor) -> Tensor:
    """The inverse mean square of each row [rows]."""
    squares: Tensor = torch.linalg.vector_norm(stream, dim=-1).square_() / stream.shape[-1]
    return squares.clamp_(min=torch.finfo(torch.float32).tiny).reciprocal_()
