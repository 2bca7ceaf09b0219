"""The norms in Triton: one program a row, the whole row in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm"]


@triton.jit
def add_rms_norm_kernel(
    x_ptr,  # [R, H]
    residual_ptr,  # float32 [R, H]
    weight_ptr,  # [H]
    normed_ptr,  # [R, H]
    total_ptr,  # float32 [R, H]
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + row * H + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + row * H + columns, mask=inside, other=0.0) + x
    scale = tl.rsqrt(tl.sum(total * total, 0) / H + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = total * scale * (1 + weight)
    tl.store(normed_ptr + row * H + columns, normed.to(normed_ptr.dtype.element_ty), mask=inside)
    tl.store(total_ptr + row * H + columns, total, mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.norm.add_rms_norm`."""
    rows, hidden = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(residual)
    block = triton.next_power_of_2(hidden)
    add_rms_norm_kernel[(rows,)](
        x, residual, weight, normed, total, eps, H=hidden, BLOCK=block, num_warps=4 if block <= 4096 else 8
    )
    return normed, total
