"""One input of an operation, shared by tests, ahead-of-time compilation and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

__all__ = ["Case", "fused_rows_cases", "generator"]


@dataclass(frozen=True)
class Case:
    """Arguments for one call of `op`.

    `make(device)` builds the keyword arguments, the same numbers every time. `is_full` marks a shape of a published
    model: compiled ahead of time and run on a GPU, too large for the interpreter. `mutates` lists the arguments that
    the call writes; they are compared like results.
    """

    op: str
    name: str
    make: Callable[[torch.device], dict[str, Any]]
    is_full: bool = False
    mutates: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def generator(seed: int) -> torch.Generator:
    """A CPU generator: inputs are drawn on the host, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(seed)


def fused_rows_cases(
    op: str, inputs: Callable[..., dict[str, Any]], small: list[tuple[int, int, int]], full: list[tuple[int, int, int]]
) -> list[Case]:
    """Cases of an `op` that computes rows from heads and parts of a projection; the lists hold (heads, dim, parts).

    The three small cases have one row, three rows in float32, and no row; the two full cases have one row and twelve.
    `inputs` makes the arguments from a device, a shape [R, heads, dim], the number of parts and a dtype.
    """
    cases = []
    for rows, dtype, (heads, dim, parts), is_full in (
        (1, torch.bfloat16, small[0], False),
        (3, torch.float32, small[1], False),
        (0, torch.bfloat16, small[2], False),
        (1, torch.bfloat16, full[0], True),
        (12, torch.bfloat16, full[1], True),
    ):
        make = partial(inputs, shape=(rows, heads, dim), parts=parts, dtype=dtype)
        cases.append(Case(op, f"{rows}x{heads}x{dim}-{parts}-{dtype}", make, is_full))
    return cases
