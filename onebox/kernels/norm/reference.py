"""The plain twin of the norms."""

import torch
from torch import Tensor

__all__ = ["add_rms_norm", "concat_rms_norm", "rms_norm"]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.norm.add_rms_norm`."""
    total = residual + x.to(torch.float32)
    return _normed(total, weight, eps).to(x.dtype), total


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """See `onebox.kernels.norm.rms_norm`."""
    return _normed(x.to(torch.float32), weight, eps).to(dtype or x.dtype)


def concat_rms_norm(
    embedding: Tensor, hidden: Tensor, embedding_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """See `onebox.kernels.norm.concat_rms_norm`."""
    return torch.cat([rms_norm(embedding, embedding_weight, eps), rms_norm(hidden, hidden_weight, eps)], dim=-1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * (1 + weight.to(torch.float32))
