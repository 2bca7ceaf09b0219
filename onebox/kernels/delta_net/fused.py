"""What leaves a mixer, in Triton: a program of one warp for 128 columns of a row, its own fixed-point group."""

import triton
import triton.language as tl

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_group
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import Tunable

__all__ = ["delta_rows"]

_ROWS = Tunable("delta_rows")


@triton.jit
def delta_rows_kernel(
    mixed_ptr,  # float32 [R, K]
    z_ptr,  # float32 [PARTS, R, K], part_stride and row_stride apart
    weight_ptr,  # [DV]
    x_ptr,  # [R, K]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    eps,
    part_stride,
    row_stride,
    K: tl.constexpr,
    DV: tl.constexpr,  # divides 128
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    columns = group * 128 + tl.arange(0, 128)
    weight = tl.load(weight_ptr + tl.arange(0, 128) % DV).to(tl.float32)
    wait(DEPENDENT)
    mixed = tl.load(mixed_ptr + row * K + columns)
    z = sum_parts(z_ptr, part_stride, row * row_stride + columns, True, PARTS)
    if DV == 128:
        mean = tl.sum(mixed * mixed, 0) / DV
    else:
        heads = tl.sum(tl.reshape(mixed * mixed, (128 // DV, DV)), 1) / DV
        mean = tl.reshape(tl.broadcast_to(heads[:, None], (128 // DV, DV)), (128,))
    values = weight * (mixed * tl.rsqrt(mean + eps)) * (z * tl.sigmoid(z))
    store_group(values, row, group, x_ptr, planes_ptr, scale_ptr, K)


def delta_rows(mixed, z_parts, weight, eps, dtype):
    num_rows, heads, value_dim = mixed.shape
    width = heads * value_dim
    rows = new_rows(num_rows, width, dtype, mixed.device)
    if num_rows:
        delta_rows_kernel[(width // 128, num_rows)](
            mixed,
            z_parts,
            weight,
            *rows,
            eps,
            z_parts.stride(0),
            z_parts.stride(1),
            K=width,
            DV=value_dim,
            PARTS=len(z_parts),
            num_warps=1,
            **launch_options(mixed, _ROWS, heads),
        )
    return FixedRows(*rows, None)
