"""RMSNorm, zero-centred (the weight is an offset from one): after a residual's sum, alone, or two side by side."""

import torch
from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["add_rms_norm", "concat_rms_norm", "rms_norm"]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * (1 + weight), x + residual).

    x [R, H]: what the last layer added, any float dtype; residual [R, H] float32; weight [H]. The sum is float32 and is
    what the next call takes as residual; the normed rows have the dtype of x.
    """
    chosen = implementation(__name__, x)
    result: tuple[Tensor, Tensor] = chosen.add_rms_norm(x, residual, weight, eps)
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """norm(x) * (1 + weight): [R, H] from x [R, H] and weight [H], in `dtype` or that of x."""
    result: Tensor = implementation(__name__, x).rms_norm(x, weight, eps, dtype)
    return result


def concat_rms_norm(
    embedding: Tensor, hidden: Tensor, embedding_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """The two halves normed each on its own, side by side, embedding first: [R, 2H], what the MTP head's `fc` reads.

    embedding and hidden [R, H] have one dtype, which the result has too; the weights are [H].
    """
    chosen = implementation(__name__, hidden)
    result: Tensor = chosen.concat_rms_norm(embedding, hidden, embedding_weight, hidden_weight, eps)
    return result
