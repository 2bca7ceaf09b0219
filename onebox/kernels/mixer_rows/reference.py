"""The plain twins of what leaves a mixer."""

import torch
from torch import Tensor

from onebox.kernels.delta_net.reference import gated_norm
from onebox.kernels.gate.reference import attention_gate
from onebox.kernels.int_linear.reference import fixed_point
from onebox.kernels.route_shared.reference import in_order
from onebox.kernels.rows import FixedRows

__all__ = ["attention_rows", "delta_rows"]


def delta_rows(mixed: Tensor, z_parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> FixedRows:
    """See `onebox.kernels.mixer_rows.delta_rows`."""
    return _rows(gated_norm(mixed, in_order(z_parts), weight, eps), dtype)


def attention_rows(attended: Tensor, qkv_parts: Tensor) -> FixedRows:
    """See `onebox.kernels.mixer_rows.attention_rows`."""
    rows, heads, head_dim = attended.shape
    q_gate = in_order(qkv_parts)[:, : 2 * heads * head_dim].view(rows, heads, 2, head_dim)
    return _rows(attention_gate(attended.to(torch.float32), q_gate[:, :, 1]), attended.dtype)


def _rows(values: Tensor, dtype: torch.dtype) -> FixedRows:
    return FixedRows(values.to(dtype), *fixed_point(values), None)
