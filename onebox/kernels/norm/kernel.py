"""The norms in Triton: one program per row (per row and half in `concat_rms_norm`), the whole row in registers.

`add_rms_norm_fused` has one program of one warp per row and group (128 columns). No program has a whole row, so none
divides by the row's root mean square; the linears do, from the groups' sums of squares.
"""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_group
from onebox.kernels.common.launch import next_power_of_2
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import Tunable

__all__ = ["add_rms_norm", "add_rms_norm_fused", "concat_rms_norm", "rms_norm"]

_ADD_FUSED, _NORM = Tunable("add_rms_norm_fused"), Tunable("rms_norm")


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
    second_ptr,  # [R, H]; first_ptr again if there is only one half
    first_weight_ptr,  # [H]
    second_weight_ptr,  # [H]
    normed_ptr,  # [R, halves, H]; program (row, half) writes one of its rows
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    if half == 0:
        weight = tl.load(first_weight_ptr + columns, mask=inside, other=0.0)
        wait(DEPENDENT)
        x = tl.load(first_ptr + row * H + columns, mask=inside, other=0.0)
    else:
        weight = tl.load(second_weight_ptr + columns, mask=inside, other=0.0)
        wait(DEPENDENT)
        x = tl.load(second_ptr + row * H + columns, mask=inside, other=0.0)
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
        options = launch_options(_NORM, hidden)
        rms_norm_kernel[(rows, 1)](x, x, weight, weight, normed, eps, H=hidden, **_block(hidden), **options)
    return normed


def concat_rms_norm(embedding, hidden, embedding_weight, hidden_weight, eps):
    rows, width = hidden.shape
    normed = hidden.new_empty(rows, 2 * width)
    if rows:
        options = launch_options(_NORM, width)
        rms_norm_kernel[(rows, 2)](
            embedding, hidden, embedding_weight, hidden_weight, normed, eps, H=width, **_block(width), **options
        )
    return normed


def _block(hidden: int) -> dict[str, int]:
    """A row's block size and warps, which fix the order of summation; they depend on its width alone."""
    block = next_power_of_2(hidden)
    return {"BLOCK": block, "num_warps": 4 if block <= 4096 else 8}


@triton.jit
def add_rms_norm_fused_kernel(
    residual_ptr,  # [R, H], or None
    parts_ptr,  # float32 [PARTS, R, H], strides part_stride and row_stride
    weight_ptr,  # [H]
    shared_ptr,  # float32 [SHARED, R, H]
    share_ptr,  # float32 [R]
    x_ptr,  # [R, H]
    planes_ptr,  # int8 [R, 2, H]
    scale_ptr,  # float32 [R, H/128]
    squares_ptr,  # float32 [R, H/128]
    total_ptr,  # float32 [R, H]
    part_stride,
    row_stride,
    shared_stride,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    columns = group * 128 + tl.arange(0, 128)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    wait(DEPENDENT)
    parts_at = parts_ptr + row * row_stride + columns
    if residual_ptr is not None:
        total = tl.load(residual_ptr + row * H + columns).to(tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(parts_at + part * part_stride)
    else:
        total = tl.load(parts_at)
        for part in tl.static_range(1, PARTS):
            total += tl.load(parts_at + part * part_stride)
    if SHARED > 0:
        added = tl.load(shared_ptr + row * H + columns)
        for part in tl.static_range(1, SHARED):
            added += tl.load(shared_ptr + part * shared_stride + row * H + columns)
        total += tl.load(share_ptr + row) * added
    tl.store(total_ptr + row * H + columns, total)
    tl.store(squares_ptr + row * (H // 128) + group, tl.sum(total * total, 0))
    values = total * (1 + weight)
    store_group(values, row, group, x_ptr, planes_ptr, scale_ptr, H)


def add_rms_norm_fused(residual, parts, weight, eps, dtype, shared=None, share=None):
    _, num_rows, hidden = parts.shape
    x, planes, scale = new_rows(num_rows, hidden, dtype, parts.device)
    squares, total = torch.empty_like(scale), torch.empty((num_rows, hidden), dtype=torch.float32, device=parts.device)
    if num_rows:
        add_rms_norm_fused_kernel[(hidden // 128, num_rows)](
            residual,
            parts,
            weight,
            shared,
            share,
            x,
            planes,
            scale,
            squares,
            total,
            parts.stride(0),
            parts.stride(1),
            0 if shared is None else shared.stride(0),
            H=hidden,
            PARTS=len(parts),
            SHARED=0 if shared is None else len(shared),
            num_warps=1,
            maxnreg=128,  # without a limit the compiler saves registers and loads one part after another
            **launch_options(_ADD_FUSED, weight.shape[0]),
        )
    return FixedRows(x, planes, scale, squares, eps), total
