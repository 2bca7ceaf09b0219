"""Decode steps on a CPU as machine code, made by Numba when first needed and kept in the user's cache.

A step of a small model is thousands of small operations, and calling each from Python costs more than computing it.
Here a layer is two calls. Numba may be absent (a GPU machine needs none of this): then the layers call the kernels'
twins. Nothing here knows requests, and of KV pages only bfloat16 ones.

Rules of these files, which a row's bits rest on: every number is a function of its own row and of what its sequence
remembers; sums run in one order that no count of rows changes; all arithmetic is float32 but where it says so, and
multiplications are fused with additions everywhere (`contract`), nothing else is reordered.
"""

from functools import cache
from importlib.util import find_spec

__all__ = ["is_available"]


@cache
def is_available() -> bool:
    """Whether layers can be compiled here."""
    return find_spec("numba") is not None
