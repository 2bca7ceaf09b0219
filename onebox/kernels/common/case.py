"""One input of an operation, shared by tests, ahead-of-time compilation and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Case", "generator"]


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
