"""The constants of the rotary embedding, computed once at load. Kernel and twin multiply by the same numbers."""

import torch
from torch import Tensor

from onebox.spec.yarn import Yarn

__all__ = ["rotary_frequencies"]


def rotary_frequencies(theta: float, rotary_dim: int, yarn: Yarn | None = None) -> Tensor:
    """Angle per position for the rotary_dim / 2 frequencies: float32 on the CPU.

    The steps are those of the model's own code, each rounded to float32: at position 1,010,000 the last bit of a
    frequency is 0.06 of an angle. Only the power is computed in float64 first, whose float32 bits are the same on
    every machine.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    wavelengths = (theta ** exponents.to(torch.float64)).to(torch.float32)
    kept = 1.0 / wavelengths
    if yarn is None:
        return kept
    stretched = 1.0 / (yarn.factor * wavelengths)
    first, last = yarn.mixed_pairs(theta, rotary_dim)
    share = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return stretched * (1 - share) + kept * share
