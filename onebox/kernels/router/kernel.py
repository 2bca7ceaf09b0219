"""The router in Triton: one warp a row, which looks for the largest logit as often as experts are chosen."""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import ordered_bits
from onebox.spec.errors import MismatchError

__all__ = ["choose", "route"]


@triton.jit
def choose(
    logits,  # float32 [BLOCK], those of E experts
    row,
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
    # One zero and one NaN: -0 ties with +0, and a NaN of either sign comes first, as in torch's sort.
    logits = tl.where(logits == 0.0, 0.0, logits)
    value = tl.where(logits != logits, 0x7FC00000, ordered_bits(logits.to(tl.int32, bitcast=True)))
    removed = -0x80000000  # below every logit
    value = tl.where(experts < E, value, removed)

    places = tl.arange(0, CHOSEN_BLOCK)
    ids = tl.zeros((CHOSEN_BLOCK,), tl.int32)
    values = tl.full((CHOSEN_BLOCK,), removed, tl.int32)
    place = 0
    while place < rounds:  # no constant, so that no compiler writes it out: that takes longer to fetch than to run
        # A GPU has one instruction for the largest of a warp's 32-bit integers: the value first, then the lowest id.
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
    tl.store(ids_ptr + row * CHOSEN + places, ids, mask=chosen)
    tl.store(weights_ptr + row * CHOSEN + places, share / tl.sum(share, 0), mask=chosen)


@triton.jit(do_not_specialize=["rounds"])
def route_kernel(
    logits_ptr,  # float32 [R, E]
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
    choose(logits, row, ids_ptr, weights_ptr, E, rounds, CHOSEN, CHOSEN_BLOCK, BLOCK)


def route(logits, k):
    rows, experts = logits.shape
    if not 1 <= k <= min(16, experts):
        raise MismatchError(f"A row goes to 1 to 16 of its {experts} experts, not to {k}.")
    ids = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    route_kernel[(rows,)](
        logits,
        ids,
        weights,
        experts,
        k,
        CHOSEN=k,
        CHOSEN_BLOCK=triton.next_power_of_2(k),
        BLOCK=triton.next_power_of_2(experts),
        num_warps=1,
    )
    return ids, weights
