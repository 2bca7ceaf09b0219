"""Stored vectors as planes of coordinates, in the dtype of their products.

Dot products add the planes, so coordinates are never interleaved. A plane has the coordinates that one operation takes
out of the stored codes:

    bits                   planes                                        read as
    16                     one, the whole head                           values
    3, 2                   the two halves of a head                      bytes
    8                      even and odd coordinates                      words of 16 bits, two codes each
    4, heads from 64 on    coordinates by their remainder mod 4          words of 16 bits, four codes each
    4, shorter heads       even and odd coordinates                      bytes

Planes of words are decoded in the registers from which the tensor cores take them: the layout of an operand goes back
through pure assembly to the load, so that a code passes through shared memory once, packed. For this the words of a
vector are taken in another order (ORDERED: `_key_order`, `_value_order`): each lane then reads neighbouring words, and
16-bit words are what a lane's operand pairs up. The codes are defined in `onebox.formats`. This file does not depend on
pages, pieces or softmax.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_turboquant import turboquant_levels
from onebox.kernels.common.arithmetic import IS_INTERPRETED, rounded

__all__ = [
    "VALUE_SHIFT",
    "WEIGHT_SHIFT",
    "are_words",
    "decoded_columns",
    "join_planes",
    "load_keys",
    "load_query",
    "load_tables",
    "load_values",
    "lookup_table",
    "num_planes",
    "store_decoded",
]

# Eight codes in two 16-bit words to float16. Their bytes are put side by side, so that the codes of one place in both
# words become neighbours. `prmt` picks four of eight bytes by the four nibbles in its selector's low half: the low
# bytes of the magnitudes ($5, $7), then the high ones ($9, $11). A code from 8 up is positive and its low bits count
# upwards; below 8 they count downwards, so they are flipped. A selector nibble with its top bit set replicates the sign
# of the byte it picks: with 0x40 in $13 that gives 0x40 for negative codes and 0 for the others, the sign bit shifted
# right by one. The table is in registers, each named twice because `pack` requires it: constants in the assembly text
# would be moved into registers every time.
LOOKUP_4 = tl.constexpr("""{
    .reg .b32 word, flip, index, above, sign, a, b, c, d;
    prmt.b32 word, $4, 0, 0x3120;
    shr.u32 flip, word, 3;
    lop3.b32 flip, flip, 0x11111111, 0, 0x0C;
    mul.lo.u32 flip, flip, 7;
    lop3.b32 index, word, flip, 0x77777777, 0x28;
    shr.u32 above, index, 16;
    prmt.b32 a, $5, $7, index;
    prmt.b32 b, $9, $11, index;
    prmt.b32 c, $5, $7, above;
    prmt.b32 d, $9, $11, above;
    shr.u32 above, word, 16;
    prmt.b32 sign, $13, $13, word;
    mad.lo.u32 b, sign, 2, b;
    prmt.b32 sign, $13, $13, above;
    mad.lo.u32 d, sign, 2, d;
    prmt.b32 $0, a, b, 0x6240;
    prmt.b32 $1, a, b, 0x7351;
    prmt.b32 $2, c, d, 0x6240;
    prmt.b32 $3, c, d, 0x7351;
}""")
CONSTRAINTS_4 = tl.constexpr("=r,=r,=r,=r,r" + 10 * ",r")

# Two codes of at most 3 bits to float16: the table's eight bytes are those of all levels. Not declared pure, though it
# is: Triton would then load bytes in the operand order of the tensor cores, one at a time. All assembly texts write
# their results last, so results may reuse the registers of the inputs.
LOOKUP_3 = tl.constexpr("""{
    .reg .b32 index, a, b;
    mad.lo.u32 index, $2, 16, $1;
    prmt.b32 a, $3, $5, index;
    prmt.b32 b, $7, $9, index;
    prmt.b32 $0, a, b, 0x5140;
}""")
CONSTRAINTS_3 = tl.constexpr("=r,r,r" + 8 * ",r")

# Four E4M3 codes in two 16-bit words to float16, which holds them exactly: two codes an instruction.
E4M3_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 word;
    .reg .b16 even, odd;
    prmt.b32 word, $2, 0, 0x3120;
    mov.b32 {even, odd}, word;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# The same to bfloat16, 2^-120 times as large: sign, exponent and mantissa are moved to bfloat16's places.
E4M3_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 even, odd, even_sign, odd_sign;
    shl.b32 even, $2, 4;
    shl.b32 even_sign, $2, 8;
    shr.u32 odd, $2, 4;
    and.b32 odd_sign, $2, 0x80008000;
    and.b32 even_sign, even_sign, 0x80008000;
    lop3.b32 $0, even, 0x07F007F0, even_sign, 0xEA;
    lop3.b32 $1, odd, 0x07F007F0, odd_sign, 0xEA;
}""")

VALUE_SHIFT = tl.constexpr(2.0**-120)
"""FP8 values are this many times as large as their codes say."""
WEIGHT_SHIFT = tl.constexpr(2.0**100)
"""Softmax weights of FP8 values are multiplied by this: products then stay normal numbers of float32."""


@lru_cache
def lookup_table(dim: int, bits: int, device: torch.device) -> Tensor:
    """int32 [5]: eight levels as float16, their low bytes in two words and their high bytes in two; then 0x40 bytes.

    For 4 bits these are the positive levels (the others are their negatives); for fewer bits all levels, repeated to 8.
    """
    levels = turboquant_levels(dim, bits).to(torch.float16)
    eight = levels[8:] if bits == 4 else levels.repeat(8 // len(levels))
    low_and_high = eight.view(torch.uint8).view(8, 2).T.flatten()
    return torch.cat([low_and_high, torch.full((4,), 0x40, dtype=torch.uint8)]).view(torch.int32).to(device)


@triton.constexpr_function
def are_words(dim, bits):
    """Whether codes of `bits` are read as words of 16 bits: a product sums over at least 16 of them."""
    return bits == 8 or (bits == 4 and dim >= 64)


@triton.constexpr_function
def num_planes(dim, bits):
    """Planes of a head of `dim` coordinates."""
    if bits == 16:
        return 1
    return 4 if bits == 4 and dim >= 64 else 2


@triton.constexpr_function
def _is_interleaved(bits):
    return bits in (4, 8)


@triton.jit
def load_tables(key_ptr, value_ptr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr):
    """The lookup tables of `load_keys` and `load_values`, loaded once. Tables of one width are equal."""
    key_table = _load_table(key_ptr, KEY_BITS)
    if KEY_BITS == VALUE_BITS:
        return key_table, key_table
    else:
        return key_table, _load_table(value_ptr, VALUE_BITS)


@triton.jit
def _load_table(table_ptr, BITS: tl.constexpr):
    """Five words, int32 [1, 1] each: the layout of an operand passes a broadcast tensor, but not a broadcast scalar."""
    if BITS >= 8 or IS_INTERPRETED:
        return 0, 0, 0, 0, 0
    else:
        at = table_ptr + tl.zeros([1, 1], tl.int32)
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _key_order(x):
    """The columns of x [rows, N] as lanes hold them in the tensor cores' operands, four neighbouring lanes a row.

    In a product over 16 columns a lane has two neighbours and the two that are 8 further. It is given eight columns in
    a row, 16 bytes, and the next lane the next eight: the four together read neighbours too.
    """
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    EACH: tl.constexpr = 8 if N >= 32 else N // 4
    lanes = tl.reshape(x, [ROWS, N // (4 * EACH), 4, EACH // 4, 2, 2])
    return tl.reshape(tl.permute(lanes, [0, 1, 3, 4, 2, 5]), [ROWS, N])


@triton.jit
def _value_order(x, WARPS: tl.constexpr):
    """The columns of x [tokens, N]: eight lanes of each warp have every eighth column, and are given neighbours."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    W: tl.constexpr = WARPS if WARPS * 8 <= N else N // 8
    lanes = tl.reshape(x, [ROWS, W * 8, N // (W * 8)])
    return tl.reshape(tl.permute(lanes, [0, 2, 1]), [ROWS, N])


@triton.jit
def _undo_value_order(x, WARPS: tl.constexpr):
    if WARPS == 0:
        return x
    else:
        ROWS: tl.constexpr = x.shape[0]
        N: tl.constexpr = x.shape[1]
        W: tl.constexpr = WARPS if WARPS * 8 <= N else N // 8
        lanes = tl.reshape(x, [ROWS, N // (W * 8), W * 8])
        return tl.reshape(tl.permute(lanes, [0, 2, 1]), [ROWS, N])


@triton.jit
def load_query(query_ptr, row, inside, D: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ORDERED: tl.constexpr):
    """The planes of queries [M, D] for keys of BITS: tuple of [M, D / planes]."""
    M: tl.constexpr = row.shape[0]
    if _is_interleaved(BITS):
        x = tl.load(query_ptr + row[:, None] * D + tl.arange(0, D)[None, :], mask=inside[:, None], other=0.0)
        x = x.to(DTYPE)
        if num_planes(D, BITS) == 4:
            even, odd = tl.split(tl.reshape(x, [M, D // 4, 2, 2]))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            planes = first, second, third, fourth
        else:
            planes = tl.split(tl.reshape(x, [M, D // 2, 2]))
        return _keys_in_order(planes, ORDERED and are_words(D, BITS))
    elif BITS == 16:
        at = query_ptr + row[:, None] * D + tl.arange(0, D)[None, :]
        return (tl.load(at, mask=inside[:, None], other=0.0).to(DTYPE),)
    else:
        at = query_ptr + row[:, None] * D + tl.arange(0, D // 2)[None, :]
        low = tl.load(at, mask=inside[:, None], other=0.0).to(DTYPE)
        return low, tl.load(at + D // 2, mask=inside[:, None], other=0.0).to(DTYPE)


@triton.jit
def _keys_in_order(planes, ORDERED: tl.constexpr):
    if not ORDERED:
        return planes
    elif len(planes) == 4:
        first, second = _key_order(planes[0]), _key_order(planes[1])
        return first, second, _key_order(planes[2]), _key_order(planes[3])
    else:
        return _key_order(planes[0]), _key_order(planes[1])


@triton.jit
def _values_in_order(planes, WARPS: tl.constexpr):
    if WARPS == 0:
        return planes
    elif len(planes) == 4:
        first, second = _value_order(planes[0], WARPS), _value_order(planes[1], WARPS)
        return first, second, _value_order(planes[2], WARPS), _value_order(planes[3], WARPS)
    else:
        return _value_order(planes[0], WARPS), _value_order(planes[1], WARPS)


@triton.jit
def join_planes(planes, D: tl.constexpr, BITS: tl.constexpr, WARPS: tl.constexpr):
    """Planes of values, [M, D / planes] each, as [M, D]: what `load_values` took apart."""
    M: tl.constexpr = planes[0].shape[0]
    W: tl.constexpr = WARPS if are_words(D, BITS) else 0
    if num_planes(D, BITS) == 4:
        even = tl.join(_undo_value_order(planes[0], W), _undo_value_order(planes[2], W))
        odd = tl.join(_undo_value_order(planes[1], W), _undo_value_order(planes[3], W))
        return tl.reshape(tl.join(even, odd), [M, D])
    elif BITS == 16:
        return planes[0]
    else:
        first, second = _undo_value_order(planes[0], W), _undo_value_order(planes[1], W)
        joined = tl.join(first, second)
        if _is_interleaved(BITS):
            return tl.reshape(joined, [M, D])
        else:
            return tl.reshape(tl.permute(joined, [0, 2, 1]), [M, D])


@triton.jit
def _level(codes, levels_ptr, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """The levels of int32 codes [tokens, N] without assembly: for the interpreter, float32 and short heads."""
    # Levels are looked up in a warp's registers; Triton needs 16 per row for that, so a shorter table is repeated.
    table = tl.load(levels_ptr + tl.arange(0, 16) % (1 << BITS))
    levels = tl.broadcast_to(table[None, :], [codes.shape[0], 16])
    return rounded(tl.gather(levels, codes, 1), DTYPE)


@triton.jit
def _narrow_codes(codes_ptr, row, PLANE: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Codes of 2 or 3 bits, int32 [tokens, D/2]; a 3-bit code may extend into the next byte."""
    first_bit = (PLANE * (D // 2) + tl.arange(0, D // 2)) * BITS
    byte = first_bit // 8
    at = codes_ptr + row * (D * BITS // 8) + byte[None, :]
    word = tl.load(at).to(tl.int32)
    if BITS == 3:
        has_next = byte[None, :] + 1 < D * BITS // 8
        word |= tl.load(at + 1, mask=has_next, other=0).to(tl.int32) << 8
    return (word >> (first_bit % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _narrow_plane(
    codes_ptr, levels_ptr, row, table, PLANE: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr
):
    codes = _narrow_codes(codes_ptr, row, PLANE, D, BITS)
    if IS_INTERPRETED or tl.float16 != DTYPE:
        return _level(codes, levels_ptr, DTYPE, BITS)
    else:
        low_0, low_1, high_0, high_1, _ = table
        return tl.inline_asm_elementwise(
            LOOKUP_3,
            CONSTRAINTS_3,
            [codes, low_0, low_1, high_0, high_1],
            dtype=tl.float16,
            is_pure=False,
            pack=2,
        )


@triton.jit
def _four_planes(words, levels_ptr, table, DTYPE: tl.constexpr, ORDERED: tl.constexpr):
    """The levels of the four nibbles of int16 [tokens, D/4], lowest first."""
    if IS_INTERPRETED or tl.float16 != DTYPE:
        wide = words.to(tl.int32)
        first, second = _level(wide & 15, levels_ptr, DTYPE, 4), _level((wide >> 4) & 15, levels_ptr, DTYPE, 4)
        third, fourth = _level((wide >> 8) & 15, levels_ptr, DTYPE, 4), _level((wide >> 12) & 15, levels_ptr, DTYPE, 4)
        return first, second, third, fourth
    else:
        low_0, low_1, high_0, high_1, sign = table
        return tl.inline_asm_elementwise(
            LOOKUP_4,
            CONSTRAINTS_4,
            [words, low_0, low_1, high_0, high_1, sign],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=ORDERED,
            pack=2,
        )


@triton.jit
def _e4m3(codes, DTYPE: tl.constexpr, IS_VALUE: tl.constexpr):
    """int32 codes to DTYPE, exactly, those of values `VALUE_SHIFT` times as large. NaN codes become 480 and -480."""
    if IS_VALUE and tl.bfloat16 == DTYPE:
        return (((codes & 0x7F) << 4) | ((codes & 0x80) << 8)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
        x = bits.to(tl.float32, bitcast=True)  # 2^-120 times as large
        return x if IS_VALUE else (x * 2.0**120).to(DTYPE)


@triton.jit
def _two_planes(words, DTYPE: tl.constexpr, IS_VALUE: tl.constexpr, ORDERED: tl.constexpr):
    """The E4M3 codes in the low and in the high bytes of int16 [tokens, D/2]."""
    if IS_INTERPRETED or tl.float32 == DTYPE:
        wide = words.to(tl.int32)
        return _e4m3(wide & 0xFF, DTYPE, IS_VALUE), _e4m3((wide >> 8) & 0xFF, DTYPE, IS_VALUE)
    elif IS_VALUE:
        return tl.inline_asm_elementwise(
            E4M3_TO_BFLOAT16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=ORDERED, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            E4M3_TO_FLOAT16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=ORDERED, pack=2
        )


@triton.jit
def _load_codes(
    stored,
    vectors,
    D: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_VALUE: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """The planes of codes of 8 bits or fewer. Any code is a number, so nothing is masked: whole pages are readable."""
    codes_ptr, _, levels_ptr, table = stored
    row = vectors[:, None]
    if BITS == 8:
        words = tl.load(codes_ptr + row * (D // 2) + tl.arange(0, D // 2)[None, :])
        return _two_planes(words, DTYPE, IS_VALUE, ORDERED)
    elif are_words(D, BITS):
        words = tl.load(codes_ptr + row * (D // 4) + tl.arange(0, D // 4)[None, :])
        return _four_planes(words, levels_ptr, table, DTYPE, ORDERED)
    elif BITS == 4:
        byte = tl.load(codes_ptr + row * (D // 2) + tl.arange(0, D // 2)[None, :]).to(tl.int32)
        return _level(byte & 15, levels_ptr, DTYPE, 4), _level(byte >> 4, levels_ptr, DTYPE, 4)
    else:
        low = _narrow_plane(codes_ptr, levels_ptr, row, table, 0, D, BITS, DTYPE)
        return low, _narrow_plane(codes_ptr, levels_ptr, row, table, 1, D, BITS, DTYPE)


@triton.jit
def load_keys(
    stored,  # pointers to codes, scales and levels; what `load_tables` gave
    vectors,
    D: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ORDERED: tl.constexpr,  # words in the order of the tensor cores' operands
):
    """The planes of keys [tokens, D], in the order of `load_query`; whoever reads masks their scores."""
    if BITS == 16:
        return (tl.load(stored[0] + vectors[:, None] * D + tl.arange(0, D)[None, :]).to(DTYPE),)
    else:
        planes = _load_codes(stored, vectors, D, BITS, DTYPE, False, ORDERED)
        return _keys_in_order(planes, ORDERED and are_words(D, BITS))


@triton.jit
def load_values(
    stored,
    vectors,
    loaded,  # [tokens]; None if all are
    D: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    WARPS: tl.constexpr,  # words in the order of the tensor cores' operands of so many warps, or 0
):
    """The planes of values [tokens, D], in the order of `join_planes`; finite numbers where a token is not loaded.

    Those of FP8 are `VALUE_SHIFT` times as large as the codes say.
    """
    if BITS == 16:
        at = stored[0] + vectors[:, None] * D + tl.arange(0, D)[None, :]
        if loaded is None:
            return (tl.load(at).to(DTYPE),)
        else:
            return (tl.load(at, mask=loaded[:, None], other=0.0).to(DTYPE),)
    else:
        planes = _load_codes(stored, vectors, D, BITS, DTYPE, True, WARPS > 0)
        return _values_in_order(planes, WARPS if are_words(D, BITS) else 0)


@triton.jit
def decoded_columns(D: tl.constexpr, BITS: tl.constexpr):
    """[D]: the coordinate of a head at each place of vectors that `store_decoded` stored: plane after plane."""
    N: tl.constexpr = D // num_planes(D, BITS)
    place = tl.arange(0, D)
    return (place % N) * (D // N) + place // N if _is_interleaved(BITS) else place


@triton.jit
def store_decoded(decoded_ptr, vectors, planes, D: tl.constexpr):
    """Stores planes one after the other, [vectors, D]. Whoever adds over all of them adds plane by plane."""
    N: tl.constexpr = planes[0].shape[1]
    at = decoded_ptr + vectors[:, None] * D + tl.arange(0, N)[None, :]
    for plane in tl.static_range(len(planes)):
        tl.store(at + plane * N, planes[plane])
