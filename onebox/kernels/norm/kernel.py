"""The norms in Triton: one program a row (of a half, for the pair), the whole row in registers."""

import torch
import triton
import triton.language as tl

__all__ = ["add_rms_norm", "concat_rms_norm", "rms_norm"]


@triton.jit
def _normed(x, weight, eps, H: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    return x * scale * (1 + weight.to(tl.float32))


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
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = _normed(total, weight, eps, H)
    tl.store(normed_ptr + row * H + columns, normed.to(normed_ptr.dtype.element_ty), mask=inside)
    tl.store(total_ptr + row * H + columns, total, mask=inside)


@triton.jit
def rms_norm_kernel(
    first_ptr,  # [R, H]
    second_ptr,  # [R, H]; where there is one half only, the first again
    first_weight_ptr,  # [H]
    second_weight_ptr,  # [H]
    normed_ptr,  # [R, halves, H]; program (row, half) writes one of its rows
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    if half == 0:
        x = tl.load(first_ptr + row * H + columns, mask=inside, other=0.0)
        weight = tl.load(first_weight_ptr + columns, mask=inside, other=0.0)
    else:
        x = tl.load(second_ptr + row * H + columns, mask=inside, other=0.0)
        weight = tl.load(second_weight_ptr + columns, mask=inside, other=0.0)
    normed = _normed(x.to(tl.float32), weight, eps, H)
    out_ptr = normed_ptr + (row * tl.num_programs(1) + half) * H
    tl.store(out_ptr + columns, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(x, residual, weight, eps):
    rows, hidden = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(residual)
    if rows:
        add_rms_norm_kernel[(rows,)](x, residual, weight, normed, total, eps, H=hidden, **_block(hidden))
    return normed, total


def rms_norm(x, weight, eps, dtype=None):
    rows, hidden = x.shape
    normed = torch.empty_like(x, dtype=dtype)
    if rows:
        rms_norm_kernel[(rows, 1)](x, x, weight, weight, normed, eps, H=hidden, **_block(hidden))
    return normed


def concat_rms_norm(embedding, hidden, embedding_weight, hidden_weight, eps):
    rows, width = hidden.shape
    normed = hidden.new_empty(rows, 2 * width)
    if rows:
        rms_norm_kernel[(rows, 2)](
            embedding, hidden, embedding_weight, hidden_weight, normed, eps, H=width, **_block(width)
        )
    return normed


def _block(hidden: int) -> dict[str, int]:
    """A row's lanes and warps, which fix its order of summation; they follow from its width alone."""
    block = triton.next_power_of_2(hidden)
    return {"BLOCK": block, "num_warps": 4 if block <= 4096 else 8}
