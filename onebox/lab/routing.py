"""How many experts the steps of a row really read, counted on the device, beside the number to expect.

Steps run without graphs for this, so it is no measurement of time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.model.layers import fused, plain
from onebox.spec.model import ModelSpec

__all__ = ["ExpertsRead", "count_experts", "expected_experts"]


class ExpertsRead(NamedTuple):
    """Distinct experts of one layer in one step."""

    mean: float
    expected: float
    """If each row chooses independently of the others."""


@contextmanager
def count_experts(spec: ModelSpec, num_rows: int) -> Iterator[list[ExpertsRead]]:
    """Counts during the block, over all choices for so many rows at once; the list holds the result after it."""
    counts: list[Tensor] = []
    found: list[ExpertsRead] = []
    places: tuple[tuple[Any, str], ...] = ((fused, "route_fused"), (plain, "route"))
    originals = [getattr(module, name) for module, name in places]

    def counting(operation: Any) -> Any:
        def choose(*args: Any, **kwargs: Any) -> Any:
            chosen = operation(*args, **kwargs)
            if len(chosen[0]) == num_rows:
                counts.append(_num_distinct(chosen[0], spec.num_experts))
            return chosen

        return choose

    for (module, name), operation in zip(places, originals, strict=True):
        setattr(module, name, counting(operation))
    try:
        yield found
    finally:
        for (module, name), operation in zip(places, originals, strict=True):
            setattr(module, name, operation)
    if counts:
        mean = float(torch.stack(counts).to(torch.float64).mean())
        found.append(ExpertsRead(mean, expected_experts(spec, num_rows)))


def expected_experts(spec: ModelSpec, num_rows: int) -> float:
    """Distinct experts of so many rows that choose independently, each expert as likely as any other."""
    return spec.num_experts * (1 - (1 - spec.num_experts_per_tok / spec.num_experts) ** num_rows)


def _num_distinct(ids: Tensor, num_experts: int) -> Tensor:
    """Of ids [R, k]; those below 0 are no experts."""
    seen = torch.zeros(num_experts + 1, dtype=torch.bool, device=ids.device)
    seen[ids.flatten().to(torch.int64)] = True  # -1 is the last place
    return seen[:num_experts].sum()
