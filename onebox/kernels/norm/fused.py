"""The sum and norm of a decode step in Triton: a program of one warp for 128 columns of a row, a fixed-point group.

No program sees a whole row, so none divides by the row's length; the linears do, from the groups' sums of squares.
"""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_group
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import Tunable

__all__ = ["add_norm"]

_ADD_NORM = Tunable("add_norm")


@triton.jit
def add_norm_kernel(
    residual_ptr,  # [R, H], or None
    parts_ptr,  # float32 [PARTS, R, H], part_stride and row_stride apart
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


def add_norm(residual, parts, weight, eps, dtype, shared=None, share=None):
    _, num_rows, hidden = parts.shape
    x, planes, scale = new_rows(num_rows, hidden, dtype, parts.device)
    squares, total = torch.empty_like(scale), torch.empty((num_rows, hidden), dtype=torch.float32, device=parts.device)
    if num_rows:
        add_norm_kernel[(hidden // 128, num_rows)](
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
            maxnreg=128,  # without a limit the compiler saves registers and loads the parts in turns
            **launch_options(parts, _ADD_NORM, weight.shape[0]),
        )
    return FixedRows(x, planes, scale, squares, eps), total
