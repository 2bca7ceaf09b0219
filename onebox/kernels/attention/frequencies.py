"""The constants of the rotary embedding, computed once at load. Kernel and twin multiply by the same numbers."""

import torch
from torch import Tensor

__all__ = ["rotary_frequencies"]


def rotary_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """Angle per position for the rotary_dim / 2 frequencies: float32 on the CPU, rounded once from float64."""
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64)
    return (theta ** (-2 * pairs / rotary_dim)).to(torch.float32)
