"""Attention's output gate in Triton: elementwise for prefill, and fused with the fixed-point rows of a decode step."""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import stable_sigmoid
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_group
from onebox.kernels.common.launch import ELEMENTWISE_BLOCK, elementwise_grid
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import Tunable

__all__ = ["attention_gate", "attention_gate_fused"]

_GATE_FUSED = Tunable("attention_gate_fused")


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
    gated = attended * stable_sigmoid(gate)
    tl.store(gated_ptr + row * W + columns, gated.to(gated_ptr.dtype.element_ty), mask=inside)


def attention_gate(attended, gate):
    rows, num_heads, head_dim = attended.shape
    width = num_heads * head_dim
    gated = attended.new_empty(rows, width)
    if rows:
        attention_gate_kernel[elementwise_grid(rows, width)](attended, gate, gated, W=width, BLOCK=ELEMENTWISE_BLOCK)
    return gated


@triton.jit
def attention_gate_fused_kernel(
    attended_ptr,  # [R, K]
    qkv_ptr,  # float32 [PARTS, R, ...], strides part_stride and row_stride
    x_ptr,  # [R, K]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    part_stride,
    row_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
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
    store_group(values, row, group, x_ptr, planes_ptr, scale_ptr, K)


def attention_gate_fused(attended, qkv_parts):
    num_rows, heads, head_dim = attended.shape
    width = heads * head_dim
    rows = new_rows(num_rows, width, attended.dtype, attended.device)
    if num_rows:
        attention_gate_fused_kernel[(width // 128, num_rows)](
            attended,
            qkv_parts,
            *rows,
            qkv_parts.stride(0),
            qkv_parts.stride(1),
            K=width,
            D=head_dim,
            PARTS=len(qkv_parts),
            num_warps=1,
            **launch_options(_GATE_FUSED, heads),
        )
    return FixedRows(*rows, None)
