"""The router in Triton: one warp per row, which searches for the largest logit k times.

`route_fused` also has one warp per tile of the shared expert's gate_up, because choosing leaves the memory idle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import ordered_bits
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.launch import next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.float_linear.parts import TileLaunch, parts_tile
from onebox.spec.errors import MismatchError

__all__ = ["route", "route_fused"]

_ROUTE_FUSED = Tunable("route_fused")


@triton.jit
def _choose(
    logits,  # float32 [BLOCK], of E experts
    row,
    num_rows_ptr,  # int32 [1], or None
    ids_ptr,  # int32 [R, CHOSEN]
    weights_ptr,  # float32 [R, CHOSEN]
    E,
    rounds,  # CHOSEN
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the experts of one row and their weights."""
    experts = tl.arange(0, BLOCK)
    # Zeros and NaNs are made uniform: -0 ties with +0, and a NaN of either sign comes first, as in torch's sort.
    logits = tl.where(logits == 0.0, 0.0, logits)
    value = tl.where(logits != logits, 0x7FC00000, ordered_bits(logits.to(tl.int32, bitcast=True)))
    removed = -0x80000000  # below every logit
    value = tl.where(experts < E, value, removed)

    places = tl.arange(0, CHOSEN_BLOCK)
    ids = tl.zeros((CHOSEN_BLOCK,), tl.int32)
    values = tl.full((CHOSEN_BLOCK,), removed, tl.int32)
    place = 0
    while place < rounds:  # not a constexpr, so not unrolled: fetching the code would take longer than running it
        # A GPU has one instruction for the maximum of 32-bit integers over a warp: first the value, then the lowest id.
        largest = tl.max(value, 0)
        expert = tl.min(tl.where(value == largest, experts, BLOCK), 0)
        ids = tl.where(places == place, expert, ids)
        values = tl.where(places == place, largest, values)
        value = tl.where(experts == expert, removed, value)
        place += 1

    chosen = places < CHOSEN
    logit = ordered_bits(values).to(tl.float32, bitcast=True)
    top = tl.sum(tl.where(places == 0, logit, 0.0), 0)
    share = tl.where(chosen, tl.exp(logit - top), 0.0)
    if num_rows_ptr is not None:
        ids = tl.where(row < tl.load(num_rows_ptr), ids, -1)
    tl.store(ids_ptr + row * CHOSEN + places, ids, mask=chosen)
    tl.store(weights_ptr + row * CHOSEN + places, share / tl.sum(share, 0), mask=chosen)


@triton.jit(do_not_specialize=["num_rows_ptr", "rounds"])
def route_kernel(
    logits_ptr,  # float32 [R, E]
    num_rows_ptr,  # int32 [1]: rows from this number on choose nothing; None: all rows choose
    ids_ptr,  # int32 [R, CHOSEN]
    weights_ptr,  # float32 [R, CHOSEN]
    E,
    rounds,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * E + experts, mask=experts < E, other=0.0)
    _choose(logits, row, num_rows_ptr, ids_ptr, weights_ptr, E, rounds, CHOSEN, CHOSEN_BLOCK, BLOCK)


def route(logits, k, num_rows=None):
    rows, experts = logits.shape
    ids, weights = _new_choice(logits, rows, experts, k)
    route_kernel[(rows,)](
        logits,
        num_rows,
        ids,
        weights,
        experts,
        k,
        CHOSEN=k,
        CHOSEN_BLOCK=next_power_of_2(k),
        BLOCK=next_power_of_2(experts),
        num_warps=1,
    )
    return ids, weights


@triton.jit(do_not_specialize=["num_rows_ptr", "router_stride", "R", "rounds"])
def route_fused_kernel(
    router_ptr,  # float32 [ROUTER_PARTS, R, E + 1]
    num_rows_ptr,  # int32 [1], as in `route_kernel`
    ids_ptr,  # int32 [R, CHOSEN]
    weights_ptr,  # float32 [R, CHOSEN]
    share_ptr,  # float32 [R]
    router_stride,  # stride over parts
    rounds,  # CHOSEN
    x_ptr,  # [R, K]; this and the following as in `float_parts`
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
    DIVIDED: tl.constexpr,  # whether the router's parts have the rows' norm division
    H: tl.constexpr,  # the rows' columns
    HIDDEN_GROUPS: tl.constexpr,  # their groups, rounded up to a power of two
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # None without a shared expert
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKED: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs 0 .. R - 1 choose a row's experts; the others compute tiles and load their weights before they wait."""
    release(DEPENDENT)
    program = tl.program_id(0)
    if program < R:
        wait(DEPENDENT)
        row = program.to(tl.int64)
        experts = tl.arange(0, EXPERTS_BLOCK)
        # Both are loaded before the choice, which takes long, so that no load follows it.
        share = sum_parts(router_ptr, router_stride, row * (E + 1) + E, True, ROUTER_PARTS)
        logits = sum_parts(router_ptr, router_stride, row * (E + 1) + experts, experts < E, ROUTER_PARTS)
        if not DIVIDED:
            groups = tl.arange(0, HIDDEN_GROUPS)
            squares = tl.load(squares_ptr + row * (H // 128) + groups, mask=groups < H // 128, other=0.0)
            factor = tl.rsqrt(tl.sum(squares, 0) / H + eps)
            share *= factor
            logits *= factor
        tl.store(share_ptr + row, tl.sigmoid(share))
        _choose(logits, row, num_rows_ptr, ids_ptr, weights_ptr, E, rounds, CHOSEN, CHOSEN_BLOCK, EXPERTS_BLOCK)
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
            TILES,
            BLOCK_R,
            CHUNKED,
            PARTS,
            GROUPS_BLOCK,
            DEPENDENT,
        )


def route_fused(router_parts, k, rows, gate_up=None, num_rows=None, is_divided=True):
    num_router_parts, count, logits = router_parts.shape
    ids, weights = _new_choice(router_parts, count, logits - 1, k)
    share = torch.empty(count, dtype=torch.float32, device=router_parts.device)
    launch = TileLaunch.of(rows.x, gate_up)
    if count:
        route_fused_kernel[(count + launch.programs,)](
            router_parts,
            num_rows,
            ids,
            weights,
            share,
            router_parts.stride(0),
            k,
            rows.x,
            rows.squares,
            *launch.arguments,
            count,
            rows.eps,
            E=logits - 1,
            ROUTER_PARTS=num_router_parts,
            CHOSEN=k,
            CHOSEN_BLOCK=next_power_of_2(k),
            EXPERTS_BLOCK=next_power_of_2(logits - 1),
            DIVIDED=is_divided or rows.squares is None,
            H=rows.x.shape[1],
            HIDDEN_GROUPS=next_power_of_2(max(1, rows.x.shape[1] // 128)),
            **launch.constants,
            **launch_options(_ROUTE_FUSED, rows.x.shape[1]),
        )
    return ids, weights, share, launch.out


def _new_choice(like: Tensor, rows: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (ids [rows, k], weights [rows, k]) on the device of `like`."""
    if not 1 <= k <= min(16, experts):
        raise MismatchError(f"A row goes to 1 to 16 of its {experts} experts, not to {k}.")
    ids = torch.empty((rows, k), dtype=torch.int32, device=like.device)
    return ids, torch.empty((rows, k), dtype=torch.float32, device=like.device)
