"""Linears and experts whose products are compiled; decode and prefill are the same for any number of rows."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onebox.kernels.common.arrays import Stored, array, stored, tensor
from onebox.model.compiled.arithmetic import product
from onebox.model.compiled.blocks import column_index, to_blocks
from onebox.model.compiled.mixture import routed
from onebox.model.compiled.threads import by_rows
from onebox.model.linear import DecodeActivations, RowLinear, same_kind

__all__ = ["CompiledExperts", "CompiledLinear"]


@dataclass(frozen=True)
class CompiledLinear:
    """float32 or bfloat16 weights; products are summed in float32 whatever the rows' dtype."""

    numbers: Tensor
    """[K * N] in blocks."""
    num_rows: int
    """N."""

    @classmethod
    def of(cls, weight: Tensor) -> "CompiledLinear":
        """Of weight [N, K]."""
        return cls(to_blocks(weight.T), len(weight))

    @cached_property
    def stored(self) -> Stored:
        return stored(self.numbers)

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.prefill(rows.x, out_dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        numbers = array(x)
        (found,) = by_rows(lambda some: (product(numbers[some], self.stored),), len(numbers))
        return tensor(found, out_dtype or x.dtype)

    def blank(self, num_rows: int) -> "CompiledLinear":
        return CompiledLinear(self.numbers.new_empty(len(self.numbers) // self.num_rows * num_rows), num_rows)

    def copy_rows(self, source: RowLinear, rows: Tensor, places: Tensor) -> None:
        given = same_kind(self, source)
        self.numbers[self._index(places)] = given.numbers[given._index(rows)]

    def _index(self, rows: Tensor) -> Tensor:
        """Where the numbers of rows are: int64 [n, K]."""
        inner = len(self.numbers) // self.num_rows
        return column_index(rows, inner, self.num_rows, self.numbers.dtype)


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
