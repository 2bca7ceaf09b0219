"""The sum and norm of a decode step in Triton: a program of one warp for 128 columns of a row, a fixed-point group.

No program sees a whole row, so none divides by the row's length; the linears do, from the groups' sums of squares.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.int_linear.reference import LARGEST, SMALLEST_ABSMAX

__all__ = ["add_norm", "new_rows", "store_groups", "store_rows"]

_ADD_NORM = Tunable("add_norm")


@triton.jit
def store_groups(
    values,  # float32 [N]: whole groups of a row, in any order
    offsets,  # [N]: where each value stands, counted from the first group's first column
    row,
    first_group,
    x_ptr,  # [R, K]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    K: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_ABSMAX: tl.constexpr,
):
    """Writes groups in each of their forms."""
    columns = first_group * 128 + offsets
    tl.store(x_ptr + row * K + columns, values.to(x_ptr.dtype.element_ty))
    # As `int_linear.fixed_point` but for one division in place of 128: a step may be rounded the other way.
    # Magnitudes compare as their bits do, and a GPU has one instruction for the largest integer of a warp.
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    factor = tl.zeros_like(values)
    for group in tl.static_range(values.shape[0] // 128):
        is_own = offsets // 128 == group
        largest = tl.max(tl.where(is_own, bits, 0), 0).to(tl.float32, bitcast=True)
        largest = tl.maximum(largest, SMALLEST_ABSMAX)
        factor = tl.where(is_own, LARGEST / largest, factor)
        tl.store(scale_ptr + row * (K // 128) + first_group + group, largest / LARGEST)
    steps = ((values * factor + 12582912.0) - 12582912.0).to(tl.int32)
    low = ((steps + 128) & 255) - 128
    at = planes_ptr + row * 2 * K + columns
    tl.store(at, ((steps - low) >> 8).to(tl.int8))
    tl.store(at + K, low.to(tl.int8))


@triton.jit
def store_rows(
    values,  # float32 [128]: a group of a row
    row,
    group,
    x_ptr,
    planes_ptr,
    scale_ptr,
    K: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_ABSMAX: tl.constexpr,
):
    """Writes one group in each of its forms."""
    offsets = tl.arange(0, 128)
    store_groups(values, offsets, row, group, x_ptr, planes_ptr, scale_ptr, K, LARGEST, SMALLEST_ABSMAX)


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
    LARGEST: tl.constexpr,
    SMALLEST_ABSMAX: tl.constexpr,
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
    store_rows(values, row, group, x_ptr, planes_ptr, scale_ptr, H, LARGEST, SMALLEST_ABSMAX)


def new_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for (x, planes, scale) of `FixedRows`."""
    x = torch.empty((num_rows, width), dtype=dtype, device=device)
    planes = torch.empty((num_rows, 2, width), dtype=torch.int8, device=device)
    return x, planes, torch.empty((num_rows, width // 128), dtype=torch.float32, device=device)


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
            LARGEST=float(LARGEST),
            SMALLEST_ABSMAX=SMALLEST_ABSMAX,
            num_warps=1,
            maxnreg=128,  # without a limit the compiler saves registers and loads the parts in turns
            **launch_options(parts, _ADD_NORM, weight.shape[0]),
        )
    return FixedRows(x, planes, scale, squares, eps), total
