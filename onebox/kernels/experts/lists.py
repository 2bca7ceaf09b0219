"""The pairs of each expert, for a step of many rows: one launch, which also computes the shared expert's SwiGLU.

With few rows every program of an expert kernel looks for the pairs of its own expert (`slots.py`). With many rows that
search would take longer than the weights. Here one program an expert writes its pairs into a list, in their order, and
the kernels that follow have programs for each expert and some of its matrix rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import rounded, swiglu
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.launch import ceil_div, next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.tuning import Tunable
from onebox.kernels.float_linear.parts import float_parts

__all__ = ["ExpertLists", "listed_pairs", "pair_lists", "shared_down", "shared_slice"]

_LISTS = Tunable("expert_lists")

_SLICE = 256
"""Values of the shared expert that a program computes."""


class ExpertLists(NamedTuple):
    """Which pairs each expert has. A row chooses an expert once, so a list is at most as long as there are rows."""

    counts: Tensor  # int32 [E]
    pairs: Tensor  # int32 [E, R]: a list's first `count` places are set


@triton.jit
def _shared_inner(
    parts_ptr,  # float32 [PARTS, R, 2 * SIZE]
    inner_ptr,  # [R, SIZE]
    row,  # int64
    R,
    column,
    inside,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Writes SiLU(gate) * up of some columns of a row of the shared expert."""
    at = row * (2 * SIZE) + column
    gate = sum_parts(parts_ptr, R * (2 * SIZE), at, inside, PARTS)
    up = sum_parts(parts_ptr, R * (2 * SIZE), at + SIZE, inside, PARTS)
    inner = rounded(swiglu(gate, up), inner_ptr.dtype.element_ty)
    tl.store(inner_ptr + row * SIZE + column, inner, mask=inside)


@triton.jit
def shared_slice(
    parts_ptr,  # float32 [PARTS, R, 2 * SIZE]
    inner_ptr,  # [R, SIZE]
    R,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The shared expert's inner values in a launch over pairs: each of a row's SLOTS pairs computes a slice of them."""
    pair = tl.program_id(1)
    OWN: tl.constexpr = (SIZE + SLOTS - 1) // SLOTS
    place = tl.arange(0, BLOCK)
    column = pair % SLOTS * OWN + place
    inside = (place < OWN) & (column < SIZE)
    _shared_inner(parts_ptr, inner_ptr, (pair // SLOTS).to(tl.int64), R, column, inside, SIZE, PARTS)


@triton.jit(do_not_specialize=["num_pairs", "R"])
def expert_lists_kernel(
    ids_ptr,  # int32 [R, slots]
    counts_ptr,  # int32 [E]
    pairs_ptr,  # int32 [E, R]
    shared_ptr,  # float32 [SHARED_PARTS, R, 2 * SHARED]
    shared_inner_ptr,  # [R, SHARED]
    num_pairs,
    R,
    E: tl.constexpr,
    PAIRS: tl.constexpr,  # num_pairs rounded up to a power of two
    SHARED: tl.constexpr,  # the shared expert's inner values
    SHARED_PARTS: tl.constexpr,  # 0 without a shared expert
    SLICE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs 0 .. E - 1 write an expert's list; the others a slice of a row's shared inner values."""
    release(DEPENDENT)
    wait(DEPENDENT)
    program = tl.program_id(0)
    if program < E:
        pairs = tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        is_own = (ids == program).to(tl.int32)
        place = tl.cumsum(is_own, 0) - 1
        tl.store(pairs_ptr + program * R + place, pairs, mask=is_own > 0)
        tl.store(counts_ptr + program, tl.sum(is_own, 0))
    elif SHARED_PARTS > 0:
        SLICES: tl.constexpr = (SHARED + SLICE - 1) // SLICE
        column = (program - E) % SLICES * SLICE + tl.arange(0, SLICE)
        row = ((program - E) // SLICES).to(tl.int64)
        _shared_inner(shared_ptr, shared_inner_ptr, row, R, column, column < SHARED, SHARED, SHARED_PARTS)


@triton.jit
def listed_pairs(pairs_ptr, expert, start, place, count, num_pairs, R):
    """The pairs at places start + place of an expert's list; num_pairs, which is none, behind its end."""
    at = start + place
    return tl.load(pairs_ptr + expert * R + at, mask=at < count, other=num_pairs)


def pair_lists(
    ids: Tensor, experts: int, shared_parts: Tensor | None = None, inner: Tensor | None = None
) -> ExpertLists:
    """The lists of ids int32 [R, k], and, given parts of its gate_up, the shared expert's inner values [R, J]."""
    num_rows = len(ids)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    pairs = torch.empty((experts, num_rows), dtype=torch.int32, device=ids.device)
    num_parts, size = (0, _SLICE) if shared_parts is None else (len(shared_parts), shared_parts.shape[2] // 2)
    slices = 0 if shared_parts is None else num_rows * ceil_div(size, _SLICE)
    expert_lists_kernel[(experts + slices,)](
        ids,
        counts,
        pairs,
        shared_parts,
        inner,
        ids.numel(),
        num_rows,
        E=experts,
        PAIRS=max(64, next_power_of_2(ids.numel())),
        SHARED=size,
        SHARED_PARTS=num_parts,
        SLICE=_SLICE,
        num_warps=1,
        **launch_options(_LISTS, experts),
    )
    return ExpertLists(counts, pairs)


def shared_down(values: Tensor | None, weight: FloatWeight | None) -> Tensor | None:
    """The shared expert's down of its inner values [R, J], as parts, in a launch of its own.

    With many rows it takes twice the registers that other programs of a launch would, and so their places.
    """
    if values is None or weight is None:
        return None
    parts: Tensor = float_parts(FixedRows(values, values, values, None), weight)
    return parts
