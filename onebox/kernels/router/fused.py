"""The router's choice in Triton, a warp a row, and in the same launch a warp for each tile of the shared gate_up."""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.float_linear.parts import TileLaunch, parts_tile
from onebox.kernels.router.kernel import choose
from onebox.spec.errors import MismatchError

__all__ = ["route_shared"]

_ROUTE = Tunable("route_shared")


@triton.jit(do_not_specialize=["R", "rounds"])
def route_shared_kernel(
    router_ptr,  # float32 [ROUTER_PARTS, R, E + 1]
    ids_ptr,  # int32 [R, CHOSEN]
    weights_ptr,  # float32 [R, CHOSEN]
    share_ptr,  # float32 [R]
    router_stride,  # from part to part
    rounds,  # CHOSEN
    x_ptr,  # [R, K], this and all that follow: as in `float_parts`
    squares_ptr,
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,
    N: tl.constexpr,
    scale_stride,
    R,
    eps,
    E: tl.constexpr,
    ROUTER_PARTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # None where there is no shared expert
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs 0 .. R - 1 choose a row's experts; the others are tiles, whose weights are read before they wait."""
    release(DEPENDENT)
    program = tl.program_id(0)
    if program < R:
        wait(DEPENDENT)
        row = program.to(tl.int64)
        experts = tl.arange(0, EXPERTS_BLOCK)
        # Both before the choice, which takes long: nothing is left to load behind it.
        share = sum_parts(router_ptr, router_stride, row * (E + 1) + E, True, ROUTER_PARTS)
        logits = sum_parts(router_ptr, router_stride, row * (E + 1) + experts, experts < E, ROUTER_PARTS)
        tl.store(share_ptr + row, tl.sigmoid(share))
        choose(logits, row, ids_ptr, weights_ptr, E, rounds, CHOSEN, CHOSEN_BLOCK, EXPERTS_BLOCK)
    elif FORMAT is not None:
        parts_tile(
            program - R,
            x_ptr,
            squares_ptr,
            weight_ptr,
            scale_ptr,
            multiplier_ptr,
            out_ptr,
            R,
            N,
            scale_stride,
            eps,
            K,
            FORMAT,
            BLOCK_R,
            BLOCK_K,
            SPLIT,
            GROUPS_BLOCK,
            DEPENDENT,
        )


def route_shared(router_parts, k, rows, gate_up=None):
    num_router_parts, num_rows, logits = router_parts.shape
    if not 1 <= k <= min(16, logits - 1):
        raise MismatchError(f"A row goes to 1 to 16 of its {logits - 1} experts, not to {k}.")
    device = router_parts.device
    ids = torch.empty((num_rows, k), dtype=torch.int32, device=device)
    weights = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    share = torch.empty(num_rows, dtype=torch.float32, device=device)
    launch = TileLaunch.of(rows.x, gate_up)
    if num_rows:
        route_shared_kernel[(num_rows + launch.programs,)](
            router_parts,
            ids,
            weights,
            share,
            router_parts.stride(0),
            k,
            rows.x,
            rows.squares,
            *launch.arguments,
            num_rows,
            rows.eps,
            E=logits - 1,
            ROUTER_PARTS=num_router_parts,
            CHOSEN=k,
            CHOSEN_BLOCK=triton.next_power_of_2(k),
            EXPERTS_BLOCK=triton.next_power_of_2(logits - 1),
            **launch.constants,
            **launch_options(router_parts, _ROUTE, rows.x.shape[1]),
        )
    return ids, weights, share, launch.out
