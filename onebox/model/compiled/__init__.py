"""Decode steps on a CPU as machine code, compiled by Numba at first use and kept in the user's cache.

A step of a small model is thousands of small operations, and calling each from Python costs more than computing it.
Here a layer is two calls (`layers/compiled.py`). Numba is optional, since a GPU machine needs none of this: without it
the plain layers call the kernels' twins. Nothing here knows requests, and only bfloat16 KV pages are read.

Rules that keep a row's bits independent of the other rows: every number is a function of its own row and of its
sequence's memory; the order of a sum does not depend on the number of rows; arithmetic is float32 unless stated, with
multiplications and additions fused everywhere (`contract`), and nothing else is reordered.
"""

from functools import cache
from importlib.util import find_spec

__all__ = ["is_available"]


@cache
def is_available() -> bool:
    """Whether Numba is installed."""
    return find_spec("numba") is not None
