"""The inner loops of products, written as LLVM's own instructions: their sums are vectors that stay in registers.

A tile is some rows times one block of columns. Each of its numbers is summed in the order of K, whatever the number of
rows. Arrays are contiguous, and float32 unless they are called stored.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onebox.model.compiled.vectors import (
    BLOCK_COLUMNS,
    INT32,
    INT64,
    LANES,
    VECTOR,
    broadcast,
    is_bfloat16,
    load,
    load_pairs,
    multiply,
    multiply_add,
    round_to_bfloat16,
    round_to_float16,
    store,
    sum_lanes,
    sum_loop,
)

__all__ = ["add_rows", "dot_vectors", "tile", "update_block"]

_PREFETCH_ROWS = 32
"""How many k ahead of its use the weight is prefetched. CPUs do so by themselves, but not across memory pages."""
_LINE_BYTES = 64
_PLACES = range(0, BLOCK_COLUMNS, LANES)
_SUMS = 4
"""Vectors in which a dot product is summed side by side: the latency of an addition in cycles."""
_INTEGER = types.int64
"""The type that integer arguments are converted to."""


def tile(num_rows: int) -> Any:
    """A function (x, row, weight, place, stride, out, column) for compiled code, which writes into a block of out.

    x [R, K] and out [R, N]; the rows are `num_rows` from `row`, the columns BLOCK_COLUMNS from `column`. The
    weight's row k begins at `place` + k * `stride` of its array: float32, or bfloat16 in pairs (`blocks.py`).
    """

    def write(builder: Any, x: Any, row: Any, weight: Any, place: Any, stride: Any, out: Any, column: Any) -> None:
        data = [_row(builder, x, builder.add(row, INT64(i))) for i in range(num_rows)]

        def add(k: Any, sums: list[Any]) -> list[Any]:
            line = builder.gep(weight.data, [builder.add(place, builder.mul(k, stride))])
            _prefetch(builder, line)
            weights = load_pairs(builder, line) if is_bfloat16(line) else _block(builder, line)
            numbers = [broadcast(builder, builder.load(builder.gep(start, [k]))) for start in data]
            return _multiply_add_all(builder, numbers, weights, sums)

        count = builder.extract_value(x.shape, 1)
        totals = sum_loop(builder, count, [VECTOR(None)] * (num_rows * len(_PLACES)), add)
        for i in range(num_rows):
            target = builder.gep(_row(builder, out, builder.add(row, INT64(i))), [column])
            _store_block(builder, totals[i * len(_PLACES) :], target)

    @intrinsic  # type: ignore[untyped-decorator]
    def compute(_: Any, x: Any, row: Any, weight: Any, place: Any, stride: Any, out: Any, column: Any) -> Any:  # noqa: ARG001
        return types.void(x, _INTEGER, weight, _INTEGER, _INTEGER, out, _INTEGER), _lowered(write)

    return compute


@intrinsic  # type: ignore[untyped-decorator]
def update_block(
    _: Any,
    before: Any,
    state: Any,
    column: Any,  # noqa: ARG001 - converted to int64
    key: Any,
    correction: Any,
    decay: Any,  # noqa: ARG001 - converted to float32
    probes: Any,
    out: Any,
    stored: Any,
) -> Any:
    """Updates a block of columns of a state [K, N]; then out [2, N] is the product of probes [2, K] and the state.

    state = before * decay + the outer product of key [K] and correction [N], rounded to what the array `stored` stores;
    `before` may be the same array.
    """
    kinds = before, state, _INTEGER, key, correction, types.float32, probes, out, stored
    return types.void(*kinds), _lowered(partial(_update_block, _ROUNDING.get(stored.dtype)))


_ROUNDING = {types.uint16: round_to_bfloat16, types.int16: round_to_float16}


def _update_block(
    rounding: Callable[[Any, Any], Any] | None,
    builder: Any,
    before: Any,
    state: Any,
    column: Any,
    key: Any,
    correction: Any,
    decay: Any,
    probes: Any,
    out: Any,
    _stored: Any,
) -> None:
    block, fading = _block(builder, builder.gep(correction.data, [column])), broadcast(builder, decay)
    rows = [_row(builder, probes, INT64(i)) for i in range(2)]

    def add(k: Any, sums: list[Any]) -> list[Any]:
        held = _block(builder, builder.gep(_row(builder, before, k), [column]))
        number = broadcast(builder, builder.load(builder.gep(key.data, [k])))
        held = [
            multiply_add(builder, number, new, multiply(builder, old, fading))
            for old, new in zip(held, block, strict=True)
        ]
        held = held if rounding is None else [rounding(builder, vector) for vector in held]
        _store_block(builder, held, builder.gep(_row(builder, state, k), [column]))
        numbers = [broadcast(builder, builder.load(builder.gep(row, [k]))) for row in rows]
        return _multiply_add_all(builder, numbers, held, sums)

    totals = sum_loop(builder, builder.extract_value(state.shape, 0), [VECTOR(None)] * (2 * len(_PLACES)), add)
    for i in range(2):
        _store_block(builder, totals[i * len(_PLACES) :], builder.gep(_row(builder, out, INT64(i)), [column]))


@intrinsic  # type: ignore[untyped-decorator]
def add_rows(_: Any, shares: Any, stored: Any, place: Any, stride: Any, out: Any, column: Any) -> Any:  # noqa: ARG001
    """Adds rows of stored numbers, each times its share of [K], to a block of columns of out [N].

    Row k begins at `place` + k * `stride` of the array stored.
    """
    return types.void(shares, stored, _INTEGER, _INTEGER, out, _INTEGER), _lowered(_add_rows)


def _add_rows(builder: Any, shares: Any, stored: Any, place: Any, stride: Any, out: Any, column: Any) -> None:
    target = builder.gep(out.data, [column])

    def add(k: Any, sums: list[Any]) -> list[Any]:
        row = builder.gep(stored.data, [builder.add(place, builder.mul(k, stride))])
        number = broadcast(builder, builder.load(builder.gep(shares.data, [k])))
        return _multiply_add_all(builder, [number], _block(builder, row), sums)

    count = builder.extract_value(shares.shape, 0)
    _store_block(builder, sum_loop(builder, count, _block(builder, target), add), target)


@intrinsic  # type: ignore[untyped-decorator]
def dot_vectors(_: Any, a: Any, b: Any) -> Any:
    """The sum of the products of a and stored numbers b, as far as whole vectors go."""
    return types.float32(a, b), _lowered(_dot_vectors)


def _dot_vectors(builder: Any, a: Any, b: Any) -> Any:
    def add(width: int) -> Callable[[Any, list[Any]], list[Any]]:
        def add_some(k: Any, sums: list[Any]) -> list[Any]:
            start = builder.add(begun, builder.mul(k, INT64(width * LANES)))
            places = [builder.add(start, INT64(i * LANES)) for i in range(width)]
            pairs = [[load(builder, builder.gep(part.data, [place])) for part in (a, b)] for place in places]
            return [multiply_add(builder, x, y, total) for (x, y), total in zip(pairs, sums, strict=True)]

        return add_some

    begun, length = INT64(0), builder.extract_value(a.shape, 0)
    at_once = builder.sdiv(length, INT64(_SUMS * LANES))
    sums = sum_loop(builder, at_once, [VECTOR(None)] * _SUMS, add(_SUMS))
    begun = builder.mul(at_once, INT64(_SUMS * LANES))
    left = builder.sdiv(builder.sub(length, begun), INT64(LANES))
    sums[:1] = sum_loop(builder, left, sums[:1], add(1))
    while len(sums) > 1:
        sums = [builder.fadd(*sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return sum_lanes(builder, sums[0])


def _lowered(write: Callable[..., Any]) -> Callable[..., Any]:
    """The code generator that Numba calls, around `write`, which emits the instructions."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = [
            context.make_array(kind)(context, builder, arg) if isinstance(kind, types.Array) else arg
            for kind, arg in zip(signature.args, args, strict=True)
        ]
        found = write(builder, *parts)
        return context.get_dummy_value() if signature.return_type is types.void else found

    return generate


def _row(builder: Any, array: Any, row: Any) -> Any:
    """Where a row of an array [R, N] begins."""
    return builder.gep(array.data, [builder.mul(row, builder.extract_value(array.shape, 1))])


def _block(builder: Any, data: Any) -> list[Any]:
    return [load(builder, builder.gep(data, [INT64(i)])) for i in _PLACES]


def _store_block(builder: Any, vectors: list[Any], data: Any) -> None:
    for i, vector in zip(_PLACES, vectors, strict=False):
        store(builder, vector, builder.gep(data, [INT64(i)]))


def _multiply_add_all(builder: Any, numbers: list[Any], weights: list[Any], sums: list[Any]) -> list[Any]:
    """The sums, row by row, with the products of one more k."""
    terms = [(number, weight) for number in numbers for weight in weights]
    return [multiply_add(builder, *term, total) for term, total in zip(terms, sums, strict=True)]


def _prefetch(builder: Any, line: Any) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    num_bytes = BLOCK_COLUMNS * (2 if is_bfloat16(line) else 4)
    start = builder.bitcast(line, byte)
    for place in range(0, num_bytes, _LINE_BYTES):
        ahead = builder.gep(start, [INT64(_PREFETCH_ROWS * num_bytes + place)])
        builder.call(fetch, [ahead, INT32(0), INT32(3), INT32(1)])  # to read, into the nearest cache, data
