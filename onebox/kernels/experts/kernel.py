"""The routed experts in Triton, for the few rows of a decode or verify step.

INT4 takes four launches. Rows meet in them, but a row's numbers are exact integer dots with a group's weights, scaled
and added group after group, so it does not matter which rows share a pass:

    gate_up   (tile of 8 inner values, pair)   int8 MMA over the row's two planes, SiLU(gate) * up   -> float32 [R*k, I]
    planes    (pair, group of 128)             the inner values as four int8 planes, 30 bits         -> int8 [R*k, 4, I]
    down      (tile of 16 columns, pair)       int8 MMA over the four planes, times the weight       -> float32 [R*k, H]
    sum       (row, columns)                   the k slots in their order                            -> float32 [R, H]

A pair is a row and one of its k slots. The first pair with an expert works for all pairs with that expert (its sharers)
and the others end at once, so an expert's weights come from memory once a launch. More sharers than an MMA has columns
for take further rounds over the same weights, from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.dependent import dependent, release, wait
from onebox.kernels.experts.plain import routed_experts_bf16
from onebox.kernels.experts.slots import pair_of_program, sharers, sharing, spread, sum_slots, swiglu, workspace
from onebox.kernels.float_linear.kernel import USES_ASM
from onebox.kernels.float_linear.tiles import PART_BLOCK, FloatWeight, num_parts
from onebox.kernels.float_parts.kernel import parts_arguments, parts_tile
from onebox.kernels.int_linear.kernel import row_factors
from onebox.kernels.rows import FixedRows
from onebox.kernels.tuning import Choice, choose

__all__ = ["expert_slots", "routed_experts", "routed_experts_bf16"]

# `num_pairs` is not specialised: one row more must not compile anew, and the loop over sharers needs a number.
GROUP = tl.constexpr(128)
TILE_BYTES = tl.constexpr(1024)


@triton.jit
def _nibbles(packed, INTERPRETED: tl.constexpr):
    """Sixteen times the codes of a tile's two halves, as int8.

    The assembly works on four bytes at once; Triton's own operators would take a register for each byte. The
    interpreter has no assembly and takes the plain path, which gives the same bits.
    """
    if INTERPRETED:
        low = ((packed << 4) & 0xF0).to(tl.int8, bitcast=True)
        high = (packed & 0xF0).to(tl.int8, bitcast=True)
        return low, high
    else:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 shifted;
            shl.b32 shifted, $2, 4;
            and.b32 $1, $2, 0xF0F0F0F0;
            and.b32 $0, shifted, 0xF0F0F0F0;
            }""",
            constraints="=&r,=&r,r",
            args=[packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _as_weights(half):
    """Bytes of half a tile in fragment order to [16, 64], the columns in the order of `_as_columns`."""
    split = tl.reshape(half, (2, 8, 4, 2, 2, 4))  # kt g t k16 r8 k4
    return tl.reshape(tl.permute(split, (4, 1, 0, 3, 2, 5)), (16, 64))  # r8 g | kt k16 t k4


@triton.jit
def _as_columns(x, COLUMNS: tl.constexpr):
    """Half a group of activations [COLUMNS, 64] to [64, COLUMNS], in the order of the MMA's registers."""
    split = tl.reshape(x, (COLUMNS, 4, 2, 2, 4))  # column t kt k16 k4
    return tl.reshape(tl.permute(split, (2, 3, 1, 4, 0)), (64, COLUMNS))


@triton.jit
def _group_dot(packed, x_ptrs, used, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """16 times the exact dots of a tile with COLUMNS planes; neighbouring planes joined as 256 * even + odd.

    float32 [16, COLUMNS / 2]. The integers stay below 2^30: 128 products of at most 2^7 * 2^7, joined.
    """
    first = tl.load(x_ptrs, mask=used, other=0)
    second = tl.load(x_ptrs + 64, mask=used, other=0)
    low, high = _nibbles(packed, INTERPRETED)
    dots = tl.dot(_as_weights(low), _as_columns(first, COLUMNS), out_dtype=tl.int32)
    dots = tl.dot(_as_weights(high), _as_columns(second, COLUMNS), dots, out_dtype=tl.int32)
    even, odd = tl.split(tl.reshape(dots, (16, COLUMNS // 2, 2)))
    return (even * 256 + odd).to(tl.float32)


@triton.jit
def _load_groups(tile_ptrs, tile_scale_ptrs, start, UNROLL: tl.constexpr):
    """(tiles, scales) of UNROLL groups: so many bytes are under way before the first is used."""
    packed = ()
    scales = ()
    for i in tl.static_range(UNROLL):
        tile = tl.load(tile_ptrs + (start + i) * TILE_BYTES, eviction_policy="evict_first")
        packed += (tile,)  # type: ignore[assignment]
        scales += (tl.load(tile_scale_ptrs + (start + i) * 16),)  # type: ignore[assignment]
    return packed, scales


@triton.jit
def _add_groups(
    total,
    packed,
    scales,
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    for i in tl.static_range(UNROLL):
        dots = _group_dot(packed[i], x_ptrs + i * GROUP, used, COLUMNS, INTERPRETED)
        x_scale = tl.load(x_scale_ptrs + i, mask=scale_used, other=0.0)
        # Said as one operation, so that no variant of this kernel rounds where another does not.
        total = tl.fma(dots, scales[i].to(tl.float32)[:, None] * x_scale[None, :], total)
    return total


@triton.jit
def _tile_row_dot(
    tile_ptrs,
    tile_scale_ptrs,
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A row of tiles with COLUMNS planes: float32 [16, COLUMNS / 2], group after group.

    The first weights are under way before it waits for the planes.
    """
    total = tl.zeros((16, COLUMNS // 2), tl.float32)
    packed, scales = _load_groups(tile_ptrs, tile_scale_ptrs, 0, UNROLL)
    wait(DEPENDENT)
    if GROUPS <= 4 * UNROLL:
        # Few enough to be written out: the next groups are under way while these are multiplied.
        for start in tl.static_range(0, GROUPS, UNROLL):
            next_packed, next_scales = packed, scales
            if start + UNROLL < GROUPS:
                next_packed, next_scales = _load_groups(tile_ptrs, tile_scale_ptrs, start + UNROLL, UNROLL)
            total = _add_groups(
                total,
                packed,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                UNROLL,
                COLUMNS,
                INTERPRETED,
            )
            packed, scales = next_packed, next_scales
    else:
        total = _add_groups(total, packed, scales, x_ptrs, used, x_scale_ptrs, scale_used, UNROLL, COLUMNS, INTERPRETED)
        for start in tl.range(UNROLL, GROUPS, UNROLL, num_stages=1):
            packed, scales = _load_groups(tile_ptrs, tile_scale_ptrs, start, UNROLL)
            total = _add_groups(
                total,
                packed,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                UNROLL,
                COLUMNS,
                INTERPRETED,
            )
    return total * 0.0625


@triton.jit(do_not_specialize=["num_pairs"])
def experts_gate_up_kernel(
    planes_ptr,  # int8 [R, 2, GROUPS * 128]
    scale_ptr,  # float32 [R, GROUPS]
    ids_ptr,  # int32 [R, SLOTS]
    tiles_ptr,  # uint8 [E, TILES, GROUPS, 1024]
    tile_scale_ptr,  # [E, TILES, GROUPS, 16]
    squares_ptr,  # float32 [R, GROUPS], or None for rows that have their length already
    inner_ptr,  # float32 [R * SLOTS, TILES * 8]
    num_pairs,
    eps,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # It waits before it releases: whoever starts then may read the ids at once, they are complete.
    wait(DEPENDENT)
    release(DEPENDENT)
    tile = tl.program_id(0)
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return

    base = (expert.to(tl.int64) * TILES + tile) * GROUPS
    tile_ptrs = tiles_ptr + base * TILE_BYTES + tl.arange(0, TILE_BYTES)
    tile_scale_ptrs = tile_scale_ptr + base * 16 + tl.arange(0, 16)
    column = tl.arange(0, 2 * ROWS)
    place = tl.arange(0, ROWS)
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        column_pair = spread(found, column // 2, ROWS)
        place_pair = spread(found, place, ROWS)
        plane = (column_pair // SLOTS) * 2 + column % 2
        total = _tile_row_dot(
            tile_ptrs,
            tile_scale_ptrs,
            planes_ptr + plane[:, None] * (GROUPS * GROUP) + tl.arange(0, 64)[None, :],
            (column_pair < num_pairs)[:, None],
            scale_ptr + (place_pair // SLOTS) * GROUPS,
            place_pair < num_pairs,
            GROUPS,
            UNROLL,
            2 * ROWS,
            INTERPRETED,
            False,
        )
        if squares_ptr is not None:
            rows = place_pair // SLOTS
            total *= row_factors(squares_ptr, rows, num_pairs // SLOTS, eps, GROUPS * GROUP, GROUPS_BLOCK)[None, :]
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
    inner_ptr,  # float32 [P, GROUPS * 128]
    planes_ptr,  # int8 [P, 4, GROUPS * 128]
    scale_ptr,  # float32 [P, GROUPS]
    GROUPS: tl.constexpr,
):
    """A group of a pair's inner values as four planes."""
    column = group * GROUP + tl.arange(0, GROUP)
    inner = tl.load(inner_ptr + pair * (GROUPS * GROUP) + column)
    # A power of two as scale, from the exponent of the largest magnitude: multiplying by it is exact. Below 2^-96 the
    # scale would leave float32 and stays; infinities and NaN come out as NaN.
    largest = tl.max(inner.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0) >> 23
    exponent = tl.minimum(tl.maximum(largest, 30), 254)
    up = ((283 - exponent) << 23).to(tl.float32, bitcast=True)
    down = tl.where(largest == 255, 0x7FC00000, (exponent - 29) << 23).to(tl.float32, bitcast=True)
    value = tl.where(largest == 255, 0.0, inner * up).to(tl.int32)  # below 2^30; what is cut off is below 2^-30 of it
    out_ptrs = planes_ptr + pair * (4 * GROUPS * GROUP) + column
    for plane in tl.static_range(3, -1, -1):
        byte = value.to(tl.int8)
        tl.store(out_ptrs + plane * (GROUPS * GROUP), byte)
        value = (value - byte.to(tl.int32)) >> 8
    tl.store(scale_ptr + pair * GROUPS + group, down)


@triton.jit(do_not_specialize=["num_pairs", "R"])
def experts_planes_kernel(
    inner_ptr,  # float32 [P, GROUPS * 128]
    planes_ptr,  # int8 [P, 4, GROUPS * 128]
    scale_ptr,  # float32 [P, GROUPS]
    x_ptr,  # [R, K]: the shared expert's inner values
    weight_ptr,  # this and the next five: as in `float_parts`
    weight_scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [SPLIT, R, N]
    N,
    scale_stride,
    num_pairs,
    R,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # None where there is no shared expert
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The first programs split inner values; the others are the shared expert's, whose weights are read meanwhile."""
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
            BLOCK_R,
            BLOCK_K,
            SPLIT,
            1,
            ASM,
            DEPENDENT,
        )


@triton.jit(do_not_specialize=["num_pairs"])
def experts_down_kernel(
    planes_ptr,  # int8 [P, 4, GROUPS * 128], most significant first
    scale_ptr,  # float32 [P, GROUPS]
    ids_ptr,  # int32 [P]
    weights_ptr,  # float32 [P]
    tiles_ptr,  # uint8 [E, TILES, GROUPS, 1024]
    tile_scale_ptr,  # [E, TILES, GROUPS, 16]
    out_ptr,  # float32 [P, TILES * 16]
    num_pairs,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # The ids are read before it waits: the kernel before the last one, gate_up, had them when it let others start.
    release(DEPENDENT)
    tile = tl.program_id(0)
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return

    base = (expert.to(tl.int64) * TILES + tile) * GROUPS
    tile_ptrs = tiles_ptr + base * TILE_BYTES + tl.arange(0, TILE_BYTES)
    tile_scale_ptrs = tile_scale_ptr + base * 16 + tl.arange(0, 16)
    column = tl.arange(0, 4 * ROWS)
    half = tl.arange(0, 2 * ROWS)
    place = tl.arange(0, ROWS)
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        column_pair = spread(found, column // 4, ROWS)
        half_pair = spread(found, half // 2, ROWS)
        place_pair = spread(found, place, ROWS)
        halves = _tile_row_dot(
            tile_ptrs,
            tile_scale_ptrs,
            planes_ptr + (column_pair * 4 + column % 4)[:, None] * (GROUPS * GROUP) + tl.arange(0, 64)[None, :],
            (column_pair < num_pairs)[:, None],
            scale_ptr + half_pair * GROUPS,
            half_pair < num_pairs,
            GROUPS,
            UNROLL,
            4 * ROWS,
            INTERPRETED,
            DEPENDENT,
        )
        upper, lower = tl.split(tl.reshape(halves, (16, ROWS, 2)))
        weight = tl.load(weights_ptr + place_pair, mask=place_pair < num_pairs, other=0.0)
        tl.store(
            out_ptr + place_pair[None, :] * (TILES * 16) + (tile * 16 + tl.arange(0, 16))[:, None],
            (upper * 65536.0 + lower) * weight[None, :],
            mask=(place_pair < num_pairs)[None, :],
        )
        pair = following


def routed_experts(
    planes: Tensor,
    scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """See `onebox.kernels.experts.routed_experts`."""
    rows = FixedRows(planes, planes, scale, None)
    slots, _ = expert_slots(rows, ids, weights, gate_up, gate_up_scale, down, down_scale)
    return sum_slots(slots, torch.float32)


def expert_slots(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared: tuple[Tensor, FloatWeight] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `onebox.kernels.experts.expert_slots`."""
    num_pairs = ids.numel()
    inner_size, hidden = gate_up.shape[1] * 8, down.shape[1] * 16
    inner, slots = workspace(ids, inner_size, hidden)
    if not num_pairs:
        return slots, None if shared is None else _no_parts(*shared)
    options = {**sharing(ids), "INTERPRETED": triton.knobs.runtime.interpret, "num_warps": 1}
    crowd = "one" if len(ids) == 1 else "few" if len(ids) <= 4 else "many"
    groups, tiles = gate_up.shape[2], gate_up.shape[1]
    experts_gate_up_kernel[(tiles, num_pairs)](
        rows.planes,
        rows.scale,
        ids,
        gate_up,
        gate_up_scale,
        rows.squares,
        inner,
        num_pairs,
        rows.eps,
        GROUPS=groups,
        GROUPS_BLOCK=triton.next_power_of_2(groups),
        TILES=tiles,
        SLOTS=ids.shape[1],
        ROWS=4,
        **_unrolled(f"gate_up_{crowd}", groups),
        **dependent(ids, f"gate_up_{crowd}"),
        **options,
    )
    groups, tiles = down.shape[2], down.shape[1]
    planes = torch.empty((num_pairs, 4, inner_size), dtype=torch.int8, device=ids.device)
    scale = torch.empty((num_pairs, groups), dtype=torch.float32, device=ids.device)
    shared_parts = _split(inner, planes, scale, shared)
    experts_down_kernel[(tiles, num_pairs)](
        planes,
        scale,
        ids,
        weights,
        down,
        down_scale,
        slots,
        num_pairs,
        GROUPS=groups,
        TILES=tiles,
        ROWS=2 if len(ids) <= 4 else 4,
        **_unrolled(f"down_{crowd}", groups),
        **dependent(ids, f"down_{crowd}"),
        **options,
    )
    return slots, shared_parts


def _split(inner: Tensor, planes: Tensor, scale: Tensor, shared: tuple[Tensor, FloatWeight] | None) -> Tensor | None:
    """Splits inner values into planes and, in the same launch, takes the shared expert's down: its parts."""
    num_pairs, groups = scale.shape
    x, weight, parts = None, None, None
    arguments: tuple[Tensor | int | None, ...] = (None, None, None, None, 0, 0)
    if shared is not None:
        (x, weight), parts = shared, _no_parts(*shared)
        arguments = parts_arguments(weight, parts)
    num_rows, width = (0, 128) if x is None else x.shape
    split = 1 if parts is None else len(parts)
    tiles = 0 if parts is None else triton.cdiv(parts.shape[2], 16)
    experts_planes_kernel[(num_pairs * groups + tiles * split,)](
        inner,
        planes,
        scale,
        x,
        *arguments,
        num_pairs,
        num_rows,
        GROUPS=groups,
        K=width,
        FORMAT=None if weight is None else weight.kind,
        SPLIT=split,
        BLOCK_R=max(8, triton.next_power_of_2(num_rows)),
        BLOCK_K=PART_BLOCK,
        ASM=USES_ASM,
        num_warps=1,
        num_stages=1,
        **dependent(inner, "planes"),
    )
    return parts


def _no_parts(x: Tensor, weight: FloatWeight) -> Tensor:
    """Room for the parts of the shared expert's down, float32 [P, R, H]."""
    shape = (num_parts(x.shape[1], weight), len(x), len(weight.codes))
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _unrolled(kernel: str, groups: int) -> Choice:
    """Groups in flight at once, which must divide them, and the most registers."""
    chosen = choose(kernel, {"UNROLL": 4, "maxnreg": 128})
    unroll = max(count for count in range(1, chosen["UNROLL"] + 1) if groups % count == 0)
    return {**chosen, "UNROLL": unroll}
