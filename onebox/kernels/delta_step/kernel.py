"""DeltaNet's step from parts, in Triton: the kernels of `delta_net`, which add the parts up as they load them."""

import torch
from torch import Tensor

from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.delta_net.step import step

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
    return step(qkv_parts, a_parts, b_parts, weights, pool, cu_rows, slots, keep, torch.float32)
