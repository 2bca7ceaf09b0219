"""The inner loop of a product, written as LLVM's own instructions: its sums are vectors that stay in registers.

From loops in Python the compiler would keep the sums in memory. A tile is some rows times one block of columns; each of
its numbers is summed in the order of K, whatever the number of rows.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from onebox.model.compiled.blocks import BLOCK_COLUMNS

__all__ = ["tile"]

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = 16
"""Numbers in a vector; a CPU with shorter ones takes several."""
_VECTOR, _WORDS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT32, _LANES)
_FUSED = ("contract",)
_AHEAD = 32
"""How many k ahead of its use the weight is fetched. CPUs do so by themselves, but not across pages of memory."""
_LINE_BYTES = 64


def tile(num_rows: int) -> Any:
    """A function (x, row, weight, place, stride, out, column) for compiled code, which writes into a block of out.

    x [R, K] and out [R, N] are float32 and contiguous; the rows are `num_rows` from `row`, the columns BLOCK_COLUMNS
    from `column`. What is multiplied begins at `place` of the contiguous array weight and goes on `stride` further for
    each k.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def compute(_: Any, x: Any, row: Any, weight: Any, place: Any, stride: Any, out: Any, column: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = [context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2, 5)]
            _Tile(builder, num_rows, *arrays).write(args[1], args[3], args[4], args[6])
            return context.get_dummy_value()

        return types.void(x, *_as_int64(row), weight, *_as_int64(place, stride), out, *_as_int64(column)), generate

    return compute


def _as_int64(*integers: Any) -> tuple[Any, ...]:
    """What any kind of integer is taken as."""
    return (types.int64,) * len(integers)


class _Tile:
    """Writes one loop along K."""

    def __init__(self, builder: Any, num_rows: int, x: Any, weight: Any, out: Any) -> None:
        self._builder, self._num_rows = builder, num_rows
        self._x, self._weight, self._out = x, weight, out
        self._inner = builder.extract_value(x.shape, 1)
        self._columns = builder.extract_value(out.shape, 1)
        self._is_narrow = isinstance(weight.data.type.pointee, ir.IntType)

    def write(self, row: Any, place: Any, stride: Any, column: Any) -> None:
        builder, count = self._builder, self._num_rows * BLOCK_COLUMNS // _LANES
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        k, sums = builder.phi(_INT64), [builder.phi(_VECTOR) for _ in range(count)]
        added = self._add(k, row, builder.add(place, builder.mul(k, stride)), sums)
        following = builder.add(k, _INT64(1))
        for phi, value in zip([k, *sums], [following, *added], strict=True):
            phi.add_incoming(phi.type(0 if phi is k else None), before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, self._inner), loop, after)
        builder.position_at_end(after)
        self._store(added, row, column)

    def _add(self, k: Any, row: Any, place: Any, sums: list[Any]) -> list[Any]:
        """The sums with one k more."""
        builder = self._builder
        self._fetch_ahead(place)
        weights = [self._load(builder.add(place, _INT64(i))) for i in range(0, BLOCK_COLUMNS, _LANES)]
        added = []
        for i in range(self._num_rows):
            number = builder.load(self._at(self._x, builder.add(row, _INT64(i)), self._inner, k))
            first = builder.insert_element(_VECTOR(ir.Undefined), number, _INT32(0))
            everywhere = builder.shuffle_vector(first, _VECTOR(ir.Undefined), _WORDS(None))
            for j, weight in enumerate(weights):
                term = builder.fmul(everywhere, weight, flags=_FUSED)
                added.append(builder.fadd(sums[i * len(weights) + j], term, flags=_FUSED))
        return added

    def _fetch_ahead(self, place: Any) -> None:
        builder, byte = self._builder, ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        start = builder.bitcast(builder.gep(self._weight.data, [place]), byte)
        num_bytes = BLOCK_COLUMNS * (2 if self._is_narrow else 4)
        for line in range(0, num_bytes, _LINE_BYTES):
            ahead = builder.gep(start, [_INT64(_AHEAD * num_bytes + line)])
            builder.call(fetch, [ahead, _INT32(0), _INT32(3), _INT32(1)])  # to read, into the nearest cache, data

    def _load(self, place: Any) -> Any:
        """A vector of stored numbers, widened."""
        builder, data = self._builder, self._builder.gep(self._weight.data, [place])
        pointer = builder.bitcast(data, ir.VectorType(data.type.pointee, _LANES).as_pointer())
        if not self._is_narrow:
            return builder.load(pointer, align=4)
        wide = builder.zext(builder.load(pointer, align=2), _WORDS)
        return builder.bitcast(builder.shl(wide, _WORDS([16] * _LANES)), _VECTOR)

    def _store(self, sums: list[Any], row: Any, column: Any) -> None:
        builder, per_row = self._builder, BLOCK_COLUMNS // _LANES
        for i, total in enumerate(sums):
            at = builder.add(column, _INT64(i % per_row * _LANES))
            target = self._at(self._out, builder.add(row, _INT64(i // per_row)), self._columns, at)
            builder.store(total, builder.bitcast(target, _VECTOR.as_pointer()), align=4)

    def _at(self, array: Any, row: Any, width: Any, column: Any) -> Any:
        return self._builder.gep(array.data, [self._builder.add(self._builder.mul(row, width), column)])
