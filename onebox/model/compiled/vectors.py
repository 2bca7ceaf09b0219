"""float32 vectors as LLVM instructions: loads of stored numbers, broadcasts, sums.

For `tiles.py` and `arithmetic.py`: compiled from loops in Python, sums would be kept in memory and not in registers.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

__all__ = [
    "BLOCK_COLUMNS",
    "INT32",
    "INT64",
    "LANES",
    "VECTOR",
    "broadcast",
    "is_bfloat16",
    "load",
    "load_pairs",
    "multiply",
    "multiply_add",
    "round_to_bfloat16",
    "round_to_float16",
    "store",
    "sum_lanes",
    "sum_loop",
]

INT32, INT64 = ir.IntType(32), ir.IntType(64)
LANES = 16
"""Numbers in a vector; a CPU with shorter ones takes several."""
BLOCK_COLUMNS = 2 * LANES
"""Columns of a block (`blocks.py`): a cache line of bfloat16 numbers."""
VECTOR, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(INT32, LANES)
_FUSED = ("contract",)
_HIGH_HALF = -(1 << 16)
_SIGN, _INFINITY = -(1 << 31), 0x7F800000
_HALF_OVERFLOW, _HALF_SMALLEST_NORMAL = 0x47800000, 0x38800000
"""Of float16, as float32 bits: 2^16, which its largest numbers would be rounded to, and 2^-14."""


def is_bfloat16(data: Any) -> bool:
    """Whether a pointer is to bfloat16 numbers."""
    return isinstance(data.type.pointee, ir.IntType)


def load(builder: Any, data: Any) -> Any:
    """The vector that begins at the pointer `data`, of float32 or of bfloat16 numbers, widened."""
    pointer = builder.bitcast(data, ir.VectorType(data.type.pointee, LANES).as_pointer())
    if not is_bfloat16(data):
        return builder.load(pointer, align=4)
    return _shifted(builder, builder.zext(builder.load(pointer, align=2), _WORDS))


def load_pairs(builder: Any, data: Any) -> list[Any]:
    """The two vectors of bfloat16 numbers that begin at the pointer `data` in pairs."""
    words = builder.load(builder.bitcast(data, _WORDS.as_pointer()), align=2)
    high = builder.and_(words, _WORDS([_HIGH_HALF] * LANES))
    return [_shifted(builder, words), builder.bitcast(high, VECTOR)]


def store(builder: Any, vector: Any, data: Any) -> None:
    """Into the float32 numbers from the pointer `data` on."""
    builder.store(vector, builder.bitcast(data, VECTOR.as_pointer()), align=4)


def _shifted(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, _WORDS([16] * LANES)), VECTOR)


def broadcast(builder: Any, number: Any) -> Any:
    """The number in all lanes."""
    first = builder.insert_element(VECTOR(ir.Undefined), number, INT32(0))
    return builder.shuffle_vector(first, VECTOR(ir.Undefined), _WORDS(None))


def multiply(builder: Any, first: Any, second: Any) -> Any:
    """Their product; it may be fused with an addition, so that both are rounded once."""
    return builder.fmul(first, second, flags=_FUSED)


def multiply_add(builder: Any, first: Any, second: Any, added: Any) -> Any:
    """First * second + added, rounded once if the CPU can."""
    return builder.fadd(added, multiply(builder, first, second), flags=_FUSED)


def round_to_bfloat16(builder: Any, vector: Any) -> Any:
    """To the nearest bfloat16, the even one of two."""
    return _keep_nan(builder, vector, builder.bitcast(_round_bits(builder, vector, 16), VECTOR))


def round_to_float16(builder: Any, vector: Any) -> Any:
    """To the nearest float16, the even one of two; infinite above float16's range."""
    word = builder.bitcast(vector, _WORDS)
    sign, size = (builder.and_(word, _words(mask)) for mask in (_SIGN, ~_SIGN))
    normal = builder.and_(_round_bits(builder, vector, 13), _words(~_SIGN))
    normal = builder.select(builder.icmp_signed(">=", normal, _words(_HALF_OVERFLOW)), _words(_INFINITY), normal)
    # Below float16's normal numbers the step is 2^-24, as it is of float32 numbers from 0.5 to 1.
    shift = VECTOR([0.5] * LANES)
    small = builder.fsub(builder.fadd(builder.bitcast(size, VECTOR), shift), shift)
    is_small = builder.icmp_signed("<", size, _words(_HALF_SMALLEST_NORMAL))
    rounded = builder.select(is_small, builder.bitcast(small, _WORDS), normal)
    return _keep_nan(builder, vector, builder.bitcast(builder.or_(rounded, sign), VECTOR))


def _round_bits(builder: Any, vector: Any, count: int) -> Any:
    """The bits of float32 numbers with the last `count` rounded away, to even."""
    word = builder.bitcast(vector, _WORDS)
    odd = builder.and_(builder.lshr(word, _words(count)), _words(1))
    up = builder.add(builder.add(word, _words((1 << (count - 1)) - 1)), odd)
    return builder.and_(up, _words(-(1 << count)))


def _keep_nan(builder: Any, vector: Any, rounded: Any) -> Any:
    return builder.select(builder.fcmp_unordered("uno", vector, vector), vector, rounded)


def _words(number: int) -> Any:
    return _WORDS([number] * LANES)


def sum_lanes(builder: Any, vector: Any) -> Any:
    """The sum of all lanes: halves first."""
    for half in (8, 4, 2, 1):
        places = [lane + half if lane < half else lane for lane in range(LANES)]
        vector = builder.fadd(vector, builder.shuffle_vector(vector, vector, _WORDS(places)))
    return builder.extract_element(vector, INT32(0))


def sum_loop(builder: Any, count: Any, sums: list[Any], add: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """The last sums of a loop over k from 0 to `count` - 1, in which `add` gives the sums after k from those before."""
    before, head = builder.block, builder.append_basic_block()
    inside, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(head)
    builder.position_at_end(head)
    k, totals = builder.phi(INT64), [builder.phi(total.type) for total in sums]
    builder.cbranch(builder.icmp_signed("<", k, count), inside, after)
    builder.position_at_end(inside)
    added = [builder.add(k, INT64(1)), *add(k, totals)]
    for phi, first, following in zip([k, *totals], [INT64(0), *sums], added, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return totals
