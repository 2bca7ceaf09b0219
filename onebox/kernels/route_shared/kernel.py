"""The router's choice and the shared expert's inner values in Triton: one launch, a warp a row or 128 inner values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.dependent import dependent, release, wait
from onebox.kernels.experts.slots import swiglu
from onebox.kernels.router.kernel import choose
from onebox.spec.errors import MismatchError

__all__ = ["route_shared", "sum_parts"]

_BLOCK = 128


@triton.jit
def sum_parts(parts_ptr, part_stride, at, inside, PARTS: tl.constexpr):
    """The sum of what stands at `at` in each of the parts, first to last, in float32."""
    total = tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * part_stride + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["R"])
def route_shared_kernel(
    router_ptr,  # float32 [ROUTER_PARTS, R, E + 1]
    gate_up_ptr,  # float32 [SHARED_PARTS, R, 2 I]
    ids_ptr,  # int32 [R, CHOSEN]
    weights_ptr,  # float32 [R, CHOSEN]
    share_ptr,  # float32 [R]
    inner_ptr,  # [R, I]
    R,
    router_stride,  # from part to part, as the next
    gate_up_stride,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    ROUTER_PARTS: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs 0 .. R - 1 choose a row's experts, the others take BLOCK inner values of a row."""
    release(DEPENDENT)
    wait(DEPENDENT)
    program = tl.program_id(0)
    if program < R:
        row = program.to(tl.int64)
        experts = tl.arange(0, EXPERTS_BLOCK)
        logits = sum_parts(router_ptr, router_stride, row * (E + 1) + experts, experts < E, ROUTER_PARTS)
        choose(logits, row, ids_ptr, weights_ptr, E, CHOSEN, CHOSEN_BLOCK, EXPERTS_BLOCK)
        share = sum_parts(router_ptr, router_stride, row * (E + 1) + E, True, ROUTER_PARTS)
        tl.store(share_ptr + row, tl.sigmoid(share))
    else:
        BLOCKS: tl.constexpr = I // BLOCK
        row = ((program - R) // BLOCKS).to(tl.int64)
        columns = ((program - R) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        at = row * (2 * I) + columns
        gate = sum_parts(gate_up_ptr, gate_up_stride, at, columns < I, SHARED_PARTS)
        up = sum_parts(gate_up_ptr, gate_up_stride, at + I, columns < I, SHARED_PARTS)
        tl.store(inner_ptr + row * I + columns, swiglu(gate, up).to(inner_ptr.dtype.element_ty))


def route_shared(
    router_parts: Tensor, gate_up_parts: Tensor, k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `onebox.kernels.route_shared.route_shared`."""
    num_router_parts, rows, logits = router_parts.shape
    inner_size = gate_up_parts.shape[2] // 2
    if not 1 <= k <= min(16, logits - 1):
        raise MismatchError(f"A row goes to 1 to 16 of its {logits - 1} experts, not to {k}.")
    device = router_parts.device
    ids = torch.empty((rows, k), dtype=torch.int32, device=device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=device)
    share = torch.empty(rows, dtype=torch.float32, device=device)
    inner = torch.empty((rows, inner_size), dtype=dtype, device=device)
    if rows:
        route_shared_kernel[(rows + rows * (inner_size // _BLOCK),)](
            router_parts,
            gate_up_parts,
            ids,
            weights,
            share,
            inner,
            rows,
            router_parts.stride(0),
            gate_up_parts.stride(0),
            E=logits - 1,
            I=inner_size,
            ROUTER_PARTS=num_router_parts,
            SHARED_PARTS=len(gate_up_parts),
            CHOSEN=k,
            CHOSEN_BLOCK=triton.next_power_of_2(k),
            EXPERTS_BLOCK=triton.next_power_of_2(logits - 1),
            BLOCK=_BLOCK,
            num_warps=1,
            **dependent(router_parts, "route_shared"),
        )
    return ids, weights, share, inner
