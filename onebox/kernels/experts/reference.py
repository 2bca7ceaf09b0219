"""The plain twins of the routed experts for a few rows."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from onebox.formats.expert_tiles import unpack_down, unpack_gate_up
from onebox.kernels.float_linear.tiles import FloatWeight
from onebox.kernels.float_parts.reference import float_parts
from onebox.kernels.gate.reference import swiglu
from onebox.kernels.invariant import FEW, silu
from onebox.kernels.route_shared.reference import in_order
from onebox.kernels.rows import FixedRows

__all__ = [
    "chosen_experts",
    "dequantize_expert",
    "expert_slots",
    "routed_experts",
    "routed_experts_bf16",
    "slots_of_experts",
]


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
    return _slots_in_order(expert_slots(rows, ids, weights, gate_up, gate_up_scale, down, down_scale)[0])


def expert_slots(
    rows: FixedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared: tuple[Tensor, FloatWeight | None] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `onebox.kernels.experts.expert_slots`."""
    high, low = rows.planes.to(torch.float32).unbind(1)
    x = rows.scaled((high * 256 + low) * rows.scale.repeat_interleave(128, dim=-1))

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        return dequantize_expert(expert, gate_up, gate_up_scale, down, down_scale)

    slots = slots_of_experts(x, ids, weights, matrices, torch.float32)
    if shared is None:
        return slots, None, None
    gate_up_parts, weight = shared
    inner = swiglu(in_order(gate_up_parts)).to(rows.x.dtype)
    return slots, inner, None if weight is None else float_parts(FixedRows(inner, inner, inner, None), weight)


def routed_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `onebox.kernels.experts.routed_experts_bf16`."""

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        return gate_up[expert].to(torch.float32), down[expert].to(torch.float32)

    return chosen_experts(x.to(torch.float32), ids, weights, matrices, torch.float32)


def dequantize_expert(
    expert: int, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """One expert's matrices as float32: gate and up rows [2I, H], down [H, I]."""
    one = slice(expert, expert + 1)
    pairs = unpack_gate_up(gate_up[one], gate_up_scale[one]), unpack_down(down[one], down_scale[one])
    whole = [codes * scales.to(torch.float32).repeat_interleave(128, dim=-1) for codes, scales in pairs]
    return whole[0][0], whole[1][0]


def chosen_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    matrices: Callable[[int], tuple[Tensor, Tensor]],
    inner_dtype: torch.dtype,
    tile: int = FEW,
) -> Tensor:
    """The weighted sum of x [R, H] through each row's experts, float32 [R, H], its slots added in their order."""
    if not ids.numel():
        return torch.zeros_like(x)
    return _slots_in_order(slots_of_experts(x, ids, weights, matrices, inner_dtype, tile))


def slots_of_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    matrices: Callable[[int], tuple[Tensor, Tensor]],
    inner_dtype: torch.dtype,
    tile: int = FEW,
) -> Tensor:
    """Rows x [R, H] through each of their experts, weighted: float32 [R, k, H].

    `matrices` gives an expert's float32 (gate_up, down); SiLU(gate) * up is rounded to `inner_dtype`. An expert takes
    its rows `tile` at a time, the last of them filled up: products of one shape, so a row's bits are its own.
    """
    if not ids.numel():
        return x.new_zeros(*ids.shape, x.shape[1])
    source, place, experts = _tiles(ids, tile)
    chosen = {expert: matrices(expert) for expert in dict.fromkeys(experts)}
    gate, up = _through([chosen[expert][0] for expert in experts], x.index_select(0, source), tile).chunk(2, dim=-1)
    inner = (silu(gate) * up).to(inner_dtype).to(torch.float32)
    down = _through([chosen[expert][1] for expert in experts], inner, tile)
    return down.index_select(0, place).view(*ids.shape, -1) * weights.unsqueeze(-1)


def _slots_in_order(weighted: Tensor) -> Tensor:
    """[R, H] of [R, k, H]."""
    total, *others = weighted.unbind(1)
    for slot_out in others:
        total = total + slot_out
    return total


def _through(matrices: list[Tensor], rows: Tensor, tile: int) -> Tensor:
    """float32 [n * tile, N]: each tile of rows [n * tile, K] times the transpose of its own matrix [N, K]."""
    tiles = zip(torch.split(rows, tile), matrices, strict=True)
    return torch.cat([torch.mm(some, matrix.T) for some, matrix in tiles])


def _tiles(ids: Tensor, tile: int) -> tuple[Tensor, Tensor, list[int]]:
    """Row-slots in the order of their experts, in tiles of one expert each.

    (which row each place of a tile takes, int64 [tiles * tile]; the place of each row-slot, int64 [R * k]; the expert
    of each tile). Places that no row-slot has take row 0: a product's other rows do not matter. In numpy, whose calls
    cost least: a step's numbers are few.
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
