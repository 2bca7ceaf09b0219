"""Recurrent states of 16 bits, compiled: arithmetic reads float32, so a state is widened, and narrowed to be stored.

The array that a state is stored in says how: float32 as it is, uint16 as bfloat16, int16 as float16. Numbers are
rounded to nearest, ties to even. Integer arithmetic, because not every CPU converts float16.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from onebox.kernels.common.array_types import Array, StoredState
from onebox.model.compiled.arithmetic import bits_of, float_of, rounded, widen
from onebox.model.compiled.jit import inner

__all__ = ["narrow_state", "state_number", "widen_state"]

_HALF, _SMALLEST_STEP, _LARGEST_STEPS = np.float32(0.5), np.float32(2.0**-24), np.float32(2.0**24)


def widen_state(stored: StoredState) -> Array:
    """A stored state [Dk, Dv] as float32: a copy, or the state itself where it is float32."""
    raise NotImplementedError(stored)


def narrow_state(state: Array, stored: StoredState) -> None:
    """Stores a state whose numbers are rounded already; where it is float32, it is the stored one."""
    raise NotImplementedError(state, stored)


def state_number(number: float, stored: StoredState) -> float:
    """A float32 rounded to what `stored` stores, as float32."""
    raise NotImplementedError(number, stored)


@overload(widen_state)  # type: ignore[untyped-decorator]
def _widen_state(stored: Any) -> Any:
    def copied(stored: Any) -> Any:
        state = np.empty(stored.shape, dtype=np.float32)
        for i in range(state.shape[0]):
            for j in range(state.shape[1]):
                state[i, j] = _number_of(stored[i, j])
        return state

    def as_it_is(stored: Any) -> Any:
        return stored

    return as_it_is if stored.dtype == types.float32 else copied


@overload(narrow_state)  # type: ignore[untyped-decorator]
def _narrow_state(state: Any, stored: Any) -> Any:  # noqa: ARG001 - the shape of what it makes
    def copied(state: Any, stored: Any) -> None:
        for i in range(state.shape[0]):
            for j in range(state.shape[1]):
                stored[i, j] = _bits_stored(state[i, j], stored)

    def nothing(state: Any, stored: Any) -> None:
        pass

    return nothing if stored.dtype == types.float32 else copied


@overload(state_number, inline="always")  # type: ignore[untyped-decorator]
def _state_number(number: Any, stored: Any) -> Any:  # noqa: ARG001
    def through_bits(number: Any, stored: Any) -> Any:
        return _number_of(_bits_stored(number, stored))

    def as_it_is(number: Any, stored: Any) -> Any:  # noqa: ARG001
        return number

    return as_it_is if stored.dtype == types.float32 else through_bits


def _number_of(bits: Any) -> Any:
    """The float32 of a stored number."""


@overload(_number_of, inline="always")  # type: ignore[untyped-decorator]
def _number_of_bits(bits: Any) -> Any:
    def of_bfloat16(bits: Any) -> Any:
        return widen(bits)

    def of_float16(bits: Any) -> Any:
        return _float16_number(bits)

    return of_float16 if bits == types.int16 else of_bfloat16


def _bits_stored(number: Any, stored: Any) -> Any:
    """A float32 as `stored` stores it."""


@overload(_bits_stored, inline="always")  # type: ignore[untyped-decorator]
def _bits_of_number(number: Any, stored: Any) -> Any:  # noqa: ARG001
    def as_bfloat16(number: Any, stored: Any) -> Any:
        return rounded(number, stored)

    def as_float16(number: Any, stored: Any) -> Any:  # noqa: ARG001
        return _float16_bits(number)

    return as_float16 if stored.dtype == types.int16 else as_bfloat16


@inner
def _float16_number(bits: Any) -> Any:
    word = np.int32(bits)
    size = np.int32(word & np.int32(0x7FFF))
    number = float_of(np.int32((size << np.int32(13)) + np.int32(0x38000000)))
    number = np.float32(size) * _SMALLEST_STEP if size < np.int32(0x400) else number
    number = float_of(np.int32((size << np.int32(13)) | np.int32(0x7F800000))) if size >= np.int32(0x7C00) else number
    return -number if word < np.int32(0) else number


@inner
def _float16_bits(number: Any) -> Any:
    word = bits_of(number)
    size = np.int32(word & np.int32(0x7FFFFFFF))
    odd = (size >> np.int32(13)) & np.int32(1)
    bits = np.int32((size + np.int32(0xFFF) + odd - np.int32(0x38000000)) >> np.int32(13))
    bits = np.int32(0x7C00) if bits > np.int32(0x7C00) else bits
    # Below float16's normal numbers the step is 2^-24, as it is of float32 numbers from 0.5 to 1.
    steps = ((float_of(size) + _HALF) - _HALF) * _LARGEST_STEPS
    bits = np.int32(steps) if size < np.int32(0x38800000) else bits
    bits = np.int32(0x7E00) if size > np.int32(0x7F800000) else bits
    return np.int16(bits | np.int32(0x8000)) if word < np.int32(0) else np.int16(bits)
