"""The routed experts of one layer, in the formats that have kernels: INT4, INT3, INT2, FP8, NVFP4, and BF16."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.staging import Read
from onebox.checkpoint.weights import read_weight, weight_tensors
from onebox.formats.expert_tiles import pack_down, pack_gate_up
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.experts import (
    prefill_experts_bf16,
    prefill_experts_fp8,
    prefill_experts_int4,
    prefill_experts_nvfp4,
    routed_experts_bf16,
    routed_experts_bf16_fused,
    routed_experts_fp8,
    routed_experts_fp8_fused,
    routed_experts_int4,
    routed_experts_int4_fused,
    routed_experts_nvfp4,
    routed_experts_nvfp4_fused,
)
from onebox.model.linear import DecodeActivations, group_int_of, nvfp4_tensors
from onebox.spec.weights import Layout, WeightFormat

__all__ = [
    "EXPERT_PARTS",
    "ExpertOf",
    "Experts",
    "PartExperts",
    "expert_batches",
    "make_experts",
    "plain_expert",
    "stack",
]

ExpertOf = Callable[[int, str], Bound]
"""The matrix of an expert by its index and part."""

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_FEW_BITS = {WeightFormat.INT3, WeightFormat.INT2}
_TILED = {WeightFormat.INT4} | _FEW_BITS
# Stored bytes of the experts that are read, and repacked if integers, together: enough to keep a GPU busy, and little
# compared with a layer.
_BATCH_BYTES = 64 << 20
_FEW_BITS_MEMORY = 8
"""Memory that unpacking a stored byte of 3- or 2-bit codes takes, compared with 4-bit codes."""


class Experts(Protocol):
    """Each row through its k experts, weighted and summed in the order of ids [R, k]: float32 [R, H]."""

    def decode(self, rows: DecodeActivations, ids: Tensor, weights: Tensor) -> Tensor: ...

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...


SharedExpert = tuple[Tensor, FloatWeight | None]
"""The shared expert's parts of gate_up, float32 [P, R, 2J], and its down weight where that is a float one."""
FusedResult = tuple[Tensor, Tensor | None, Tensor | None]
"""(each slot's weighted output, float32 [R, k, H]; the shared expert's inner values [R, J]; its output as parts)."""


@runtime_checkable
class PartExperts(Experts, Protocol):
    """Experts that leave their sum to the next operation and compute the shared expert beside them."""

    def fused(self, rows: FixedRows, ids: Tensor, weights: Tensor, shared: SharedExpert) -> FusedResult: ...


# The formats' tensors, in the order in which their operations take them.


class IntExperts(NamedTuple):
    """INT4, INT3 or INT2 in groups of 128, in the tiles of `formats/expert_tiles.py`; gate/up and down may differ."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def decode(self, rows: DecodeActivations, ids: Tensor, weights: Tensor) -> Tensor:
        return routed_experts_int4(*rows.fixed_point, ids, weights, *self)

    def fused(self, rows: FixedRows, ids: Tensor, weights: Tensor, shared: SharedExpert) -> FusedResult:
        return routed_experts_int4_fused(rows, ids, weights, *self, shared)

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return prefill_experts_int4(x.to(torch.bfloat16), ids, weights, *self).to(torch.float32)


class Fp8Experts(NamedTuple):
    """E4M3 with scales of blocks of 128x128, or of rows."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def decode(self, rows: DecodeActivations, ids: Tensor, weights: Tensor) -> Tensor:
        return routed_experts_fp8(rows.x, ids, weights, *self)

    def fused(self, rows: FixedRows, ids: Tensor, weights: Tensor, shared: SharedExpert) -> FusedResult:
        return routed_experts_fp8_fused(rows, ids, weights, *self, shared)

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return prefill_experts_fp8(x.to(torch.bfloat16), ids, weights, *self).to(torch.float32)


class Nvfp4Experts(NamedTuple):
    """E2M1 in groups of 16; each matrix has a multiplier of its own."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor
    multipliers: Tensor

    def decode(self, rows: DecodeActivations, ids: Tensor, weights: Tensor) -> Tensor:
        return routed_experts_nvfp4(rows.x, ids, weights, *self)

    def fused(self, rows: FixedRows, ids: Tensor, weights: Tensor, shared: SharedExpert) -> FusedResult:
        return routed_experts_nvfp4_fused(rows, ids, weights, *self, shared)

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return prefill_experts_nvfp4(x.to(torch.bfloat16), ids, weights, *self).to(torch.float32)


class PlainExperts(NamedTuple):
    """BF16."""

    gate_up: Tensor
    down: Tensor

    def decode(self, rows: DecodeActivations, ids: Tensor, weights: Tensor) -> Tensor:
        return routed_experts_bf16(rows.x.to(torch.bfloat16), ids, weights, *self).to(torch.float32)

    def fused(self, rows: FixedRows, ids: Tensor, weights: Tensor, shared: SharedExpert) -> FusedResult:
        return routed_experts_bf16_fused(rows, ids, weights, *self, shared)

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return prefill_experts_bf16(x.to(torch.bfloat16), ids, weights, *self).to(torch.float32)


def expert_batches(expert: ExpertOf, num_experts: int) -> Iterator[range]:
    """The experts of a layer in batches that are read together."""
    bounds = [expert(0, part) for part in EXPERT_PARTS]
    memory = sum(bound.nbytes * (_FEW_BITS_MEMORY if bound.stored.format in _FEW_BITS else 1) for bound in bounds)
    size = max(1, _BATCH_BYTES // memory)
    return (range(begin, min(begin + size, num_experts)) for begin in range(0, num_experts, size))


def make_experts(expert: ExpertOf, num_experts: int, read: Read, zeros_offset: int = 1) -> Experts:
    """The experts behind `expert(index, "gate_proj" | "up_proj" | "down_proj")`, read batch by batch.

    INT8, which has no expert kernel of its own, and mixed formats become BF16; except that gate and up may have other
    bits than down among INT4, INT3 and INT2.
    """
    stored_as = _format_of(expert, num_experts)
    if stored_as is WeightFormat.FP8:
        return Fp8Experts(*stack((_fp8_expert(expert, index, read) for index in range(num_experts)), num_experts))
    if stored_as is WeightFormat.NVFP4:
        return Nvfp4Experts(*stack((_nvfp4_expert(expert, index, read) for index in range(num_experts)), num_experts))
    if stored_as is WeightFormat.INT4:
        batches = expert_batches(expert, num_experts)
        packed = (_int_batch(expert, batch, read, zeros_offset) for batch in batches)
        return IntExperts(*stack(packed, num_experts))
    plain = (plain_expert(expert, index, read, zeros_offset, torch.bfloat16) for index in range(num_experts))
    return PlainExperts(*stack(plain, num_experts))


def _format_of(expert: ExpertOf, num_experts: int) -> WeightFormat:
    """The format that all matrices of a layer's experts share; BF16, which holds any, where they differ.

    INT4 stands for tiles of 4, 3 or 2 bits.
    """
    gate_up = {expert(index, part).stored for index in range(num_experts) for part in ("gate_proj", "up_proj")}
    down = {expert(index, "down_proj").stored for index in range(num_experts)}
    if len(gate_up) == len(down) == 1 and {stored.format for stored in gate_up | down} <= _TILED:
        return WeightFormat.INT4
    return gate_up.pop().format if len(gate_up | down) == 1 else WeightFormat.BF16


def _int_batch(expert: ExpertOf, batch: range, read: Read, zeros_offset: int) -> tuple[Tensor, ...]:
    """The tiles and scales of a batch of experts, [B, ...] each."""
    gate, up, down = (group_int_of([expert(i, part) for i in batch], read, zeros_offset) for part in EXPERT_PARTS)

    def by_expert(rows: Tensor) -> Tensor:
        return rows.reshape(len(batch), -1, rows.shape[-1])

    codes = torch.cat([by_expert(gate.codes), by_expert(up.codes)], 1)
    scales = torch.cat([by_expert(gate.scales), by_expert(up.scales)], 1)
    packed_down = pack_down(by_expert(down.codes), by_expert(down.scales), down.bits)
    return (*pack_gate_up(codes, scales, gate.bits), *packed_down)


def _fp8_expert(expert: ExpertOf, index: int, read: Read) -> tuple[Tensor, ...]:
    """Codes [1, 2I, H] and scales of one expert's gate and up, and those of its down [1, H, I]."""
    gate, up, down = (_fp8_parts(expert(index, part), read) for part in EXPERT_PARTS)
    return _join_rows(gate[0], up[0]), _join_rows(gate[1], up[1]), down[0][None], down[1][None]


def _fp8_parts(bound: Bound, read: Read) -> tuple[Tensor, Tensor]:
    """(codes [N, K], scales of blocks [ceil(N/128), ceil(K/128)] or of rows [N]).

    A scale of the whole tensor is repeated for each row.
    """
    parts = {suffix: read(entry) for suffix, entry in weight_tensors(bound).items()}
    codes = parts.pop("weight")
    (scale,) = parts.values()
    if bound.stored.layout in (Layout.FP8_BLOCK, Layout.FP8_BLOCK_INV):
        return codes, scale if scale.dtype is torch.bfloat16 else scale.to(torch.float32)
    return codes, scale.reshape(-1).to(torch.float32).expand(len(codes))


def _nvfp4_expert(expert: ExpertOf, index: int, read: Read) -> tuple[Tensor, ...]:
    """Codes and scales of gate and up together and of down, and the three multipliers [1, 3]."""
    gate, up, down = (nvfp4_tensors(expert(index, part), read) for part in EXPERT_PARTS)
    multipliers = torch.cat([gate[2], up[2], down[2]])[None]
    return _join_rows(gate[0], up[0]), _join_rows(gate[1], up[1]), down[0][None], down[1][None], multipliers


def _join_rows(first: Tensor, second: Tensor) -> Tensor:
    """[1, ...] of both concatenated; E4M3 as bytes, which every torch version can concatenate."""
    if first.dtype is torch.float8_e4m3fn:
        return _join_rows(first.view(torch.uint8), second.view(torch.uint8)).view(first.dtype)
    return torch.cat([first, second])[None]


def plain_expert(
    expert: ExpertOf, index: int, read: Read, zeros_offset: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gate and up rows [1, 2I, H] and down rows [1, H, I] of one expert."""
    bounds = (expert(index, part) for part in EXPERT_PARTS)
    gate, up, down = (read_weight(bound, zeros_offset=zeros_offset, read=read).to(dtype) for bound in bounds)
    return torch.cat([gate, up])[None], down[None]


def stack(batches: Iterator[tuple[Tensor, ...]], num_experts: int) -> list[Tensor]:
    """Copies batches of tensors [B, ...] into tensors [E, ...]; only one batch at a time is in memory twice."""
    result: list[Tensor] = []
    begin = 0
    for tensors in batches:
        if not result:
            result = [t.new_empty((num_experts, *t.shape[1:])) for t in tensors]
        for target, tensor in zip(result, tensors, strict=True):
            target[begin : begin + len(tensor)].copy_(tensor)
        begin += len(tensors[0])
    return result
