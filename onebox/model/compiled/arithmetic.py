"""What compiled layers are built from: bfloat16 bits, exp, sigmoid and SiLU, sums, products, norms."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from onebox.kernels.common.array_types import Array, Stored
from onebox.model.compiled.jit import compiled, inner, never_inline
from onebox.model.compiled.tiles import dot_vectors, tile
from onebox.model.compiled.vectors import BLOCK_COLUMNS, LANES

__all__ = [
    "add_norm",
    "copy",
    "dot",
    "exp",
    "inverse_rms",
    "product",
    "rounded",
    "sigmoid",
    "silu",
    "widen",
]

# float32 constants: Numba reads Python's numbers as float64.
_ZERO, _ONE = np.float32(0), np.float32(1)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that its products with small integers are exact
_LN2_LOW = np.float32(-2.1219444005469057e-4)
_SHIFTER = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the lowest bits
_SHIFTER_BITS = np.int32(0x4B400000)
_EXP_MIN, _EXP_MAX = np.float32(-87), np.float32(88)
_INVERSE_FACTORIALS = tuple(np.float32(1 / f) for f in (5040, 720, 120, 24, 6, 2))

_one, _two, _three, _four, _eight = tile(1), tile(2), tile(3), tile(4), tile(8)


@intrinsic  # type: ignore[untyped-decorator]
def float_of(_: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""
    return types.float32(bits), lambda _context, builder, _signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(_: Any, number: Any) -> Any:
    """The 32 bits of a float32, as a signed integer."""
    return types.int32(number), lambda _context, builder, _signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def widen(_: Any, stored: Any) -> Any:
    """A stored number as float32."""
    return types.float32(stored), _widen


def _widen(_: Any, builder: Any, signature: Any, args: Any) -> Any:
    if signature.args[0] != types.uint16:
        return args[0]
    word = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())


def rounded(number: Any, target: Any) -> Any:
    """A float32 as the array `target` stores it: to the nearest bfloat16, the even one of two, or as it is."""


@overload(rounded, inline="always")  # type: ignore[untyped-decorator]
def _rounded(number: Any, target: Any) -> Any:  # noqa: ARG001 - the shape of what it makes
    def to_bfloat16(number: Any, target: Any) -> Any:  # noqa: ARG001
        return _nearest(number)

    def as_it_is(number: Any, target: Any) -> Any:  # noqa: ARG001
        return number

    return to_bfloat16 if target.dtype == types.uint16 else as_it_is


@inner
def _nearest(number: Any) -> Any:
    bits = np.uint32(bits_of(number))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    is_number = number == number
    return np.uint16(nearest) if is_number else np.uint16(0x7FC0)


@inner
def exp(x: Any) -> Any:
    """Within two units in the last place between -87 and 88, and constant beyond; not a number where x is not."""
    x = _EXP_MIN if x < _EXP_MIN else x
    x = _EXP_MAX if x > _EXP_MAX else x
    shifted = x * _LOG2_E + _SHIFTER
    whole = shifted - _SHIFTER
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    power = _INVERSE_FACTORIALS[0]
    power = power * rest + _INVERSE_FACTORIALS[1]
    power = power * rest + _INVERSE_FACTORIALS[2]
    power = power * rest + _INVERSE_FACTORIALS[3]
    power = power * rest + _INVERSE_FACTORIALS[4]
    power = power * rest + _INVERSE_FACTORIALS[5]
    power = power * rest + _ONE
    power = power * rest + _ONE
    scale = float_of(np.int32((bits_of(shifted) - _SHIFTER_BITS + np.int32(127)) << np.int32(23)))
    return power * scale


@inner
def sigmoid(x: Any) -> Any:
    return _ONE / (_ONE + exp(-x))


@inner
def silu(x: Any) -> Any:
    return x / (_ONE + exp(-x))


@inner
def copy(source: Array, target: Array) -> None:
    for i in range(len(target)):
        target[i] = source[i]


@inner
def dot(a: Array, b: Stored) -> Any:
    """In vectors, and then what is left of the length."""
    total = dot_vectors(a, b)
    for i in range(len(a) // LANES * LANES, len(a)):
        total += a[i] * widen(b[i])
    return total


@compiled
def product(x: Array, weight: Stored) -> Array:
    """[R, N]: x [R, K] times a matrix [K, N] in blocks (`blocks.py`)."""
    never_inline()
    rows, depth = x.shape
    columns = len(weight) // depth
    out = np.empty((rows, columns), dtype=np.float32)
    whole = columns // BLOCK_COLUMNS * BLOCK_COLUMNS
    for column in range(0, whole, BLOCK_COLUMNS):
        row, place = 0, column * depth
        while row + 8 <= rows:
            _eight(x, row, weight, place, BLOCK_COLUMNS, out, column)
            row += 8
        if row + 4 <= rows:
            _four(x, row, weight, place, BLOCK_COLUMNS, out, column)
            row += 4
        if row + 3 == rows:
            _three(x, row, weight, place, BLOCK_COLUMNS, out, column)
        elif row + 2 == rows:
            _two(x, row, weight, place, BLOCK_COLUMNS, out, column)
        elif row + 1 == rows:
            _one(x, row, weight, place, BLOCK_COLUMNS, out, column)
    for column in range(whole, columns):
        for row in range(rows):
            out[row, column] = dot(x[row], weight[column * depth : (column + 1) * depth])
    return out


@inner
def inverse_rms(x: Array, eps: float) -> Any:
    return _ONE / np.sqrt(dot(x, x) / np.float32(len(x)) + np.float32(eps))


@compiled
def add_norm(added: Stored, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """(the zero-centred norm of added + residual, that sum), [R, H] each."""
    rows, hidden = added.shape
    total = np.empty((rows, hidden), dtype=np.float32)
    normed = np.empty((rows, hidden), dtype=np.float32)
    for row in range(rows):
        for i in range(hidden):
            total[row, i] = widen(added[row, i]) + residual[row, i]
        scale = inverse_rms(total[row], eps)
        for i in range(hidden):
            normed[row, i] = total[row, i] * scale * (_ONE + weight[i])
    return normed, total
