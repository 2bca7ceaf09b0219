"""Attention's output gate in Triton: elementwise for prefill, and fused with the fixed-point rows of a decode step."""

import triton
import triton.language as tl

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.experts.shared import _BLOCK, _grid, _sigmoid
from onebox.kernels.int_linear.reference import LARGEST, SMALLEST_ABSMAX
from onebox.kernels.norm.fused import new_rows, store_rows
from onebox.kernels.router.fused import sum_parts

__all__ = ["attention_gate", "attention_rows"]

_ROWS = Tunable("attention_rows")


@triton.jit
def attention_gate_kernel(
    attended_ptr,  # [R, W]
    gate_ptr,  # [R, W]
    gated_ptr,  # [R, W]
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < W
    attended = tl.load(attended_ptr + row * W + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * W + columns, mask=inside, other=0.0).to(tl.float32)
    gated = attended * _sigmoid(gate)
    tl.store(gated_ptr + row * W + columns, gated.to(gated_ptr.dtype.element_ty), mask=inside)


def attention_gate(attended, gate):
    rows, num_heads, head_dim = attended.shape
    width = num_heads * head_dim
    gated = attended.new_empty(rows, width)
    if rows:
        attention_gate_kernel[_grid(rows, width)](attended, gate, gated, W=width, BLOCK=_BLOCK)
    return gated


@triton.jit
def attention_rows_kernel(
    attended_ptr,  # [R, K]
    qkv_ptr,  # float32 [PARTS, R, ...], part_stride and row_stride apart
    x_ptr,  # [R, K]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    part_stride,
    row_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_ABSMAX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    columns = group * 128 + tl.arange(0, 128)
    attended = tl.load(attended_ptr + row * K + columns).to(tl.float32)
    gate_columns = (columns // D) * (2 * D) + D + columns % D
    gate = sum_parts(qkv_ptr, part_stride, row * row_stride + gate_columns, True, PARTS)
    values = attended * tl.sigmoid(gate)
    store_rows(values, row, group, x_ptr, planes_ptr, scale_ptr, K, LARGEST, SMALLEST_ABSMAX)


def attention_rows(attended, qkv_parts):
    num_rows, heads, head_dim = attended.shape
    width = heads * head_dim
    rows = new_rows(num_rows, width, attended.dtype, attended.device)
    if num_rows:
        attention_rows_kernel[(width // 128, num_rows)](
            attended,
            qkv_parts,
            *rows,
            qkv_parts.stride(0),
            qkv_parts.stride(1),
            K=width,
            D=head_dim,
            PARTS=len(qkv_parts),
            LARGEST=float(LARGEST),
            SMALLEST_ABSMAX=SMALLEST_ABSMAX,
            num_warps=1,
            **launch_options(attended, _ROWS, heads),
        )
    return FixedRows(*rows, None)
