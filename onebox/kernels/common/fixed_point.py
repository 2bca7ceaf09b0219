"""Fixed-point rows (`rows.FixedRows`) in Triton: how kernels write them, and the norm division left to linears.

There are two roundings. `int_linear.fixed_point` divides each number by its group's scale. `store_groups` multiplies by
the reciprocal, one division in place of 128, so a number may be rounded to the other neighbouring step.
"""

import triton
import triton.language as tl

from onebox.kernels.common import rows
from onebox.kernels.common.arithmetic import rounded

__all__ = ["LARGEST", "SMALLEST_ABSMAX", "load_squares", "row_factors", "store_group", "store_groups", "store_planes"]

LARGEST = tl.constexpr(float(rows.LARGEST))
SMALLEST_ABSMAX = tl.constexpr(rows.SMALLEST_ABSMAX)


@triton.jit
def store_planes(quotients, planes_ptr, row, columns, K: tl.constexpr, inside=None):
    """Rounds quotients to integers, half to even, and writes their two bytes to `planes`, int8 [R, 2, K]."""
    # Adding 1.5 * 2^23 leaves no bits for a fraction: the addition rounds to an integer.
    steps = ((quotients + 12582912.0) - 12582912.0).to(tl.int32)
    low = ((steps + 128) & 255) - 128
    at = planes_ptr + row * 2 * K + columns
    tl.store(at, ((steps - low) >> 8).to(tl.int8), mask=inside)
    tl.store(at + K, low.to(tl.int8), mask=inside)


@triton.jit
def store_groups(
    values,  # float32 [groups * 128]: whole groups of a row, in any order
    offsets,  # [groups * 128]: column of each value, relative to the first group's first column
    row,
    first_group,
    x_ptr,  # [R, K]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    K: tl.constexpr,
):
    """Writes groups to x, planes and scale."""
    columns = first_group * 128 + offsets
    tl.store(x_ptr + row * K + columns, rounded(values, x_ptr.dtype.element_ty))
    # Magnitudes have the order of their bits, and a GPU has one instruction for the largest integer of a warp.
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    factor = tl.zeros_like(values)
    for group in tl.static_range(values.shape[0] // 128):
        is_own = offsets // 128 == group
        largest = tl.max(tl.where(is_own, bits, 0), 0).to(tl.float32, bitcast=True)
        largest = tl.maximum(largest, SMALLEST_ABSMAX)
        factor = tl.where(is_own, LARGEST / largest, factor)
        tl.store(scale_ptr + row * (K // 128) + first_group + group, largest / LARGEST)
    store_planes(values * factor, planes_ptr, row, columns, K)


@triton.jit
def store_group(
    values,  # float32 [128]: a group of a row
    row,
    group,
    x_ptr,  # this and the next two as in `store_groups`
    planes_ptr,
    scale_ptr,
    K: tl.constexpr,
):
    """Writes one group to x, planes and scale."""
    store_groups(values, tl.arange(0, 128), row, group, x_ptr, planes_ptr, scale_ptr, K)


@triton.jit
def load_squares(squares_ptr, rows, R, K: tl.constexpr, GROUPS_BLOCK: tl.constexpr):
    """float32 [rows, GROUPS_BLOCK]: sums of squares per group, from `squares` [R, K/128]."""
    groups = tl.arange(0, GROUPS_BLOCK)
    inside = (rows < R)[:, None] & (groups < K // 128)[None, :]
    return tl.load(squares_ptr + rows[:, None] * (K // 128) + groups[None, :], mask=inside, other=0.0)


@triton.jit
def row_factors(squares, eps, K: tl.constexpr):
    """float32 [rows]: one over the root mean square of rows with these `squares`, from `load_squares`.

    Half is added to half until one number is left: the order of a sum over more than two depends on the layout, which
    depends on the number of rows.
    """
    ROWS: tl.constexpr = squares.shape[0]
    total = squares
    for _ in tl.static_range(_num_halvings(squares.shape[1])):
        total = tl.sum(tl.reshape(total, (ROWS, 2, total.shape[1] // 2)), 1)
    return tl.rsqrt(tl.reshape(total, (ROWS,)) / K + eps)


@triton.constexpr_function
def _num_halvings(length):
    return length.bit_length() - 1
