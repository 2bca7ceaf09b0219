"""How functions are compiled: one set of options for all, and a cache that is invalidated when their source changes."""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import types
from numba.extending import intrinsic

from onebox.spec.cache import writable_cache_directory

__all__ = ["cache_directory", "compiled", "inner", "never_inline"]

_ROOM_BYTES = 16 << 20
"""Of all compiled functions together, at most."""
_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """The function as machine code, compiled at its first call for the types it is given."""
    return _decorated(function, no_cfunc_wrapper=True)


def inner(function: F) -> F:
    """The same for a function that only compiled ones call: Python cannot call it."""
    return _decorated(function, no_cfunc_wrapper=True, no_cpython_wrapper=True)


@intrinsic  # type: ignore[untyped-decorator]
def never_inline(_: Any) -> Any:
    """Called in a large function: its copies in all callers would take long to compile and gain nothing."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


def _decorated(function: F, **options: bool) -> F:
    directory = cache_directory()
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, directory or ""
    try:
        decorate = numba.njit(cache=bool(directory), fastmath={"contract"}, nogil=True, error_model="numpy", **options)
        made: F = decorate(function)
        if directory:
            _forgive(made._cache)  # type: ignore[attr-defined]
    finally:
        numba.config.CACHE_DIR = before
    return made


@cache
def cache_directory() -> str | None:
    """A directory named by a hash of this package's source, or None if none can be written.

    Numba itself checks only the file of the function that is called, not those of the functions it calls.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    directory = writable_cache_directory(f"compiled/{digest.hexdigest()[:16]}", _ROOM_BYTES)
    return str(directory) if directory else None


def _forgive(cache: Any) -> None:
    """A cache that cannot be written any more, or whose files are damaged, costs time and nothing else."""
    load, save = cache.load_overload, cache.save_overload

    def load_overload(*args: Any) -> Any:
        try:
            return load(*args)
        except Exception as error:  # whatever unpickling half a file raises
            _log.warning("compiled code cannot be read from the cache and is compiled again: %r", error)
            return None

    def save_overload(*args: Any) -> None:
        try:
            save(*args)
        except OSError as error:
            _log.warning("compiled code cannot be cached: %s", error)

    cache.load_overload, cache.save_overload = load_overload, save_overload
