"""Compiles the largest functions in a second process while the first loads the model.

Only if they are not in the cache yet, that is once after an installation. A compiler works on one function at a time,
so only a second process can use a second core; it starts fast, because nothing here imports torch. Without it the same
functions would be compiled later, at their first call.
"""

import atexit
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np

from onebox.kernels.common.array_types import Array, Stored
from onebox.model.compiled.attention import Projected, attend
from onebox.model.compiled.delta_net import DeltaArrays, PoolArrays, delta_step
from onebox.model.compiled.jit import cache_directory

__all__ = ["compile_steps", "finish", "start"]

_MOST_SECONDS = 60.0


@cache
def start(*, is_bfloat16: bool) -> "subprocess.Popen[bytes] | None":
    """The process that compiles for states in bfloat16 or in float32, or None if the cache has them."""
    directory = cache_directory()
    if directory is None or _done_marker(directory, is_bfloat16=is_bfloat16).exists():
        return None
    command = f"from onebox.model.compiled.ahead import compile_steps; compile_steps(is_bfloat16={is_bfloat16})"
    nowhere = subprocess.DEVNULL
    try:
        process = subprocess.Popen([sys.executable, "-c", command], stdin=nowhere, stdout=nowhere, stderr=nowhere)
    except OSError:
        return None  # no process or descriptor is left: it is compiled here
    atexit.register(_end, process)
    return process


@cache
def finish(*, is_bfloat16: bool) -> None:
    """Waits for the process, if there is one; what it did not finish is compiled here at the first call."""
    process = start(is_bfloat16=is_bfloat16)
    if process is not None:
        try:
            process.wait(_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            _end(process)


def compile_steps(*, is_bfloat16: bool) -> None:
    """Calls the functions with the smallest arrays of the types that layers pass."""

    def stored(*shape: int) -> Stored:
        return np.zeros(shape, dtype=np.uint16) if is_bfloat16 else _zeros(*shape)

    ints, conv = np.zeros(2, dtype=np.int32), 3 * 32
    none = ints[:1].copy()
    pool = PoolArrays(_zeros(1, 1, 32, 32), stored(1, 3, conv), stored(1, 1, conv), _zeros(1, 1, 2, 1))
    matrices = stored(32 * (conv + 32)), stored(32 * 2), stored(32 * 32)
    arrays = DeltaArrays(_zeros(32), *matrices, _zeros(4, conv), np.zeros(1), _zeros(1), _zeros(32))
    delta_step(stored(1, 32), _zeros(1, 32), arrays, pool, ints, none, none, 1e-6)
    pages = np.zeros((1, 1, 32, 32), dtype=np.uint16)
    brought = Projected(_zeros(1, 1, 32), _zeros(1, 32), _zeros(1, 1, 32), _zeros(1, 1, 32))
    table = np.zeros((1, 1), dtype=np.int32)
    attend(brought, pages, pages.copy(), np.zeros(1, dtype=np.int64), table, none, ints, 1.0)
    directory = cache_directory()
    if directory is not None:
        _done_marker(directory, is_bfloat16=is_bfloat16).touch()


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, dtype=np.float32)


def _done_marker(directory: str, *, is_bfloat16: bool) -> Path:
    return Path(directory) / ("done-bfloat16" if is_bfloat16 else "done-float32")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
