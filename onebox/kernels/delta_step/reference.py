"""The plain twin of DeltaNet's step from parts."""

import torch
from torch import Tensor

from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.delta_net.reference import delta_net_step
from onebox.kernels.route_shared.reference import in_order

__all__ = ["delta_step"]


def delta_step(
    qkv_parts: Tensor,
    a_parts: Tensor,
    b_parts: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    keep: Tensor,
) -> Tensor:
    """See `onebox.kernels.delta_step.delta_step`."""
    qkv = in_order(qkv_parts).to(pool.pending_rows.dtype).to(torch.float32)
    return delta_net_step(qkv, in_order(a_parts), in_order(b_parts), weights, pool, cu_rows, slots, keep)
