"""Linears and experts whose products are compiled; decode and prefill are the same for any number of rows."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onebox.kernels.common.arrays import Stored, array, stored, tensor
from onebox.model.compiled.arithmetic import product
from onebox.model.compiled.blocks import to_blocks
from onebox.model.compiled.mixture import routed
from onebox.model.compiled.threads import by_rows
from onebox.model.linear import DecodeActivations

__all__ = ["CompiledExperts", "CompiledLinear"]


@dataclass(frozen=True)
class CompiledLinear:
    """float32 or bfloat16 weights; products are summed in float32 whatever the rows' dtype."""

    numbers: Tensor
    """[K * N] in blocks."""

    @classmethod
    def of(cls, weight: Tensor) -> "CompiledLinear":
        """Of weight [N, K]."""
        return cls(to_blocks(weight.T))

    @cached_property
    def stored(self) -> Stored:
        return stored(self.numbers)

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.prefill(rows.x, out_dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        numbers = array(x)
        (found,) = by_rows(lambda some: (product(numbers[some], self.stored),), len(numbers))
        return tensor(found, out_dtype or x.dtype)


@dataclass(frozen=True)
class CompiledExperts:
    """Each row through its k experts, weighted and summed in the order of ids."""

    gate_up: Tensor
    """[E, H * 2I]: each in blocks, the gate's columns first."""
    down: Tensor
    """[E, I * H]: each in blocks."""

    @cached_property
    def stored(self) -> tuple[Stored, Stored]:
        return stored(self.gate_up), stored(self.down)

    def decode(self, rows: DecodeActivations, ids: Tensor, weights: Tensor) -> Tensor:
        return self.prefill(rows.x, ids, weights)

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        numbers, chosen, shares = array(x), ids.to(torch.int64).numpy(), array(weights)
        (found,) = by_rows(lambda some: (routed(numbers[some], chosen[some], shares[some], *self.stored),), len(x))
        return torch.from_numpy(found)
