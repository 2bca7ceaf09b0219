"""The router in Triton: one warp a row, a maximum over 64-bit keys for each expert chosen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.spec.errors import MismatchError

__all__ = ["choose", "route"]


@triton.jit
def _ordered(bits):
    """float32 bits to integers that compare as the floats do; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def choose(
    logits,  # float32 [BLOCK], those of E experts
    row,
    ids_ptr,  # int32 [R, CHOSEN]
    weights_ptr,  # float32 [R, CHOSEN]
    E,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the experts of one row and their weights."""
    experts = tl.arange(0, BLOCK)
    # One zero and one NaN: -0 ties with +0, and a NaN of either sign comes first, as in torch's sort.
    logits = tl.where(logits == 0.0, 0.0, logits)
    value = tl.where(logits != logits, 0x7FC00000, _ordered(logits.to(tl.int32, bitcast=True)))
    # High half the value, low half the id counted down: one maximum finds the larger logit, then the lower id.
    removed = -0x7FFFFFFFFFFFFFFF
    key = tl.where(experts < E, (value.to(tl.int64) << 32) | (0x7FFFFFFF - experts).to(tl.int64), removed)

    places = tl.arange(0, CHOSEN_BLOCK)
    best = tl.full((CHOSEN_BLOCK,), removed, tl.int64)
    for place in tl.range(0, CHOSEN):  # a loop: written out, its instructions take longer to fetch than to run
        largest = tl.max(key, 0)
        best = tl.where(places == place, largest, best)
        key = tl.where(key == largest, removed, key)

    chosen = places < CHOSEN
    logit = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    top = tl.sum(tl.where(places == 0, logit, 0.0), 0)
    share = tl.where(chosen, tl.exp(logit - top), 0.0)
    ids = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    tl.store(ids_ptr + row * CHOSEN + places, ids, mask=chosen)
    tl.store(weights_ptr + row * CHOSEN + places, share / tl.sum(share, 0), mask=chosen)


@triton.jit
def route_kernel(
    logits_ptr,  # float32 [R, E]
    ids_ptr,  # int32 [R, CHOSEN]
    weights_ptr,  # float32 [R, CHOSEN]
    E,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * E + experts, mask=experts < E, other=0.0)
    choose(logits, row, ids_ptr, weights_ptr, E, CHOSEN, CHOSEN_BLOCK, BLOCK)


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.router.route`."""
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
        CHOSEN=k,
        CHOSEN_BLOCK=triton.next_power_of_2(k),
        BLOCK=triton.next_power_of_2(experts),
        num_warps=1,
    )
    return ids, weights
