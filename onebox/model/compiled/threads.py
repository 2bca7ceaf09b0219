"""Splits the rows of a prompt over a CPU's threads: compiled code releases Python's lock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from onebox.kernels.common.arrays import Stored

__all__ = ["by_rows"]

T = TypeVar("T", bound=tuple[Stored, ...])

_LEAST_ROWS = 32
"""Fewest rows that are worth another thread."""


def by_rows(compute: Callable[[slice], T], num_rows: int) -> T:
    """The results of `compute` for all rows, from slices of them, as many at once as torch has threads."""
    count = min(torch.get_num_threads(), num_rows // _LEAST_ROWS)
    if count <= 1:
        return compute(slice(0, num_rows))
    edges = [num_rows * i // count for i in range(count + 1)]
    slices = [slice(edges[i], edges[i + 1]) for i in range(count)]
    parts = list(_pool(count).map(compute, slices))
    whole: Any = tuple(np.concatenate(some) for some in zip(*parts, strict=True))
    made: T = whole
    return made


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="onebox-rows")
