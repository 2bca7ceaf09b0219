"""The SwiGLU of a dense layer in Triton, from parts of its projection to the rows of the next one."""

import triton
import triton.language as tl

from onebox.kernels.common import arithmetic
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_group
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.rows import GROUP_COLUMNS, FixedRows, new_rows
from onebox.kernels.common.tuning import Tunable

__all__ = ["swiglu_fused"]

_SWIGLU = Tunable("swiglu_fused")


@triton.jit
def swiglu_fused_kernel(
    gate_up_ptr,  # float32 [PARTS, R, 2 I], strides part_stride and row_stride
    x_ptr,  # [R, I]
    planes_ptr,  # int8 [R, 2, I]
    scale_ptr,  # float32 [R, I / 128]
    part_stride,
    row_stride,
    I: tl.constexpr,  # noqa: E741 - the letter of an inner size
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (group, row)."""
    release(DEPENDENT)
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = row * row_stride + group * 128 + tl.arange(0, 128)
    wait(DEPENDENT)
    gate = sum_parts(gate_up_ptr, part_stride, at, True, PARTS)
    up = sum_parts(gate_up_ptr, part_stride, at + I, True, PARTS)
    store_group(arithmetic.swiglu(gate, up), row, group, x_ptr, planes_ptr, scale_ptr, I)


def swiglu_fused(gate_up_parts, dtype):
    num_parts, num_rows, width = gate_up_parts.shape
    inner = width // 2
    rows = new_rows(num_rows, inner, dtype, gate_up_parts.device)
    if num_rows:
        swiglu_fused_kernel[(inner // GROUP_COLUMNS, num_rows)](
            gate_up_parts,
            *rows,
            gate_up_parts.stride(0),
            gate_up_parts.stride(1),
            I=inner,
            PARTS=num_parts,
            num_warps=1,
            **launch_options(_SWIGLU, inner),
        )
    return FixedRows(*rows, None)
