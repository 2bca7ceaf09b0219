"""The plain twin of the router."""

import torch
from torch import Tensor

__all__ = ["route"]


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.router.route`."""
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    return ids[:, :k].to(torch.int32), ranked[:, :k].softmax(dim=-1)
