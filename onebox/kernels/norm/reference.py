"""The plain twin of the norms."""

import torch
from torch import Tensor

__all__ = ["add_rms_norm"]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.norm.add_rms_norm`."""
    total = residual + x.to(torch.float32)
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale * (1 + weight.to(torch.float32))).to(x.dtype), total
