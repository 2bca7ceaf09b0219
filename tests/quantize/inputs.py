"""Inputs of the matrices that are tuned in tests."""

import torch

__all__ = ["correlated_rows"]


def correlated_rows(count: int, columns: int) -> torch.Tensor:
    """Inputs as a model has them: few directions hold most of their size."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
