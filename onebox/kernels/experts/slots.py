"""Shared by all kernels of routed experts: which pairs share an expert, and the sum over a row's slots.

A pair is a row and one of its k expert slots. The program of the first pair with an expert computes all pairs with that
expert (its sharers) and the other programs return at once, so an expert's weights are loaded from memory once per
launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.expert_tiles import tile_bits
from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.tuning import Tunable

__all__ = ["is_grouped", "pair_of_program", "sharers", "sharing", "spread", "sum_slots", "tiles_key", "workspace"]

_GROUPING = Tunable("experts_grouping", ({"GROUPED": 0}, {"GROUPED": 1}))
_FEW_ROWS = 16
"""Up to so many rows the search costs less than a launch for lists, unless this GPU's table says otherwise."""


@triton.jit
def _next_sharer(ids, pairs, expert, after, none):
    """The first pair after `after` that has this expert, or `none`."""
    return tl.min(tl.where((ids == expert) & (pairs > after), pairs, none), 0)


@triton.jit
def pair_of_program(ids_ptr, num_pairs, PAIRS: tl.constexpr, ALONE: tl.constexpr):
    """(the program's pair, its expert, all pairs, their experts, the first pair with the same expert).

    With ALONE (one row, so all experts differ) there is no search, here or in `sharers`. A pair of a row without a
    sequence has expert -1 and no first pair, so that its program returns at once.
    """
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair)
    pairs = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    first = pair if ALONE else _next_sharer(ids, pairs, expert, -1, num_pairs)
    first = tl.where(expert < 0, -1, first)
    return pair, expert, pairs, ids, first


@triton.jit
def sharers(ids, pairs, expert, first, none, COUNT: tl.constexpr, ALONE: tl.constexpr):
    """(`first` and the next pairs with its expert, padded to COUNT with `none`; the next such pair after these)."""
    found = (first,)
    for i in tl.static_range(1, COUNT):
        found += (none if ALONE else _next_sharer(ids, pairs, expert, found[i - 1], none),)  # type: ignore[assignment]
    following = none if ALONE else _next_sharer(ids, pairs, expert, found[COUNT - 1], none)
    return found, following


@triton.jit
def spread(found, place, COUNT: tl.constexpr):
    """The vector of found[place]."""
    result = tl.zeros_like(place) + found[0]
    for i in tl.static_range(1, COUNT):
        result = tl.where(place == i, found[i], result)
    return result


@triton.jit
def experts_sum_kernel(
    slots_ptr,  # float32 [R, SLOTS, H]
    out_ptr,  # [R, H]
    H,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        total += tl.load(slots_ptr + (row * SLOTS + slot) * H + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * H + column, rounded(total, out_ptr.dtype.element_ty), mask=inside)


def sum_slots(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The slots float32 [R, k, H] added over k in order: float32 or, rounded once, bfloat16 [R, H]."""
    rows, k, hidden = slots.shape
    out = torch.empty((rows, hidden), dtype=dtype, device=slots.device)
    experts_sum_kernel[(rows, ceil_div(hidden, 512))](slots, out, hidden, SLOTS=k, BLOCK=512, num_warps=4)
    return out


def workspace(ids: Tensor, inner_size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(inner values [R * k, I], weighted outputs [R, k, H]), both float32."""
    rows, k = ids.shape
    inner = torch.empty((rows * k, inner_size), dtype=torch.float32, device=ids.device)
    return inner, torch.empty((rows, k, hidden), dtype=torch.float32, device=ids.device)


def sharing(ids: Tensor) -> dict[str, int | bool]:
    """Constexprs of the search for sharers; powers of two from 64 keep the number of compiled variants small."""
    return {"PAIRS": max(64, next_power_of_2(ids.numel())), "ALONE": ids.shape[0] == 1}


def tiles_key(tiles: Tensor) -> str:
    """Names the shape of integer tiles [E, tiles, groups, 256 * bits] in tables of launch options."""
    bits = tile_bits(tiles)
    return f"{tiles.shape[2]}" if bits == 4 else f"{tiles.shape[2]}_{bits}bit"


def is_grouped(ids: Tensor) -> bool:
    """Whether each expert's pairs are listed before its kernels (`lists.py`), instead of looked for by them."""
    num_rows = len(ids)
    if num_rows < 2:
        return False
    default = {"GROUPED": int(num_rows > _FEW_ROWS)}
    return bool(_GROUPING.options(max(4, next_power_of_2(num_rows)), default)["GROUPED"])
