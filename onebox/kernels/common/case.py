"""One input of an operation, shared by tests, ahead-of-time compilation and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

__all__ = ["Case", "fused_rows_case", "generator"]


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


def fused_rows_case(
    op: str,
    inputs: Callable[..., dict[str, Any]],
    shape: tuple[int, int, int],
    parts: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_full: bool = False,
) -> Case:
    """A case of an `op` that makes rows of heads, `shape` [R, heads, dim], and of a projection that comes in parts.

    `inputs` makes the arguments of a device and of shape, parts and dtype.
    """
    rows, heads, dim = shape
    make = partial(inputs, shape=shape, parts=parts, dtype=dtype)
    return Case(op, f"{rows}x{heads}x{dim}-{parts}-{dtype}", make, is_full)
