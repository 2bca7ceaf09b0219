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

BF16 is gate_up, down, sum: the inner values go into the down MMA as three bfloat16 terms, together 24 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "dot_bf16",
    "pair_of_program",
    "routed_experts",
    "routed_experts_bf16",
    "sharers",
    "sharing",
    "spread",
    "sum_slots",
    "swiglu",
    "to_bf16",
]

# `num_pairs` is not specialised: one row more must not compile anew, and the loop over sharers needs a number.
GROUP = tl.constexpr(128)
TILE_BYTES = tl.constexpr(1024)


@triton.jit
def _next_sharer(ids, pairs, expert, after, none):
    """The first pair after `after` that has this expert, or `none`."""
    return tl.min(tl.where((ids == expert) & (pairs > after), pairs, none), 0)


@triton.jit
def pair_of_program(ids_ptr, num_pairs, PAIRS: tl.constexpr, ALONE: tl.constexpr):
    """(the program's pair, its expert, all pairs, their experts, the first pair that has the same expert).

    With ALONE (one row, whose experts all differ) nothing is searched, here or in `sharers`.
    """
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair)
    pairs = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    first = pair if ALONE else _next_sharer(ids, pairs, expert, -1, num_pairs)
    return pair, expert, pairs, ids, first


@triton.jit
def sharers(ids, pairs, expert, first, none, COUNT: tl.constexpr, ALONE: tl.constexpr):
    """(`first` and the next pairs with its expert, COUNT in all, filled up with `none`; the pair that follows them)."""
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
):
    """A row of tiles with COLUMNS planes: float32 [16, COLUMNS / 2], group after group.

    The weights of UNROLL groups are asked for before the first is used: a warp has that many bytes under way.
    """
    total = tl.zeros((16, COLUMNS // 2), tl.float32)
    for start in tl.range(0, GROUPS, UNROLL, num_stages=1):
        packed = ()
        scales = ()
        for i in tl.static_range(UNROLL):
            tile = tl.load(tile_ptrs + (start + i) * TILE_BYTES, eviction_policy="evict_first")
            packed += (tile,)  # type: ignore[assignment]
            scales += (tl.load(tile_scale_ptrs + (start + i) * 16),)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            dots = _group_dot(packed[i], x_ptrs + (start + i) * GROUP, used, COLUMNS, INTERPRETED)
            x_scale = tl.load(x_scale_ptrs + start + i, mask=scale_used, other=0.0)
            total += dots * (scales[i].to(tl.float32)[:, None] * x_scale[None, :])
    return total * 0.0625


@triton.jit
def swiglu(gate, up):
    """SiLU(gate) * up; the exponential never overflows."""
    small = tl.exp(-tl.abs(gate))
    return gate * (tl.where(gate >= 0.0, 1.0, small) / (1.0 + small)) * up


@triton.jit(do_not_specialize=["num_pairs"])
def experts_gate_up_kernel(
    planes_ptr,  # int8 [R, 2, GROUPS * 128]
    scale_ptr,  # float32 [R, GROUPS]
    ids_ptr,  # int32 [R, SLOTS]
    tiles_ptr,  # uint8 [E, TILES, GROUPS, 1024]
    tile_scale_ptr,  # [E, TILES, GROUPS, 16]
    inner_ptr,  # float32 [R * SLOTS, TILES * 8]
    num_pairs,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
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
        )
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, 8, ROWS)), (1, 2, 0)))
        inner_column = tile * 8 + tl.arange(0, 8)
        tl.store(
            inner_ptr + place_pair[None, :] * (TILES * 8) + inner_column[:, None],
            swiglu(gate, up),
            mask=(place_pair < num_pairs)[None, :],
        )
        pair = following


@triton.jit
def experts_planes_kernel(
    inner_ptr,  # float32 [P, GROUPS * 128]
    planes_ptr,  # int8 [P, 4, GROUPS * 128]
    scale_ptr,  # float32 [P, GROUPS]
    GROUPS: tl.constexpr,
):
    pair = tl.program_id(0)
    group = tl.program_id(1)
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
):
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
        )
        upper, lower = tl.split(tl.reshape(halves, (16, ROWS, 2)))
        weight = tl.load(weights_ptr + place_pair, mask=place_pair < num_pairs, other=0.0)
        tl.store(
            out_ptr + place_pair[None, :] * (TILES * 16) + (tile * 16 + tl.arange(0, 16))[:, None],
            (upper * 65536.0 + lower) * weight[None, :],
            mask=(place_pair < num_pairs)[None, :],
        )
        pair = following


@triton.jit
def dot_bf16(a, b, total, INTERPRETED: tl.constexpr):
    """The sum of total and a @ b, both bfloat16; widened in the interpreter, which would multiply their bits."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _add(total, dots):
    """The sum of both, rounded to nearest. Written so that Triton does not fold it into the MMA that made `dots`.

    Tensor cores cut off what does not fit when they add to an accumulator; hundreds of cuts in a row, all towards zero,
    would be seen beside the twin. So each block along K starts a new accumulator.
    """
    return tl.fma(dots, 1.0, total)


@triton.jit
def to_bf16(x, INTERPRETED: tl.constexpr):
    """float32 x rounded to bfloat16, ties to even. The interpreter cuts off instead, so the rounding is added there."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_pairs"])
def experts_gate_up_bf16_kernel(
    x_ptr,  # bfloat16 [R, H]
    ids_ptr,  # int32 [R, SLOTS]
    gate_up_ptr,  # bfloat16 [E, 2I, H]
    inner_ptr,  # float32 [R * SLOTS, I]
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(0)
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return

    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gate_ptrs = gate_up_ptr + (expert.to(tl.int64) * (2 * I) + n)[:, None] * H + k[None, :]
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        place_pair = spread(found, tl.arange(0, ROWS), ROWS)
        used = place_pair < num_pairs
        x_ptrs = x_ptr + (place_pair // SLOTS)[None, :] * H + k[:, None]
        gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in range(0, H, BLOCK_K):
            inside = (n < I)[:, None] & (start + k < H)[None, :]
            x = tl.load(x_ptrs + start, mask=used[None, :] & (start + k < H)[:, None], other=0.0)
            gate_rows = tl.load(gate_ptrs + start, mask=inside, other=0.0)
            up_rows = tl.load(gate_ptrs + I * H + start, mask=inside, other=0.0)
            gate = _add(gate, dot_bf16(gate_rows, x, tl.zeros_like(gate), INTERPRETED))
            up = _add(up, dot_bf16(up_rows, x, tl.zeros_like(up), INTERPRETED))
        tl.store(
            inner_ptr + place_pair[None, :] * I + n[:, None],
            swiglu(gate, up),
            mask=used[None, :] & (n < I)[:, None],
        )
        pair = following


@triton.jit(do_not_specialize=["num_pairs"])
def experts_down_bf16_kernel(
    inner_ptr,  # float32 [P, I]
    ids_ptr,  # int32 [P]
    weights_ptr,  # float32 [P]
    down_ptr,  # bfloat16 [E, H, I]
    out_ptr,  # float32 [P, H]
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(0)
    pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
    if pair != first:
        return

    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    down_ptrs = down_ptr + (expert.to(tl.int64) * H + n)[:, None] * I + k[None, :]
    while pair < num_pairs:
        found, following = sharers(ids, pairs, expert, pair, num_pairs, ROWS, ALONE)
        place_pair = spread(found, tl.arange(0, ROWS), ROWS)
        used = place_pair < num_pairs
        inner_ptrs = inner_ptr + place_pair[None, :] * I + k[:, None]
        total = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in range(0, I, BLOCK_K):
            inside = (n < H)[:, None] & (start + k < I)[None, :]
            weight = tl.load(down_ptrs + start, mask=inside, other=0.0)
            inner = tl.load(inner_ptrs + start, mask=used[None, :] & (start + k < I)[:, None], other=0.0)
            # Three terms of 8 bits each hold a float32; a bfloat16 alone would lose what the twin keeps.
            dots = tl.zeros_like(total)
            for _ in tl.static_range(3):
                term = inner.to(tl.bfloat16)
                dots = dot_bf16(weight, term, dots, INTERPRETED)
                inner = inner - term.to(tl.float32)
            total = _add(total, dots)
        share = tl.load(weights_ptr + place_pair, mask=used, other=0.0)
        tl.store(
            out_ptr + place_pair[None, :] * H + n[:, None],
            total * share[None, :],
            mask=used[None, :] & (n < H)[:, None],
        )
        pair = following


@triton.jit
def experts_sum_kernel(
    slots_ptr,  # float32 [R, SLOTS, H]
    out_ptr,  # [R, H]
    H,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        total += tl.load(slots_ptr + (row * SLOTS + slot) * H + column, mask=inside, other=0.0)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + row * H + column, to_bf16(total, INTERPRETED), mask=inside)
    else:
        tl.store(out_ptr + row * H + column, total, mask=inside)


def sum_slots(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The slots float32 [R, k, H] added over k in its order: float32 or, rounded once, bfloat16 [R, H]."""
    rows, k, hidden = slots.shape
    out = torch.empty((rows, hidden), dtype=dtype, device=slots.device)
    experts_sum_kernel[(rows, triton.cdiv(hidden, 512))](
        slots, out, hidden, SLOTS=k, BLOCK=512, INTERPRETED=triton.knobs.runtime.interpret, num_warps=4
    )
    return out


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
    rows, k = ids.shape
    inner_size, hidden = gate_up.shape[1] * 8, down.shape[1] * 16
    inner, slots = _workspace(ids, inner_size, hidden)
    shared = sharing(ids)
    groups, tiles = gate_up.shape[2], gate_up.shape[1]
    experts_gate_up_kernel[(tiles, rows * k)](
        planes,
        scale,
        ids,
        gate_up,
        gate_up_scale,
        inner,
        rows * k,
        GROUPS=groups,
        TILES=tiles,
        SLOTS=k,
        UNROLL=_unroll(groups),
        ROWS=4,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=1,
        maxnreg=128,
        **shared,
    )
    groups, tiles = down.shape[2], down.shape[1]
    inner_planes = torch.empty((rows * k, 4, inner_size), dtype=torch.int8, device=ids.device)
    inner_scale = torch.empty((rows * k, groups), dtype=torch.float32, device=ids.device)
    experts_planes_kernel[(rows * k, groups)](inner, inner_planes, inner_scale, GROUPS=groups, num_warps=1)
    experts_down_kernel[(tiles, rows * k)](
        inner_planes,
        inner_scale,
        ids,
        weights,
        down,
        down_scale,
        slots,
        rows * k,
        GROUPS=groups,
        TILES=tiles,
        UNROLL=_unroll(groups),
        ROWS=2,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=1,
        maxnreg=128,
        **shared,
    )
    return sum_slots(slots, torch.float32)


def routed_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `onebox.kernels.experts.routed_experts_bf16`."""
    rows, k = ids.shape
    hidden, inner_size = down.shape[1:]
    inner, slots = _workspace(ids, inner_size, hidden)
    sizes = {"H": hidden, "I": inner_size, "BLOCK_N": 32, "BLOCK_K": 128, "ROWS": 8, "num_warps": 2, **sharing(ids)}
    sizes["INTERPRETED"] = triton.knobs.runtime.interpret
    experts_gate_up_bf16_kernel[(triton.cdiv(inner_size, 32), rows * k)](
        x, ids, gate_up, inner, rows * k, SLOTS=k, **sizes
    )
    experts_down_bf16_kernel[(triton.cdiv(hidden, 32), rows * k)](inner, ids, weights, down, slots, rows * k, **sizes)
    return sum_slots(slots, torch.float32)


def _workspace(ids: Tensor, inner_size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """(inner values [R * k, I], weighted outputs [R, k, H]), both float32."""
    rows, k = ids.shape
    inner = torch.empty((rows * k, inner_size), dtype=torch.float32, device=ids.device)
    return inner, torch.empty((rows, k, hidden), dtype=torch.float32, device=ids.device)


def sharing(ids: Tensor) -> dict[str, int | bool]:
    """How sharers are looked for; steps of powers of two from 64 keep the number of compiled variants small."""
    return {"PAIRS": max(64, triton.next_power_of_2(ids.numel())), "ALONE": ids.shape[0] == 1}


def _unroll(groups: int) -> int:
    """Groups in flight at once: the most of 4, 3, 2 that divides them."""
    return next(count for count in (4, 3, 2, 1) if groups % count == 0)
