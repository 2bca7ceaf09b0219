"""Routed experts of a decode or verify step in Triton, weights of 4, 3 or 2 bits.

They take four launches. Rows share MMAs, but a row's results are exact integer dots with a group's weights, scaled and
added group after group (`int4_tiles.py`), so they do not depend on which rows share an MMA:

    gate_up   (tile of 8 inner values, pair)   int8 MMA over the row's two planes, SiLU(gate) * up   -> float32 [R*k, I]
    planes    (pair, group of 128)             the inner values as four int8 planes, 30 bits         -> int8 [R*k, 4, I]
    down      (tile of 16 columns, pair)       int8 MMA over the four planes, times the weight       -> float32 [R*k, H]
    sum       (row, columns)                   the k slots in their order                            -> float32 [R, H]

A pair is a row and one of its k expert slots. The program of the first pair with an expert computes all pairs with that
expert (its sharers) and the other programs return at once, so an expert's weights are loaded from memory once per
launch. More sharers than an MMA has columns for take further rounds over the same weights, from the cache. The shared
expert's SwiGLU runs in the gate_up launch and its down in the planes launch, which have idle resources. A step of many
rows lists each expert's pairs first and computes the shared expert's down last (`lists.py`, `grouped_int4.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.expert_tiles import tile_bits
from onebox.kernels.common.arithmetic import swiglu
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import load_squares, row_factors
from onebox.kernels.common.launch import ceil_div, divisor, next_power_of_2
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.tuning import WEIGHT_LOADS, Tunable
from onebox.kernels.experts.grouped_int4 import grouped_down, grouped_gate_up
from onebox.kernels.experts.int4_tiles import GROUP, tile_row_dot
from onebox.kernels.experts.lists import pair_lists, shared_down, shared_slice
from onebox.kernels.experts.slots import (
    is_grouped,
    pair_of_program,
    sharers,
    sharing,
    spread,
    sum_slots,
    tiles_key,
    workspace,
)
from onebox.kernels.float_linear.parts import TileLaunch, parts_tile

__all__ = ["routed_experts_int4", "routed_experts_int4_fused"]

_GATE_UP, _DOWN = Tunable("gate_up", WEIGHT_LOADS), Tunable("down", WEIGHT_LOADS)
_PLANES = Tunable("planes")

# `num_pairs` is not specialised: another row count must not recompile, and the loop over sharers needs a runtime value.


@triton.jit(do_not_specialize=["num_pairs"])
def experts_gate_up_kernel(
    planes_ptr,  # int8 [R, 2, GROUPS * 128]
    scale_ptr,  # float32 [R, GROUPS]
    ids_ptr,  # int32 [R, SLOTS]
    tiles_ptr,  # uint8 [E, TILES, GROUPS, 256 * BITS]
    tile_scale_ptr,  # [E, TILES, GROUPS, 16]
    squares_ptr,  # float32 [R, GROUPS], or None for rows without a pending norm division
    inner_ptr,  # float32 [R * SLOTS, TILES * 8]
    shared_ptr,  # float32 [SHARED_PARTS, R, 2 * SHARED]
    shared_inner_ptr,  # [R, SHARED]
    num_pairs,
    eps,
    SHARED: tl.constexpr,  # the shared expert's inner values
    SHARED_PARTS: tl.constexpr,  # 0 without a shared expert
    SHARED_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (tile, pair), and after the tiles one per pair for a slice of the shared expert's inner values."""
    # `wait` comes before `release`: the next kernel may read the ids before its own wait, because they are complete.
    wait(DEPENDENT)
    release(DEPENDENT)
    tile = tl.program_id(0)
    if tile == TILES:
        if SHARED_PARTS > 0:
            rows = num_pairs // SLOTS
            shared_slice(shared_ptr, shared_inner_ptr, rows, SHARED, SHARED_PARTS, SLOTS, SHARED_BLOCK)
        return
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return

    base = (expert.to(tl.int64) * TILES + tile) * GROUPS
    column = tl.arange(0, 2 * ROWS)
    place = tl.arange(0, ROWS)
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        column_pair = spread(found, column // 2, ROWS)
        place_pair = spread(found, place, ROWS)
        plane = (column_pair // SLOTS) * 2 + column % 2
        if squares_ptr is not None:
            # Loaded together with the weights, used after the last of them.
            squares = load_squares(squares_ptr, place_pair // SLOTS, num_pairs // SLOTS, GROUPS * GROUP, GROUPS_BLOCK)
        total = tile_row_dot(
            tiles_ptr + base * (256 * BITS),
            tile_scale_ptr + base * 16,
            planes_ptr + plane[:, None] * (GROUPS * GROUP) + tl.arange(0, 64)[None, :],
            (column_pair < num_pairs)[:, None],
            scale_ptr + (place_pair // SLOTS) * GROUPS,
            place_pair < num_pairs,
            BITS,
            GROUPS,
            UNROLL,
            2 * ROWS,
            PREFETCH,
            False,
        )
        if squares_ptr is not None:
            total *= row_factors(squares, eps, GROUPS * GROUP)[None, :]
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, 8, ROWS)), (1, 2, 0)))
        inner_column = tile * 8 + tl.arange(0, 8)
        tl.store(
            inner_ptr + place_pair[None, :] * (TILES * 8) + inner_column[:, None],
            swiglu(gate, up),
            mask=(place_pair < num_pairs)[None, :],
        )
        pair = following


@triton.jit
def _split_inner(
    pair,
    group,
    inner_ptr,  # float32 [pairs, GROUPS * 128]
    planes_ptr,  # int8 [pairs, 4, GROUPS * 128]
    scale_ptr,  # float32 [pairs, GROUPS]
    GROUPS: tl.constexpr,
):
    """A group of a pair's inner values as four planes."""
    column = group * GROUP + tl.arange(0, GROUP)
    inner = tl.load(inner_ptr + pair * (GROUPS * GROUP) + column)
    # The scale is a power of two from the exponent of the largest magnitude: multiplying by it is exact. Below 2^-96 it
    # would leave float32's range and is clamped; infinities and NaN result in NaN.
    largest = tl.max(inner.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0) >> 23
    exponent = tl.minimum(tl.maximum(largest, 30), 254)
    up = ((283 - exponent) << 23).to(tl.float32, bitcast=True)
    down = tl.where(largest == 255, 0x7FC00000, (exponent - 29) << 23).to(tl.float32, bitcast=True)
    value = tl.where(largest == 255, 0.0, inner * up).to(tl.int32)  # below 2^30; truncation loses less than 2^-30 of it
    out_ptrs = planes_ptr + pair * (4 * GROUPS * GROUP) + column
    for plane in tl.static_range(3, -1, -1):
        byte = value.to(tl.int8)
        tl.store(out_ptrs + plane * (GROUPS * GROUP), byte)
        value = (value - byte.to(tl.int32)) >> 8
    tl.store(scale_ptr + pair * GROUPS + group, down)


@triton.jit(do_not_specialize=["num_pairs", "R"])
def experts_planes_kernel(
    inner_ptr,  # float32 [pairs, GROUPS * 128]
    planes_ptr,  # int8 [pairs, 4, GROUPS * 128]
    scale_ptr,  # float32 [pairs, GROUPS]
    x_ptr,  # [R, K]: the shared expert's inner values
    weight_ptr,  # this and the next five as in `float_parts`
    weight_scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [PARTS, R, N]
    N: tl.constexpr,
    scale_stride,
    num_pairs,
    R,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # None without a shared expert
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKED: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The first programs split inner values; the others compute the shared expert's down and load its weights early."""
    release(DEPENDENT)
    program = tl.program_id(0)
    if program < num_pairs * GROUPS:
        wait(DEPENDENT)
        _split_inner(program // GROUPS, program % GROUPS, inner_ptr, planes_ptr, scale_ptr, GROUPS)
    elif FORMAT is not None:
        parts_tile(
            program - num_pairs * GROUPS,
            x_ptr,
            None,
            weight_ptr,
            weight_scale_ptr,
            multiplier_ptr,
            out_ptr,
            R,
            N,
            scale_stride,
            0.0,
            K,
            FORMAT,
            TILES,
            BLOCK_R,
            CHUNKED,
            PARTS,
            GROUPS_BLOCK,
            DEPENDENT,
        )


@triton.jit(do_not_specialize=["num_pairs"])
def experts_down_kernel(
    planes_ptr,  # int8 [pairs, 4, GROUPS * 128], most significant first
    scale_ptr,  # float32 [pairs, GROUPS]
    ids_ptr,  # int32 [pairs]
    weights_ptr,  # float32 [pairs]
    tiles_ptr,  # uint8 [E, TILES, GROUPS, 256 * BITS]
    tile_scale_ptr,  # [E, TILES, GROUPS, 16]
    out_ptr,  # float32 [pairs, TILES * 16]
    num_pairs,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Ids and weights are loaded before the wait: gate_up, two launches earlier, waited for the kernel that wrote them
    # before it released later kernels.
    release(DEPENDENT)
    tile = tl.program_id(0)
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return

    base = (expert.to(tl.int64) * TILES + tile) * GROUPS
    column = tl.arange(0, 4 * ROWS)
    half = tl.arange(0, 2 * ROWS)
    place = tl.arange(0, ROWS)
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        column_pair = spread(found, column // 4, ROWS)
        half_pair = spread(found, half // 2, ROWS)
        place_pair = spread(found, place, ROWS)
        weight = tl.load(weights_ptr + place_pair, mask=place_pair < num_pairs, other=0.0)
        halves = tile_row_dot(
            tiles_ptr + base * (256 * BITS),
            tile_scale_ptr + base * 16,
            planes_ptr + (column_pair * 4 + column % 4)[:, None] * (GROUPS * GROUP) + tl.arange(0, 64)[None, :],
            (column_pair < num_pairs)[:, None],
            scale_ptr + half_pair * GROUPS,
            half_pair < num_pairs,
            BITS,
            GROUPS,
            UNROLL,
            4 * ROWS,
            PREFETCH,
            DEPENDENT,
        )
        upper, lower = tl.split(tl.reshape(halves, (16, ROWS, 2)))
        tl.store(
            out_ptr + place_pair[None, :] * (TILES * 16) + (tile * 16 + tl.arange(0, 16))[:, None],
            (upper * 65536.0 + lower) * weight[None, :],
            mask=(place_pair < num_pairs)[None, :],
        )
        pair = following


def routed_experts_int4(planes, scale, ids, weights, gate_up, gate_up_scale, down, down_scale):
    rows = FixedRows(planes, planes, scale, None)
    slots, _, _ = routed_experts_int4_fused(rows, ids, weights, gate_up, gate_up_scale, down, down_scale)
    return sum_slots(slots, torch.float32)


def routed_experts_int4_fused(rows, ids, weights, gate_up, gate_up_scale, down, down_scale, shared=None):
    num_pairs = ids.numel()
    inner, slots = workspace(ids, gate_up.shape[1] * 8, down.shape[1] * 16)
    gate_up_parts, down_weight = shared or (None, None)
    shared = None if gate_up_parts is None else _room_for_inner(gate_up_parts, rows.x.dtype)
    planes = torch.empty((num_pairs, 4, inner.shape[1]), dtype=torch.int8, device=ids.device)
    scale = torch.empty((num_pairs, down.shape[2]), dtype=torch.float32, device=ids.device)
    if is_grouped(ids):
        lists = pair_lists(ids, len(gate_up), gate_up_parts, shared)
        grouped_gate_up(rows, lists, ids.shape[1], gate_up, gate_up_scale, inner)
        _split(inner, planes, scale, None, TileLaunch.of(rows.x, None))
        grouped_down(planes, scale, lists, weights, down, down_scale, slots)
        return slots, shared, shared_down(shared, down_weight)
    launch = TileLaunch.of(rows.x if shared is None else shared, down_weight)
    if num_pairs:
        _gate_up(rows, ids, gate_up, gate_up_scale, inner, gate_up_parts, shared)
        _split(inner, planes, scale, shared, launch)
        _down(planes, scale, ids, weights, down, down_scale, slots)
    return slots, shared, launch.out


def _room_for_inner(gate_up_parts: Tensor, dtype: torch.dtype) -> Tensor:
    _, num_rows, width = gate_up_parts.shape
    return torch.empty((num_rows, width // 2), dtype=dtype, device=gate_up_parts.device)


def _gate_up(
    rows: FixedRows,
    ids: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    inner: Tensor,
    shared_parts: Tensor | None,
    shared_inner: Tensor | None,
) -> None:
    """Writes the inner values of all pairs and, given parts of its gate_up, those of the shared expert."""
    tiles, groups = gate_up.shape[1:3]
    num_parts, shared_size = (0, 1) if shared_parts is None else (len(shared_parts), shared_parts.shape[2] // 2)
    experts_gate_up_kernel[(tiles + (num_parts > 0), ids.numel())](
        rows.planes,
        rows.scale,
        ids,
        gate_up,
        gate_up_scale,
        rows.squares,
        inner,
        shared_parts,
        shared_inner,
        ids.numel(),
        rows.eps,
        SHARED=shared_size,
        SHARED_PARTS=num_parts,
        SHARED_BLOCK=next_power_of_2(ceil_div(shared_size, ids.shape[1])),
        BITS=tile_bits(gate_up),
        GROUPS=groups,
        GROUPS_BLOCK=next_power_of_2(groups),
        TILES=tiles,
        SLOTS=ids.shape[1],
        ROWS=4,
        num_warps=1,
        **sharing(ids),
        **_options(ids, _GATE_UP, gate_up),
    )


def _split(inner: Tensor, planes: Tensor, scale: Tensor, shared_inner: Tensor | None, launch: TileLaunch) -> None:
    """Splits inner values into planes and, in the same launch, computes the shared expert's down if it has tiles."""
    num_pairs, groups = scale.shape
    experts_planes_kernel[(num_pairs * groups + launch.programs,)](
        inner,
        planes,
        scale,
        shared_inner,
        *launch.arguments,
        num_pairs,
        0 if shared_inner is None else len(shared_inner),
        GROUPS=groups,
        **launch.constants,
        **launch_options(_PLANES, groups),
    )


def _down(
    planes: Tensor, scale: Tensor, ids: Tensor, weights: Tensor, down: Tensor, down_scale: Tensor, slots: Tensor
) -> None:
    """Writes the weighted output of each pair."""
    tiles, groups = down.shape[1:3]
    experts_down_kernel[(tiles, ids.numel())](
        planes,
        scale,
        ids,
        weights,
        down,
        down_scale,
        slots,
        ids.numel(),
        BITS=tile_bits(down),
        GROUPS=groups,
        TILES=tiles,
        ROWS=2 if len(ids) <= 4 else 4,
        num_warps=1,
        **sharing(ids),
        **_options(ids, _DOWN, down),
    )


def _options(ids: Tensor, kernel: Tunable, tiles: Tensor) -> dict[str, int | bool]:
    """Launch options by the number of rows; the number of groups in flight must divide that of `tiles`."""
    crowd = "one" if len(ids) == 1 else "few" if len(ids) <= 4 else "many"
    options = launch_options(kernel, f"{crowd}_{tiles_key(tiles)}", UNROLL=4, maxnreg=128, PREFETCH=1)
    return {**options, "UNROLL": divisor(tiles.shape[2], options["UNROLL"])}
