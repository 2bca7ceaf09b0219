"""The twins of the norms."""

import torch
from torch import Tensor

from onebox.kernels.common.invariant import add_in_order
from onebox.kernels.common.rows import FixedRows, to_fixed_point

__all__ = ["add_rms_norm", "add_rms_norm_fused", "concat_rms_norm", "rms_norm"]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * (1 + weight), x + residual).

    x [R, H]: the last layer's output, any float dtype; residual [R, H] float32; weight [H]. The sum is float32 and is
    the residual of the next call; the normed rows have the dtype of x.
    """
    total = residual + x.to(torch.float32)
    return _normed(total, weight, eps).to(x.dtype), total


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """norm(x) * (1 + weight): [R, H] from x [R, H] and weight [H], in `dtype` or that of x."""
    return _normed(x.to(torch.float32), weight, eps).to(dtype or x.dtype)


def concat_rms_norm(
    embedding: Tensor, hidden: Tensor, embedding_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """Both halves normed separately and concatenated, embedding first: [R, 2H], the input of the MTP head's `fc`.

    embedding, hidden [R, H] and the result have one dtype; the weights are [H].
    """
    return torch.cat([rms_norm(embedding, embedding_weight, eps), rms_norm(hidden, hidden_weight, eps)], dim=-1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * (1 + weight.to(torch.float32))


def add_rms_norm_fused(
    residual: Tensor | None,
    parts: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    shared: Tensor | None = None,
    share: Tensor | None = None,
) -> tuple[FixedRows, Tensor]:
    """(rows total * (1 + weight), not yet divided by their root mean square, which linears do; total).

    total = residual + parts[0] + parts[1] + ... + share * (shared[0] + shared[1] + ...), float32 [R, H], in this order.
    residual [R, H], any float dtype, or None for zeros; parts float32 [parts, R, H], any strides over parts and R, at
    least one if there is no residual; weight [H], an offset from one; shared float32 [parts, R, H], with its own number
    of parts, and share float32 [R], or neither. H is a multiple of 128; the rows' x has `dtype`.
    """
    first, *others = parts if residual is None else [residual, *parts]
    total = first.to(torch.float32)
    total = add_in_order([total, *others])
    if shared is not None and share is not None:
        total = total + share.unsqueeze(-1) * add_in_order(shared)
    squares = total.square().reshape(len(total), total.shape[1] // 128, 128).sum(-1)
    rows = total * (1 + weight.to(torch.float32))
    return FixedRows(rows.to(dtype), *to_fixed_point(rows), squares, eps), total
