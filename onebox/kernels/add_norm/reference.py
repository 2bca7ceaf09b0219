"""The plain twin of the sum and norm of a decode step."""

import torch
from torch import Tensor

from onebox.kernels.int_linear.reference import fixed_point
from onebox.kernels.rows import FixedRows

__all__ = ["add_norm"]


def add_norm(
    residual: Tensor | None,
    parts: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    shared: Tensor | None = None,
    share: Tensor | None = None,
) -> tuple[FixedRows, Tensor]:
    """See `onebox.kernels.add_norm.add_norm`."""
    first, *others = parts if residual is None else [residual, *parts]
    total = first.to(torch.float32)
    for part in others:
        total = total + part
    if shared is not None and share is not None:
        added = shared[0]
        for part in shared[1:]:
            added = added + part
        total = total + share.unsqueeze(-1) * added
    squares = total.square().reshape(len(total), total.shape[1] // 128, 128).sum(-1)
    rows = total * (1 + weight.to(torch.float32))
    return FixedRows(rows.to(dtype), *fixed_point(rows), squares, eps), total
