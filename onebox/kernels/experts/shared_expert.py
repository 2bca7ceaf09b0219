"""The shared expert's SwiGLU and its sum with the routed experts in Triton, elementwise."""

import torch
import triton
import triton.language as tl

from onebox.kernels.common import arithmetic
from onebox.kernels.common.arithmetic import stable_sigmoid
from onebox.kernels.common.launch import ELEMENTWISE_BLOCK, elementwise_grid

__all__ = ["add_shared", "swiglu"]


@triton.jit
def swiglu_kernel(
    gate_up_ptr,  # [R, 2I]: a row's gate, then its up
    inner_ptr,  # [R, I]
    I: tl.constexpr,  # noqa: E741 - the letter of an expert's inner size
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < I
    gate = tl.load(gate_up_ptr + row * 2 * I + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * I + I + columns, mask=inside, other=0.0).to(tl.float32)
    inner = arithmetic.swiglu(gate, up)
    tl.store(inner_ptr + row * I + columns, inner.to(inner_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_shared_kernel(
    routed_ptr,  # float32 [R, H]
    shared_ptr,  # [R, H]
    logit_ptr,  # [R], stride logit_stride
    total_ptr,  # float32 [R, H]
    logit_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    share = stable_sigmoid(tl.load(logit_ptr + row * logit_stride).to(tl.float32))
    routed = tl.load(routed_ptr + row * H + columns, mask=inside, other=0.0)
    shared = tl.load(shared_ptr + row * H + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + row * H + columns, routed + share * shared, mask=inside)


def swiglu(gate_up):
    rows, inner_size = gate_up.shape[0], gate_up.shape[1] // 2
    inner = gate_up.new_empty(rows, inner_size)
    if rows:
        swiglu_kernel[elementwise_grid(rows, inner_size)](gate_up, inner, I=inner_size, BLOCK=ELEMENTWISE_BLOCK)
    return inner


def add_shared(routed, shared, shared_gate_logit):
    rows, hidden = routed.shape
    total = torch.empty_like(routed)
    if rows:
        add_shared_kernel[elementwise_grid(rows, hidden)](
            routed, shared, shared_gate_logit, total, shared_gate_logit.stride(0), H=hidden, BLOCK=ELEMENTWISE_BLOCK
        )
    return total
