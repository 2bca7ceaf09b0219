"""The gated norm of a DeltaNet layer in Triton: plain, and fused with the fixed-point rows of a decode step."""

import triton
import triton.language as tl

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_group
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import Tunable

__all__ = ["gated_norm", "gated_norm_fused"]

_HEADS = 4
"""Heads per program of the plain form."""

_NORM_FUSED = Tunable("gated_norm_fused")


@triton.jit
def gated_norm_kernel(
    o_ptr,  # [R, HEADS, DV]
    z_ptr,  # [R, HEADS * DV]
    weight_ptr,  # [DV]
    out_ptr,  # [R, HEADS * DV]
    eps,
    z_stride,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, TILE heads)."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < DV)[None, :]
    places = heads[:, None] * DV + columns[None, :]
    o = tl.load(o_ptr + row * (HEADS * DV) + places, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + places, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < DV, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
    out = weight[None, :] * (o * scale[:, None]) * (z * tl.sigmoid(z))
    tl.store(out_ptr + row * (HEADS * DV) + places, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(o, z, weight, eps):
    rows, heads, value_dim = o.shape
    out = z.new_empty(rows, heads * value_dim)
    gated_norm_kernel[(rows, ceil_div(heads, _HEADS))](
        o,
        z,
        weight,
        out,
        eps,
        z.stride(0),
        HEADS=heads,
        DV=value_dim,
        BLOCK=next_power_of_2(value_dim),
        TILE=_HEADS,
        num_warps=2,
    )
    return out


@triton.jit
def gated_norm_fused_kernel(
    mixed_ptr,  # float32 [R, K]
    z_ptr,  # float32 [PARTS, R, K], strides part_stride and row_stride
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


def gated_norm_fused(mixed, z_parts, weight, eps, dtype):
    num_rows, heads, value_dim = mixed.shape
    width = heads * value_dim
    rows = new_rows(num_rows, width, dtype, mixed.device)
    if num_rows:
        gated_norm_fused_kernel[(width // 128, num_rows)](
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
            **launch_options(_NORM_FUSED, heads),
        )
    return FixedRows(*rows, None)
