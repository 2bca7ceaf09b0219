"""The decode step of Gated DeltaNet from the parts of its input projection."""

from torch import Tensor

from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.dispatch import implementation

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
    """`delta_net.delta_net_step` with outputs in float32 [R, heads, Dv], of rows that come as parts to be added up.

    qkv_parts float32 [P, R, conv_dim], a_parts and b_parts float32 [Q, R, heads], alike in their strides over Q; parts
    are added in their order. A row of qkv is rounded to the pool's dtype before it is used: it is the same number when
    a later step finds it there.
    """
    chosen = implementation(__name__, qkv_parts)
    result: Tensor = chosen.delta_step(qkv_parts, a_parts, b_parts, weights, pool, cu_rows, slots, keep)
    return result
