"""FP8, NVFP4 and BF16 experts of a fused decode step in Triton: two launches, four with many rows.

Built as the INT4 kernels are (`decode_int4.py`): one warp per 16 matrix rows, several blocks of weights in flight, an
expert's weights loaded once for all of its pairs. Weights are decoded in registers to bfloat16, which holds their
numbers exactly (`float_linear/fragments.py`), and each block of 128 columns starts a new accumulator:

    lists     (expert), with many rows         as in `lists.py`
    gate_up   (16 rows: 8 of gate and of up)   SiLU(gate) * up as three bfloat16 terms, 24 bits   -> [R*k, 3, I]
    down      (16 rows)                        times the three terms, times the pair's weight     -> float32 [R*k, H]

No launch is needed between the two. The shared expert's SwiGLU runs in the gate_up launch and its down beside the
experts' down; with many rows, the first with the lists and the second in a launch of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import swiglu
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import load_squares, row_factors
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.launch import ceil_div, divisor, next_power_of_2
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.tuning import MODES, Tunable
from onebox.kernels.experts.float_dots import expert_dot, expert_weights, factor_pointers
from onebox.kernels.experts.float_tiles import StoredExperts, bf16_experts, fp8_experts, nvfp4_experts
from onebox.kernels.experts.lists import ExpertLists, listed_pairs, pair_lists, shared_down, shared_slice
from onebox.kernels.experts.slots import is_grouped, pair_of_program, sharers, sharing, spread
from onebox.kernels.float_linear.fragments import matrix_row, thread_columns
from onebox.kernels.float_linear.parts import TileLaunch, parts_tile

__all__ = ["routed_experts_bf16_fused", "routed_experts_fp8_fused", "routed_experts_nvfp4_fused"]

_LOADS = ((1, 1, 96), (1, 2, 96), (1, 2, 128), (1, 4, 128), (1, 4, 168), (2, 1, 128), (2, 2, 168), (2, 4, 255))
_TRIED = (*MODES, *({"EXPERT_TILES": tiles, "UNROLL": unroll, "maxnreg": most} for tiles, unroll, most in _LOADS))
_GATE_UP, _DOWN = Tunable("float_gate_up", _TRIED), Tunable("float_down", _TRIED)

_ROWS = tl.constexpr(8)
"""Pairs of a round: the columns of one MMA."""
_TERMS = tl.constexpr(3)
"""bfloat16 terms of an inner value."""


@triton.jit
def _gate_up_round(
    place_pair,  # [ROWS]: pairs with this expert, num_pairs where there is none
    thread_pair,  # [4 * ROWS, 1]: the same by thread
    expert,
    tile,
    x_ptr,
    squares_ptr,
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    inner_ptr,
    num_pairs,
    R,
    eps,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
):
    """The inner values of 8 * TILES columns and some pairs."""
    _, column = thread_columns(_ROWS, FORMAT)
    own_scale_ptr = scale_ptr
    if FORMAT == "nvfp4":
        own_scale_ptr += expert.to(tl.int64) * (2 * I * (H // 16))
    place = tl.arange(0, 16 * TILES)
    part = place // 8 % 2
    row = matrix_row(tile * 8, place, 8, 0)
    factor_ptrs = factor_pointers(scale_ptr, multiplier_ptr, expert, part, row, 2, I, H, FORMAT)
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, place_pair // SLOTS, R, H, GROUPS_BLOCK)
    total = expert_dot(
        expert_weights(weight_ptr, expert, 2 * I, H, FORMAT),
        own_scale_ptr,
        factor_ptrs,
        tile * 8,
        x_ptr + (thread_pair // SLOTS * H + column),
        thread_pair < num_pairs,
        H,
        FORMAT,
        TILES,
        8,
        I,
        1,
        0,
        UNROLL,
        False,
    )
    if squares_ptr is not None:
        total *= row_factors(squares, eps, H)[None, :]
    gate, up = tl.split(tl.permute(tl.reshape(total, (TILES, 2, 8, _ROWS)), (0, 2, 3, 1)))
    inner = tl.reshape(swiglu(gate, up), (TILES * 8, _ROWS))
    at = inner_ptr + place_pair[None, :] * (_TERMS * I) + (tile * 8 + tl.arange(0, TILES * 8))[:, None]
    for term in tl.static_range(_TERMS):
        own = inner.to(tl.bfloat16)
        tl.store(at + term * I, own, mask=(place_pair < num_pairs)[None, :])
        inner -= own.to(tl.float32)


@triton.jit(do_not_specialize=["num_pairs", "R"])
def experts_float_gate_up_fused_kernel(
    x_ptr,  # [R, H]
    squares_ptr,  # float32 [R, H/128], or None for rows without a pending norm division
    ids_ptr,  # int32 [R, SLOTS]
    counts_ptr,  # int32 [E], with GROUPED
    pairs_ptr,  # int32 [E, R], with GROUPED
    weight_ptr,  # as in `StoredExperts`
    scale_ptr,
    multiplier_ptr,
    inner_ptr,  # bfloat16 [num_pairs, 3, I]
    shared_ptr,  # float32 [SHARED_PARTS, R, 2 * SHARED]
    shared_inner_ptr,  # [R, SHARED]
    num_pairs,
    R,
    eps,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    SLOTS: tl.constexpr,
    EXPERT_FORMAT: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_PARTS: tl.constexpr,  # 0 without a shared expert, or with GROUPED
    SHARED_BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    EXPERT_TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (tiles, pair), or (tiles, expert) with GROUPED; behind the tiles, slices of the shared expert."""
    # `wait` comes before `release`: `down` reads ids and lists before its own wait, because they are complete.
    wait(DEPENDENT)
    release(DEPENDENT)
    tile = tl.program_id(0) * EXPERT_TILES
    threads = tl.arange(0, 4 * _ROWS)[:, None]
    if tile == I // 8:
        if SHARED_PARTS > 0:
            shared_slice(shared_ptr, shared_inner_ptr, R, SHARED, SHARED_PARTS, SLOTS, SHARED_BLOCK)
        return
    if GROUPED:
        expert = tl.program_id(1)
        count = tl.load(counts_ptr + expert)
        start = 0
        while start < count:
            _gate_up_round(
                listed_pairs(pairs_ptr, expert, start, tl.arange(0, _ROWS), count, num_pairs, R),
                listed_pairs(pairs_ptr, expert, start, threads // 4, count, num_pairs, R),
                expert,
                tile,
                x_ptr,
                squares_ptr,
                weight_ptr,
                scale_ptr,
                multiplier_ptr,
                inner_ptr,
                num_pairs,
                R,
                eps,
                H,
                I,
                SLOTS,
                EXPERT_FORMAT,
                EXPERT_TILES,
                UNROLL,
                GROUPS_BLOCK,
            )
            start += _ROWS
    else:
        pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
        if pair != first:
            return
        while pair < num_pairs:
            found, following = sharers(ids, pairs, expert, pair, num_pairs, _ROWS, ALONE)
            _gate_up_round(
                spread(found, tl.arange(0, _ROWS), _ROWS),
                spread(found, threads // 4, _ROWS),
                expert,
                tile,
                x_ptr,
                squares_ptr,
                weight_ptr,
                scale_ptr,
                multiplier_ptr,
                inner_ptr,
                num_pairs,
                R,
                eps,
                H,
                I,
                SLOTS,
                EXPERT_FORMAT,
                EXPERT_TILES,
                UNROLL,
                GROUPS_BLOCK,
            )
            pair = following


@triton.jit
def _down_round(
    place_pair,  # as in `_gate_up_round`
    thread_pair,
    expert,
    tile,
    inner_ptr,
    weights_ptr,
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The weighted output of 16 * TILES columns and some pairs."""
    _, column = thread_columns(_ROWS, FORMAT)
    own_scale_ptr = scale_ptr
    if FORMAT == "nvfp4":
        own_scale_ptr += expert.to(tl.int64) * (H * (I // 16))
    row = tile * 16 + tl.arange(0, 16 * TILES)
    factor_ptrs = factor_pointers(scale_ptr, multiplier_ptr, expert, tl.zeros_like(row), row, 1, H, I, FORMAT)
    share = tl.load(weights_ptr + place_pair, mask=place_pair < num_pairs, other=0.0)
    total = expert_dot(
        expert_weights(weight_ptr, expert, H, I, FORMAT),
        own_scale_ptr,
        factor_ptrs,
        tile * 16,
        inner_ptr + (thread_pair * (_TERMS * I) + column),
        thread_pair < num_pairs,
        I,
        FORMAT,
        TILES,
        16,
        8,
        _TERMS,
        I,
        UNROLL,
        DEPENDENT,
    )
    at = out_ptr + place_pair[None, :] * H + row[:, None]
    tl.store(at, total * share[None, :], mask=(place_pair < num_pairs)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "R"])
def experts_float_down_fused_kernel(
    inner_ptr,  # bfloat16 [num_pairs, 3, I]
    ids_ptr,  # int32 [num_pairs]
    counts_ptr,  # int32 [E], with GROUPED
    pairs_ptr,  # int32 [E, R], with GROUPED
    weights_ptr,  # float32 [num_pairs]
    expert_weight_ptr,  # as in `StoredExperts`
    expert_scale_ptr,
    expert_multiplier_ptr,
    slots_ptr,  # float32 [num_pairs, H]
    x_ptr,  # [R, K]: the shared expert's inner values
    weight_ptr,  # this and the next five as in `float_parts`
    scale_ptr,
    multiplier_ptr,
    out_ptr,  # float32 [PARTS, R, N]
    N: tl.constexpr,
    scale_stride,
    num_pairs,
    R,
    programs,  # of the shared expert
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the README)
    EXPERT_FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,
    PAIRS: tl.constexpr,
    ALONE: tl.constexpr,
    EXPERT_TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # None without a shared expert
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKED: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (tiles, pair), or (tiles, expert) with GROUPED; behind the tiles, those of the shared expert's down.

    Ids, lists and weights are loaded before the wait: gate_up, the launch before, waited for the kernels that wrote
    them before it released this one.
    """
    release(DEPENDENT)
    tile = tl.program_id(0) * EXPERT_TILES
    threads = tl.arange(0, 4 * _ROWS)[:, None]
    if tile >= H // 16:
        if FORMAT is not None:
            program = (tile - H // 16) // EXPERT_TILES * tl.num_programs(1) + tl.program_id(1)
            if program < programs:
                parts_tile(
                    program,
                    x_ptr,
                    None,
                    weight_ptr,
                    scale_ptr,
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
        return
    if GROUPED:
        expert = tl.program_id(1)
        count = tl.load(counts_ptr + expert)
        start = 0
        while start < count:
            _down_round(
                listed_pairs(pairs_ptr, expert, start, tl.arange(0, _ROWS), count, num_pairs, R),
                listed_pairs(pairs_ptr, expert, start, threads // 4, count, num_pairs, R),
                expert,
                tile,
                inner_ptr,
                weights_ptr,
                expert_weight_ptr,
                expert_scale_ptr,
                expert_multiplier_ptr,
                slots_ptr,
                num_pairs,
                H,
                I,
                EXPERT_FORMAT,
                EXPERT_TILES,
                UNROLL,
                DEPENDENT,
            )
            start += _ROWS
    else:
        pair, expert, pairs, ids, first = pair_of_program(ids_ptr, num_pairs, PAIRS, ALONE)
        if pair != first:
            return
        while pair < num_pairs:
            found, following = sharers(ids, pairs, expert, pair, num_pairs, _ROWS, ALONE)
            _down_round(
                spread(found, tl.arange(0, _ROWS), _ROWS),
                spread(found, threads // 4, _ROWS),
                expert,
                tile,
                inner_ptr,
                weights_ptr,
                expert_weight_ptr,
                expert_scale_ptr,
                expert_multiplier_ptr,
                slots_ptr,
                num_pairs,
                H,
                I,
                EXPERT_FORMAT,
                EXPERT_TILES,
                UNROLL,
                DEPENDENT,
            )
            pair = following


def routed_experts_fp8_fused(rows, ids, weights, gate_up, gate_up_scale, down, down_scale, shared=None):
    return _fused(rows, ids, weights, fp8_experts(gate_up, gate_up_scale, down, down_scale), down.shape[2], shared)


def routed_experts_nvfp4_fused(rows, ids, weights, gate_up, gate_up_scale, down, down_scale, multipliers, shared=None):
    stored = nvfp4_experts(gate_up, gate_up_scale, down, down_scale, multipliers)
    return _fused(rows, ids, weights, stored, 2 * down.shape[2], shared)


def routed_experts_bf16_fused(rows, ids, weights, gate_up, down, shared=None):
    return _fused(rows, ids, weights, bf16_experts(gate_up, down), down.shape[2], shared)


def _fused(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    stored: StoredExperts,
    inner_size: int,
    shared: tuple[Tensor, FloatWeight | None] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `routed_experts_int4_fused`, of stored float experts."""
    (num_rows, k), hidden = ids.shape, rows.x.shape[1]
    inner = torch.empty((num_rows * k, _TERMS.value, inner_size), dtype=torch.bfloat16, device=ids.device)
    slots = torch.empty((num_rows, k, hidden), dtype=torch.float32, device=ids.device)
    parts, down_weight = shared or (None, None)
    shared_values = None
    if parts is not None:
        shared_values = torch.empty((num_rows, parts.shape[2] // 2), dtype=rows.x.dtype, device=ids.device)
    if is_grouped(ids):
        lists = pair_lists(ids, len(stored.gate_up[0]), parts, shared_values)
        _gate_up(rows, ids, lists, stored, inner, None, None)
        _down(inner, ids, lists, weights, stored, slots, None, TileLaunch.of(rows.x, None))
        return slots, shared_values, shared_down(shared_values, down_weight)
    launch = TileLaunch.of(rows.x if shared_values is None else shared_values, down_weight)
    if num_rows:
        _gate_up(rows, ids, None, stored, inner, parts, shared_values)
        _down(inner, ids, None, weights, stored, slots, shared_values, launch)
    return slots, shared_values, launch.out


def _gate_up(
    rows: FixedRows,
    ids: Tensor,
    lists: ExpertLists | None,
    stored: StoredExperts,
    inner: Tensor,
    shared_parts: Tensor | None,
    shared_values: Tensor | None,
) -> None:
    """Writes the inner values of all pairs and, given parts of its gate_up, those of the shared expert."""
    hidden, inner_size = rows.x.shape[1], inner.shape[2]
    num_parts, size = (0, 1) if shared_parts is None else (len(shared_parts), shared_parts.shape[2] // 2)
    options = _options(_GATE_UP, stored.kind, ids, hidden, inner_size // 8)
    num_programs = ids.numel() if lists is None else len(lists.counts)
    experts_float_gate_up_fused_kernel[(inner_size // 8 // options["EXPERT_TILES"] + (num_parts > 0), num_programs)](
        rows.x,
        rows.squares,
        ids,
        *(lists or (None, None)),
        *stored.gate_up,
        inner,
        shared_parts,
        shared_values,
        ids.numel(),
        len(ids),
        rows.eps,
        H=hidden,
        I=inner_size,
        SLOTS=ids.shape[1],
        EXPERT_FORMAT=stored.kind,
        SHARED=size,
        SHARED_PARTS=num_parts,
        SHARED_BLOCK=next_power_of_2(ceil_div(size, ids.shape[1])),
        GROUPED=lists is not None,
        GROUPS_BLOCK=next_power_of_2(hidden // 128),
        num_warps=1,
        **sharing(ids),
        **options,
    )


def _down(
    inner: Tensor,
    ids: Tensor,
    lists: ExpertLists | None,
    weights: Tensor,
    stored: StoredExperts,
    slots: Tensor,
    shared_values: Tensor | None,
    launch: TileLaunch,
) -> None:
    """Writes the weighted output of each pair and, if it has tiles, the shared expert's down."""
    hidden, inner_size = slots.shape[2], inner.shape[2]
    options = _options(_DOWN, stored.kind, ids, inner_size, hidden // 16)
    num_programs = ids.numel() if lists is None else len(lists.counts)
    behind = ceil_div(launch.programs, num_programs)
    experts_float_down_fused_kernel[(hidden // 16 // options["EXPERT_TILES"] + behind, num_programs)](
        inner,
        ids,
        *(lists or (None, None)),
        weights,
        *stored.down,
        slots,
        shared_values,
        *launch.arguments,
        ids.numel(),
        len(ids),
        launch.programs,
        H=hidden,
        I=inner_size,
        EXPERT_FORMAT=stored.kind,
        GROUPED=lists is not None,
        **sharing(ids),
        **{**launch.constants, **options},
    )


def _options(kernel: Tunable, kind: str, ids: Tensor, width: int, tiles: int) -> dict[str, int | bool]:
    """Launch options by format and number of rows; what does not divide a shape is lowered until it does."""
    crowd = "one" if len(ids) == 1 else "few" if len(ids) <= 16 else "many"
    in_flight = 1 if kind == "bf16" else 2
    registers = 128 if len(ids) <= 16 else 168
    default = {"EXPERT_TILES": 1 if len(ids) <= 16 else 2, "UNROLL": in_flight, "maxnreg": registers}
    options = launch_options(kernel, f"{kind}_{crowd}_{width // 128}", **default)
    unroll = divisor(width // 128, options["UNROLL"])
    return {**options, "UNROLL": unroll, "EXPERT_TILES": divisor(tiles, options["EXPERT_TILES"])}
