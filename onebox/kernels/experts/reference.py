"""The twins of the routed experts."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from onebox.formats import Dialect, dequantize_fp8_block, dequantize_fp8_rows, dequantize_nvfp4
from onebox.formats.expert_tiles import unpack_down, unpack_gate_up
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.invariant import FEW, add_in_order, sigmoid, silu
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.float_linear.reference import float_parts

__all__ = [
    "add_shared",
    "chosen_experts",
    "dequantize_expert",
    "prefill_experts_bf16",
    "prefill_experts_fp8",
    "prefill_experts_int4",
    "prefill_experts_nvfp4",
    "routed_experts_bf16",
    "routed_experts_bf16_fused",
    "routed_experts_fp8",
    "routed_experts_fp8_fused",
    "routed_experts_int4",
    "routed_experts_int4_fused",
    "routed_experts_nvfp4",
    "routed_experts_nvfp4_fused",
    "slots_of_experts",
    "swiglu",
]

Matrices = Callable[[int], tuple[Tensor, Tensor]]
"""Returns an expert's float32 (gate_up [2I, H], down [H, I])."""

_TILE = 32
"""Rows of one expert that prefill computes at once."""


def routed_experts_int4(
    planes: Tensor,
    scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """The sum over slots s of weights[:, s] * down(SiLU(gate(x)) * up(x)) of expert ids[:, s]: float32 [R, H].

    x is fixed point: (256 * planes[r, 0] + planes[r, 1]) * scale, planes int8 [R, 2, H], scale float32 [R, H/128], one
    per group. ids int32 and weights float32 [R, k], R * k at most 1,024. Weights are integers of 4, 3 or 2 bits, each
    matrix of its own, as in `onebox.formats.expert_tiles`: gate_up uint8 [E, 2I/16, H/128, 256 * bits] with scales
    [E, 2I/16, H/128, 16], down [E, H/16, I/128, 256 * bits] with [E, H/16, I/128, 16]; scales float16, bfloat16 or
    float32. Slots are added in their order.
    """
    rows = FixedRows(planes, planes, scale, None)
    return _slots_in_order(routed_experts_int4_fused(rows, ids, weights, gate_up, gate_up_scale, down, down_scale)[0])


def routed_experts_int4_fused(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared: tuple[Tensor, FloatWeight | None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The terms of `routed_experts_int4`, float32 [R, k, H]: each slot's weighted output; the next operation adds them.

    `shared` is the shared expert's parts (partial sums) of gate_up, float32 [parts, R, 2J], gate first, added in order,
    and its down weight [H, J]. The second result is its inner values SiLU(gate) * up, [R, J] in the dtype of the rows'
    x; the third, given a float weight, their linear as the parts of `float_parts`, float32 [parts, R, H].
    """
    high, low = rows.planes.to(torch.float32).unbind(1)
    x = rows.scaled((high * 256 + low) * rows.scale.repeat_interleave(128, dim=-1))
    slots = slots_of_experts(x, ids, weights, _int4_matrices(gate_up, gate_up_scale, down, down_scale), torch.float32)
    return slots, *_shared_expert(rows.x.dtype, shared)


def _shared_expert(
    dtype: torch.dtype, shared: tuple[Tensor, FloatWeight | None] | None
) -> tuple[Tensor | None, Tensor | None]:
    """The second and third result of `routed_experts_int4_fused`."""
    if shared is None:
        return None, None
    gate_up_parts, weight = shared
    inner = swiglu(add_in_order(gate_up_parts)).to(dtype)
    return inner, None if weight is None else float_parts(FixedRows(inner, inner, inner, None), weight)


def routed_experts_fp8_fused(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared: tuple[Tensor, FloatWeight | None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The results of `routed_experts_int4_fused` with FP8 weights and the rows' x; H and I are multiples of 128."""
    matrices = _fp8_matrices(gate_up, gate_up_scale, down, down_scale)
    slots = slots_of_experts(rows.scaled(rows.x), ids, weights, matrices, torch.float32)
    return slots, *_shared_expert(rows.x.dtype, shared)


def routed_experts_nvfp4_fused(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    multipliers: Tensor,
    shared: tuple[Tensor, FloatWeight | None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`routed_experts_fp8_fused` with NVFP4 weights."""
    matrices = _nvfp4_matrices(gate_up, gate_up_scale, down, down_scale, multipliers)
    slots = slots_of_experts(rows.scaled(rows.x), ids, weights, matrices, torch.float32)
    return slots, *_shared_expert(rows.x.dtype, shared)


def routed_experts_bf16_fused(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: tuple[Tensor, FloatWeight | None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`routed_experts_fp8_fused` with bfloat16 weights."""
    slots = slots_of_experts(rows.scaled(rows.x), ids, weights, _bf16_matrices(gate_up, down), torch.float32)
    return slots, *_shared_expert(rows.x.dtype, shared)


def routed_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The sum of `routed_experts_int4` with bfloat16 weights: float32 [R, H].

    x bfloat16 [R, H]; ids int32 and weights float32 [R, k]; gate_up bfloat16 [E, 2I, H], gate rows first; down bfloat16
    [E, H, I].
    """
    return _decode(x, ids, weights, _bf16_matrices(gate_up, down))


def dequantize_expert(
    expert: int, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """One expert's matrices as float32: gate and up rows [2I, H], down [H, I]."""
    one = slice(expert, expert + 1)
    pairs = unpack_gate_up(gate_up[one], gate_up_scale[one]), unpack_down(down[one], down_scale[one])
    whole = [codes * scales.to(torch.float32).repeat_interleave(128, dim=-1) for codes, scales in pairs]
    return whole[0][0], whole[1][0]


def _decode(x: Tensor, ids: Tensor, weights: Tensor, matrices: Matrices) -> Tensor:
    """The few rows x of a decode step through their experts: float32 [R, H], inner values not rounded."""
    return chosen_experts(x.to(torch.float32), ids, weights, matrices, torch.float32)


def _prefill(x: Tensor, ids: Tensor, weights: Tensor, matrices: Matrices, tile: int = FEW) -> Tensor:
    """Tokens x through their experts: [T, H] in the dtype of x; inner values are rounded to it too."""
    return chosen_experts(x.to(torch.float32), ids, weights, matrices, x.dtype, tile).to(x.dtype)


def chosen_experts(
    x: Tensor, ids: Tensor, weights: Tensor, matrices: Matrices, inner_dtype: torch.dtype, tile: int = FEW
) -> Tensor:
    """The weighted sum of x [R, H] through each row's experts, float32 [R, H], slots added in order."""
    if not ids.numel():
        return torch.zeros_like(x)
    return _slots_in_order(slots_of_experts(x, ids, weights, matrices, inner_dtype, tile))


def slots_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, matrices: Matrices, inner_dtype: torch.dtype, tile: int = FEW
) -> Tensor:
    """Rows x [R, H] through each of their experts, weighted: float32 [R, k, H].

    `matrices` returns an expert's float32 (gate_up, down); SiLU(gate) * up is rounded to `inner_dtype`. An expert's
    rows are computed `tile` at a time, the last tile padded: all products have one shape, so a row's bits depend on
    that row alone. Rows of no sequence have the id -1: the kernels leave their slots unset, here they are NaN, so that
    nobody reads them unnoticed.
    """
    if not ids.numel():
        return x.new_zeros(*ids.shape, x.shape[1])
    is_blank = ids < 0
    if is_blank.any():
        weighted = x.new_full((*ids.shape, x.shape[1]), float("nan"))
        rows = ~is_blank.all(1)
        weighted[rows] = slots_of_experts(x[rows], ids[rows], weights[rows], matrices, inner_dtype, tile)
        return weighted
    source, place, experts = _tiles(ids, tile)
    chosen = {expert: matrices(expert) for expert in dict.fromkeys(experts)}
    gate, up = _through([chosen[expert][0] for expert in experts], x.index_select(0, source), tile).chunk(2, dim=-1)
    inner = (silu(gate) * up).to(inner_dtype).to(torch.float32)
    down = _through([chosen[expert][1] for expert in experts], inner, tile)
    return down.index_select(0, place).view(*ids.shape, -1) * weights.unsqueeze(-1)


def _slots_in_order(weighted: Tensor) -> Tensor:
    """The sum over k of [R, k, H], in order: [R, H]."""
    total, *others = weighted.unbind(1)
    for slot_out in others:
        total = total + slot_out
    return total


def _through(matrices: list[Tensor], rows: Tensor, tile: int) -> Tensor:
    """float32 [n * tile, N]: each tile of rows [n * tile, K] times the transpose of its own matrix [N, K]."""
    tiles = zip(torch.split(rows, tile), matrices, strict=True)
    return torch.cat([torch.mm(some, matrix.T) for some, matrix in tiles])


def _tiles(ids: Tensor, tile: int) -> tuple[Tensor, Tensor, list[int]]:
    """Pairs (row and expert slot) sorted by expert, in tiles of one expert each.

    (row of each place of a tile, int64 [tiles * tile]; place of each pair, int64 [R * k]; expert of each tile). Unused
    places take row 0: they do not affect the other rows of a product. In numpy, because a step has few pairs and numpy
    calls cost least.
    """
    flat = ids.numpy().ravel()
    order = flat.argsort(kind="stable")
    counts = np.bincount(flat)
    tiles = -(-counts // tile)
    shift = (tiles.cumsum() - tiles) * tile - (counts.cumsum() - counts)
    place = np.empty_like(order)
    place[order] = np.arange(len(flat)) + shift[flat[order]]
    source = np.zeros(int(tiles.sum()) * tile, dtype=np.int64)
    source[place] = np.arange(len(flat)) // ids.shape[1]
    return torch.from_numpy(source), torch.from_numpy(place), np.arange(len(tiles)).repeat(tiles).tolist()


def routed_experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """The sum over slots s of weights[:, s] * down(SiLU(gate(x)) * up(x)) of expert ids[:, s]: float32 [R, H].

    x bfloat16 or float32 [R, H]; ids int32 and weights float32 [R, k], R * k at most 1,024. Slots are added in order.
    """
    return _decode(x, ids, weights, _fp8_matrices(gate_up, gate_up_scale, down, down_scale))


def routed_experts_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    multipliers: Tensor,
) -> Tensor:
    """`routed_experts_fp8` with NVFP4 weights: float32 [R, H]."""
    return _decode(x, ids, weights, _nvfp4_matrices(gate_up, gate_up_scale, down, down_scale, multipliers))


def prefill_experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """The sum of `routed_experts_fp8` for any number of tokens: bfloat16 [T, H].

    x bfloat16 [T, H], ids and weights [T, k]. The inner values are rounded to bfloat16, all sums are float32. The
    workspace is 4 * T * k * H + 2 * T * k * I bytes.
    """
    return _prefill(x, ids, weights, _fp8_matrices(gate_up, gate_up_scale, down, down_scale))


def prefill_experts_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    multipliers: Tensor,
) -> Tensor:
    """`prefill_experts_fp8` with NVFP4 weights: bfloat16 [T, H]."""
    return _prefill(x, ids, weights, _nvfp4_matrices(gate_up, gate_up_scale, down, down_scale, multipliers))


def _int4_matrices(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Matrices:
    return lambda expert: dequantize_expert(expert, gate_up, gate_up_scale, down, down_scale)


def _bf16_matrices(gate_up: Tensor, down: Tensor) -> Matrices:
    return lambda expert: (gate_up[expert].to(torch.float32), down[expert].to(torch.float32))


def _fp8_matrices(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Matrices:
    dequantize = dequantize_fp8_block if gate_up_scale.ndim == 3 else dequantize_fp8_rows

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        gate, up = map(dequantize, gate_up[expert].chunk(2), gate_up_scale[expert].chunk(2))
        return torch.cat([gate, up]), dequantize(down[expert], down_scale[expert])

    return matrices


def _nvfp4_matrices(
    gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, multipliers: Tensor
) -> Matrices:
    dequantize = partial(dequantize_nvfp4, dialect=Dialect.MODELOPT)

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        parts = (*gate_up[expert].chunk(2), down[expert])
        scales = (*gate_up_scale[expert].chunk(2), down_scale[expert])
        gate, up, whole_down = map(dequantize, parts, scales, multipliers[expert])
        return torch.cat([gate, up]), whole_down

    return matrices


def prefill_experts_int4(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """The sum over slots s of weights[:, s] * down(SiLU(gate(x)) * up(x)) of expert ids[:, s]: bfloat16 [T, H].

    x bfloat16 [T, H]; ids int32 and weights float32 [T, k]; weights and their scales as in
    `routed_experts_int4`. The inner values are rounded to bfloat16, all sums are float32. The workspace is
    4 * T * k * H + 2 * T * k * I + 2 * T * H bytes.
    """
    return _prefill(x, ids, weights, _int4_matrices(gate_up, gate_up_scale, down, down_scale), _TILE)


def prefill_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`prefill_experts_int4` with bfloat16 weights: gate_up [E, 2I, H], gate rows first, and down [E, H, I]."""
    return _prefill(x, ids, weights, _bf16_matrices(gate_up, down), _TILE)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [R, I] in the dtype of gate_up [R, 2I]; its first I columns are the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def add_shared(routed: Tensor, shared: Tensor, shared_gate_logit: Tensor) -> Tensor:
    """The output of an expert layer, float32 [R, H]: routed + sigmoid(shared_gate_logit) * shared.

    routed [R, H] float32, shared [R, H] any float dtype, shared_gate_logit [R] any float dtype and any stride: it may
    be a column of the router's output.
    """
    return routed + sigmoid(shared_gate_logit).unsqueeze(-1) * shared.to(torch.float32)
