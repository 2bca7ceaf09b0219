"""The routed experts of one layer, in the formats that have kernels: INT4 in groups of 128, and BF16."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.weights import read_weight
from onebox.formats.expert_tiles import pack_down, pack_gate_up
from onebox.kernels.experts import routed_experts, routed_experts_bf16
from onebox.kernels.experts_prefill import prefill_experts, prefill_experts_bf16
from onebox.model.linear import Phase, Rows, group_int_of
from onebox.spec.weights import WeightFormat

__all__ = ["Experts", "make_experts"]


class Experts(Protocol):
    """Each row through its k experts, weighted and summed in the order of ids: float32 [R, H]."""

    def __call__(self, rows: Rows, ids: Tensor, weights: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Int4Experts:
    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def __call__(self, rows: Rows, ids: Tensor, weights: Tensor) -> Tensor:
        tensors = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        if rows.phase is Phase.DECODE:
            return routed_experts(*rows.fixed_point, ids, weights, *tensors)
        return prefill_experts(rows.x.to(torch.bfloat16), ids, weights, *tensors).to(torch.float32)


@dataclass(frozen=True)
class PlainExperts:
    """BF16 weights, or float32 ones on a CPU."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, rows: Rows, ids: Tensor, weights: Tensor) -> Tensor:
        run = routed_experts_bf16 if rows.phase is Phase.DECODE else prefill_experts_bf16
        x = rows.x if self.gate_up.dtype is torch.float32 else rows.x.to(torch.bfloat16)
        return run(x, ids, weights, self.gate_up, self.down).to(torch.float32)


def make_experts(
    expert: Callable[[int, str], Bound], num_experts: int, device: torch.device, zeros_offset: int = 1
) -> Experts:
    """The experts behind `expert(index, "gate_proj" | "up_proj" | "down_proj")`, brought over one at a time.

    Formats without an expert kernel of their own (FP8, NVFP4, INT8) become BF16; on a CPU all become float32.
    """
    if device.type == "cpu":
        plain = (_plain_expert(expert, index, zeros_offset, torch.float32) for index in range(num_experts))
        return PlainExperts(*_stack(plain, num_experts, device))
    if expert(0, "gate_proj").stored.format is WeightFormat.INT4:
        packed = (_int4_expert(expert, index, zeros_offset) for index in range(num_experts))
        return Int4Experts(*_stack(packed, num_experts, device))
    plain = (_plain_expert(expert, index, zeros_offset, torch.bfloat16) for index in range(num_experts))
    return PlainExperts(*_stack(plain, num_experts, device))


def _int4_expert(expert: Callable[[int, str], Bound], index: int, zeros_offset: int) -> tuple[Tensor, ...]:
    gate, up, down = (group_int_of(expert(index, part), zeros_offset) for part in ("gate_proj", "up_proj", "down_proj"))
    gate_up = pack_gate_up(torch.cat([gate.codes, up.codes])[None], torch.cat([gate.scales, up.scales])[None])
    return (*gate_up, *pack_down(down.codes[None], down.scales[None]))


def _plain_expert(
    expert: Callable[[int, str], Bound], index: int, zeros_offset: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    parts = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (read_weight(expert(index, part), zeros_offset=zeros_offset) for part in parts)
    return torch.cat([gate, up]).to(dtype)[None], down.to(dtype)[None]


def _stack(experts: Iterator[tuple[Tensor, ...]], num_experts: int, device: torch.device) -> list[Tensor]:
    """Each expert's tensors [1, ...] into tensors [E, ...] on the device: one expert at a time is in host memory."""
    result: list[Tensor] = []
    for index, tensors in enumerate(experts):
        if not result:
            result = [torch.empty((num_experts, *t.shape[1:]), dtype=t.dtype, device=device) for t in tensors]
        for target, tensor in zip(result, tensors, strict=True):
            target[index].copy_(tensor[0])
    return result
