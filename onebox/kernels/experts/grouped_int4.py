"""Integer experts of a step with many rows: programs (rows of tiles, expert) over the lists of `lists.py`.

The arithmetic is that of `decode_int4.py`, integer for integer, so a row's bits are the same. What differs is who
computes what: with up to hundreds of active experts of a few pairs each, a program has several neighbouring rows of
tiles, so that the planes it loads serve more weights, and enough MMA columns for nearly every list. A longer list takes
further rounds over the same weights, from the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.expert_tiles import tile_bits
from onebox.kernels.common.arithmetic import swiglu
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import load_squares, row_factors
from onebox.kernels.common.launch import divisor, next_power_of_2
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.tuning import MODES, LaunchOptions, Tunable
from onebox.kernels.experts.int4_tiles import GROUP, tile_row_dot
from onebox.kernels.experts.lists import ExpertLists, listed_pairs
from onebox.kernels.experts.slots import tiles_key

__all__ = ["grouped_down", "grouped_gate_up"]


def _tried(*shapes: tuple[int, int, int, int]) -> tuple[LaunchOptions, ...]:
    """Candidates from (rows of tiles, pairs of a round, groups in flight, registers)."""
    chosen = ({"TILES": a, "ROWS": b, "UNROLL": c, "maxnreg": d} for a, b, c, d in shapes)
    return (*MODES, *chosen, {"PREFETCH": 0}, {"PREFETCH": 1})


_GATE_UP = Tunable(
    "grouped_gate_up",
    _tried((2, 8, 2, 128), (2, 8, 4, 168), (2, 4, 4, 128), (4, 4, 2, 168), (4, 8, 2, 255), (1, 8, 4, 128)),
)
_DOWN = Tunable(
    "grouped_down",
    _tried((2, 4, 2, 128), (2, 4, 1, 128), (4, 4, 1, 168), (4, 2, 2, 168), (2, 8, 1, 168), (1, 4, 4, 128)),
)


@triton.jit(do_not_specialize=["num_pairs", "R"])
def experts_gate_up_grouped_kernel(
    planes_ptr,  # int8 [R, 2, GROUPS * 128]
    scale_ptr,  # float32 [R, GROUPS]
    counts_ptr,  # int32 [E]
    pairs_ptr,  # int32 [E, R]
    tiles_ptr,  # uint8 [E, ALL_TILES, GROUPS, 256 * BITS]
    tile_scale_ptr,  # [E, ALL_TILES, GROUPS, 16]
    squares_ptr,  # float32 [R, GROUPS], or None for rows without a pending norm division
    inner_ptr,  # float32 [num_pairs, ALL_TILES * 8]
    num_pairs,
    R,
    eps,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    ALL_TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # `wait` comes before `release`: `down` reads the lists before its own wait, because they are complete.
    wait(DEPENDENT)
    release(DEPENDENT)
    tile, expert = tl.program_id(0) * TILES, tl.program_id(1)
    count = tl.load(counts_ptr + expert)
    base = (expert.to(tl.int64) * ALL_TILES + tile) * GROUPS
    column = tl.arange(0, 2 * ROWS)
    start = 0
    while start < count:
        column_pair = listed_pairs(pairs_ptr, expert, start, column // 2, count, num_pairs, R)
        place_pair = listed_pairs(pairs_ptr, expert, start, tl.arange(0, ROWS), count, num_pairs, R)
        plane = (column_pair // SLOTS) * 2 + column % 2
        if squares_ptr is not None:
            squares = load_squares(squares_ptr, place_pair // SLOTS, R, GROUPS * GROUP, GROUPS_BLOCK)
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
            TILES,
        )
        if squares_ptr is not None:
            total *= row_factors(squares, eps, GROUPS * GROUP)[None, :]
        gate, up = tl.split(tl.permute(tl.reshape(total, (TILES, 2, 8, ROWS)), (0, 2, 3, 1)))
        inner = tl.reshape(swiglu(gate, up), (TILES * 8, ROWS))
        inner_column = tile * 8 + tl.arange(0, TILES * 8)
        tl.store(
            inner_ptr + place_pair[None, :] * (ALL_TILES * 8) + inner_column[:, None],
            inner,
            mask=(place_pair < num_pairs)[None, :],
        )
        start += ROWS


@triton.jit(do_not_specialize=["num_pairs", "R"])
def experts_down_grouped_kernel(
    planes_ptr,  # int8 [num_pairs, 4, GROUPS * 128], most significant first
    scale_ptr,  # float32 [num_pairs, GROUPS]
    counts_ptr,  # int32 [E]
    pairs_ptr,  # int32 [E, R]
    weights_ptr,  # float32 [num_pairs]
    tiles_ptr,  # uint8 [E, ALL_TILES, GROUPS, 256 * BITS]
    tile_scale_ptr,  # [E, ALL_TILES, GROUPS, 16]
    out_ptr,  # float32 [num_pairs, ALL_TILES * 16]
    num_pairs,
    R,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Lists and weights are loaded before the wait: gate_up, two launches earlier, waited for the kernels that wrote
    # them before it released later kernels.
    release(DEPENDENT)
    tile, expert = tl.program_id(0) * TILES, tl.program_id(1)
    count = tl.load(counts_ptr + expert)
    base = (expert.to(tl.int64) * ALL_TILES + tile) * GROUPS
    column, half = tl.arange(0, 4 * ROWS), tl.arange(0, 2 * ROWS)
    start = 0
    while start < count:
        column_pair = listed_pairs(pairs_ptr, expert, start, column // 4, count, num_pairs, R)
        half_pair = listed_pairs(pairs_ptr, expert, start, half // 2, count, num_pairs, R)
        place_pair = listed_pairs(pairs_ptr, expert, start, tl.arange(0, ROWS), count, num_pairs, R)
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
            TILES,
        )
        upper, lower = tl.split(tl.reshape(halves, (TILES * 16, ROWS, 2)))
        tl.store(
            out_ptr + place_pair[None, :] * (ALL_TILES * 16) + (tile * 16 + tl.arange(0, TILES * 16))[:, None],
            (upper * 65536.0 + lower) * weight[None, :],
            mask=(place_pair < num_pairs)[None, :],
        )
        start += ROWS


def grouped_gate_up(
    rows: FixedRows, lists: ExpertLists, slots: int, gate_up: Tensor, gate_up_scale: Tensor, inner: Tensor
) -> None:
    """Writes the inner values [pairs, I] of all pairs, `slots` of each row."""
    experts, tiles, groups = gate_up.shape[:3]
    options = _options(_GATE_UP, gate_up, TILES=2, ROWS=8, UNROLL=2, maxnreg=128, PREFETCH=1)
    experts_gate_up_grouped_kernel[(tiles // options["TILES"], experts)](
        rows.planes,
        rows.scale,
        *lists,
        gate_up,
        gate_up_scale,
        rows.squares,
        inner,
        len(inner),
        len(rows.planes),
        rows.eps,
        BITS=tile_bits(gate_up),
        GROUPS=groups,
        GROUPS_BLOCK=next_power_of_2(groups),
        ALL_TILES=tiles,
        SLOTS=slots,
        num_warps=1,
        **options,
    )


def grouped_down(
    planes: Tensor,
    scale: Tensor,
    lists: ExpertLists,
    weights: Tensor,
    down: Tensor,
    down_scale: Tensor,
    slots: Tensor,
) -> None:
    """Writes the weighted output of each pair into slots [R, k, H]."""
    experts, tiles, groups = down.shape[:3]
    options = _options(_DOWN, down, TILES=2, ROWS=4, UNROLL=2, maxnreg=128, PREFETCH=1)
    experts_down_grouped_kernel[(tiles // options["TILES"], experts)](
        planes,
        scale,
        *lists,
        weights,
        down,
        down_scale,
        slots,
        len(planes),
        lists.pairs.shape[1],
        BITS=tile_bits(down),
        GROUPS=groups,
        ALL_TILES=tiles,
        num_warps=1,
        **options,
    )


def _options(kernel: Tunable, matrix: Tensor, **default: int) -> dict[str, int]:
    """Launch options; what does not divide the shape of a matrix [E, tiles, groups, bytes] is lowered until it does."""
    tiles, groups = matrix.shape[1:3]
    options = launch_options(kernel, tiles_key(matrix), **default)
    return {**options, "TILES": divisor(tiles, options["TILES"]), "UNROLL": divisor(groups, options["UNROLL"])}
