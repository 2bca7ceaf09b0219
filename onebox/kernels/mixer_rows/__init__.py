"""What leaves a mixer in a decode step, gated and in the forms that its output projection may want."""

import torch
from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.rows import FixedRows

__all__ = ["attention_rows", "delta_rows"]


def delta_rows(mixed: Tensor, z_parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> FixedRows:
    """`delta_net.gated_norm` as rows [R, heads * Dv]: norm(mixed) * weight * silu(z), the norm over each head.

    mixed float32 [R, heads, Dv], 128 a multiple of Dv; z_parts float32 [P, R, heads * Dv], added in their order, any
    strides over P and R; weight [Dv].
    """
    result: FixedRows = implementation(__name__, mixed).delta_rows(mixed, z_parts, weight, eps, dtype)
    return result


def attention_rows(attended: Tensor, qkv_parts: Tensor) -> FixedRows:
    """`gate.attention_gate` as rows [R, Q * D] in the dtype of attended: attended * sigmoid(gate).

    attended [R, Q, D]; qkv_parts float32 [P, R, N], added in their order: a row begins with each head's query and gate,
    D columns each, as the projection gives them. Q * D is a multiple of 128.
    """
    result: FixedRows = implementation(__name__, attended).attention_rows(attended, qkv_parts)
    return result
