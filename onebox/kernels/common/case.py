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

    `make(device)` builds the keyword arguments, the same numbers every time. `is_full` marks a published model's shape:
    compiled ahead and run on a GPU, too large for the interpreter. `mutates` names the arguments that the call writes
    into; they are compared as results are.
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
    """Cases of an `op` that makes rows of heads and of a projection in parts; the lists hold (heads, dim, parts).

    The three small ones have one row, three rows in float32, and none; the two full ones have one row and twelve.
    `inputs` makes the arguments of a device, a shape [R, heads, dim], parts and a dtype.
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
