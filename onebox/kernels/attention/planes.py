"""Stored vectors as two planes of D/2 coordinates, in the dtype of their products.

The planes are the halves of a head, or for 4 bits its even and odd coordinates: the low and the high nibbles of the
bytes. Dot products add the planes, so coordinates are never interleaved. The codes are defined in `onebox.formats`.
This file does not depend on pages, pieces or softmax.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_turboquant import turboquant_levels
from onebox.kernels.common.arithmetic import IS_INTERPRETED, rounded

__all__ = ["coordinates", "load_planes", "load_tables", "lookup_table"]

# Eight codes of a word to float16. `prmt` picks four of eight bytes by the four nibbles in its selector's low half: the
# low bytes of the magnitudes ($5, $9), then the high ones ($13, $17). A code from 8 up is positive and its low bits
# count upwards; below 8 they count downwards, so they are flipped. A selector nibble with its top bit set replicates
# the sign of the byte it picks: with 0x40 in $21 that gives 0x40 for negative codes and 0 for the others, the sign bit
# shifted right by one. The table is in registers, each named four times because `pack` requires it: constants in the
# assembly text would be moved into registers every time.
LOOKUP_4 = tl.constexpr("""{
    .reg .b32 flip, index, above, sign, a, b, c, d;
    shr.u32 flip, $4, 3;
    lop3.b32 flip, flip, 0x11111111, 0, 0x0C;
    mul.lo.u32 flip, flip, 7;
    lop3.b32 index, $4, flip, 0x77777777, 0x28;
    shr.u32 above, index, 16;
    prmt.b32 a, $5, $9, index;
    prmt.b32 b, $13, $17, index;
    prmt.b32 c, $5, $9, above;
    prmt.b32 d, $13, $17, above;
    shr.u32 above, $4, 16;
    prmt.b32 sign, $21, $21, $4;
    mad.lo.u32 b, sign, 2, b;
    prmt.b32 sign, $21, $21, above;
    mad.lo.u32 d, sign, 2, d;
    prmt.b32 $0, a, b, 0x6240;
    prmt.b32 $1, c, d, 0x6240;
    prmt.b32 $2, a, b, 0x7351;
    prmt.b32 $3, c, d, 0x7351;
}""")
CONSTRAINTS_4 = tl.constexpr("=r,=r,=r,=r,r" + 20 * ",r")

# Both assembly texts write their results last, so results may reuse the registers of the inputs. Neither is declared
# pure, though both are: Triton would then load bytes in the operand order of the tensor cores, one at a time, and
# shuffle registers in every product. Declared impure, decoded planes pass through shared memory once.

# Two codes of at most 3 bits to float16: the table's eight bytes are those of all levels.
LOOKUP_3 = tl.constexpr("""{
    .reg .b32 index, a, b;
    mad.lo.u32 index, $2, 16, $1;
    prmt.b32 a, $3, $5, index;
    prmt.b32 b, $7, $9, index;
    prmt.b32 $0, a, b, 0x5140;
}""")
CONSTRAINTS_3 = tl.constexpr("=r,r,r" + 8 * ",r")


@lru_cache
def lookup_table(dim: int, bits: int, device: torch.device) -> Tensor:
    """int32 [5]: eight levels as float16, their low bytes in two words and their high bytes in two; then 0x40 bytes.

    For 4 bits these are the positive levels (the others are their negatives); for fewer bits all levels, repeated to 8.
    """
    levels = turboquant_levels(dim, bits).to(torch.float16)
    eight = levels[8:] if bits == 4 else levels.repeat(8 // len(levels))
    low_and_high = eight.view(torch.uint8).view(8, 2).T.flatten()
    return torch.cat([low_and_high, torch.full((4,), 0x40, dtype=torch.uint8)]).view(torch.int32).to(device)


@triton.jit
def load_tables(key_ptr, value_ptr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The lookup tables of `load_planes`, loaded once. Tables of one width are equal and share registers."""
    key_table = _load_table(key_ptr, KEY_BITS, DTYPE)
    if KEY_BITS == VALUE_BITS:
        return key_table, key_table
    else:
        return key_table, _load_table(value_ptr, VALUE_BITS, DTYPE)


@triton.jit
def _load_table(table_ptr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The five words, or zeros if the table is not used: no codes, the interpreter, or a dtype other than float16."""
    if BITS >= 8 or IS_INTERPRETED or tl.float16 != DTYPE:
        return 0, 0, 0, 0, 0
    else:
        low_0, low_1 = tl.load(table_ptr), tl.load(table_ptr + 1)
        high_0, high_1 = tl.load(table_ptr + 2), tl.load(table_ptr + 3)
        return low_0, low_1, high_0, high_1, tl.load(table_ptr + 4)


@triton.jit
def coordinates(D: tl.constexpr, BITS: tl.constexpr):
    """[D]: the coordinate of a head at each place of its two planes, first plane first."""
    index = tl.arange(0, D)
    if BITS == 4:
        return 2 * (index % (D // 2)) + index // (D // 2)
    else:
        return index


@triton.jit
def _level(codes, levels_ptr, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """The levels of int32 codes [tokens, D/2] without assembly: for the interpreter and for float32."""
    # Levels are looked up in a warp's registers; Triton needs 16 per row for that, so a shorter table is repeated.
    table = tl.load(levels_ptr + tl.arange(0, 16) % (1 << BITS))
    levels = tl.broadcast_to(table[None, :], [codes.shape[0], 16])
    return rounded(tl.gather(levels, codes, 1), DTYPE)


@triton.jit
def _narrow_codes(codes_ptr, row, inside, PLANE: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Codes of 2 or 3 bits, int32 [tokens, D/2]; a 3-bit code may extend into the next byte."""
    first_bit = (PLANE * (D // 2) + tl.arange(0, D // 2)) * BITS
    byte = first_bit // 8
    at = codes_ptr + row * (D * BITS // 8) + byte[None, :]
    word = tl.load(at, mask=inside, other=0).to(tl.int32)
    if BITS == 3:
        has_next = byte[None, :] + 1 < D * BITS // 8
        word |= tl.load(at + 1, mask=inside & has_next, other=0).to(tl.int32) << 8
    return (word >> (first_bit % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _narrow_plane(
    codes_ptr,
    levels_ptr,
    row,
    inside,
    table,
    PLANE: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    codes = _narrow_codes(codes_ptr, row, inside, PLANE, D, BITS)
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
def _nibble_planes(byte, levels_ptr, table, DTYPE: tl.constexpr):
    """The levels of the low and of the high nibbles of uint8 [tokens, D/2]."""
    if IS_INTERPRETED or tl.float16 != DTYPE:
        low = _level((byte & 15).to(tl.int32), levels_ptr, DTYPE, 4)
        high = _level((byte >> 4).to(tl.int32), levels_ptr, DTYPE, 4)
    else:
        low_0, low_1, high_0, high_1, sign = table
        low, high = tl.inline_asm_elementwise(
            LOOKUP_4,
            CONSTRAINTS_4,
            [byte, low_0, low_1, high_0, high_1, sign],
            dtype=(tl.float16, tl.float16),
            is_pure=False,
            pack=4,
        )
    return low, high


@triton.jit
def load_planes(
    stored,  # pointers to codes, scales and levels; what `load_tables` gave
    vectors,
    loaded,
    D: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Two planes [tokens, D/2] in DTYPE and the factor, float32 [tokens], that makes them the stored vectors.

    For tokens that are not `loaded` the planes hold arbitrary finite numbers and the factor is arbitrary.
    """
    codes_ptr, scale_ptr, levels_ptr, table = stored
    row = vectors[:, None]
    inside = loaded[:, None]
    if BITS >= 8:
        at = codes_ptr + row * D + tl.arange(0, D // 2)[None, :]
        low = tl.load(at, mask=inside, other=0.0).to(DTYPE)
        high = tl.load(at + D // 2, mask=inside, other=0.0).to(DTYPE)
    elif BITS == 4:
        byte = tl.load(codes_ptr + row * (D // 2) + tl.arange(0, D // 2)[None, :], mask=inside, other=0)
        low, high = _nibble_planes(byte, levels_ptr, table, DTYPE)
    else:
        low = _narrow_plane(codes_ptr, levels_ptr, row, inside, table, 0, D, BITS, DTYPE)
        high = _narrow_plane(codes_ptr, levels_ptr, row, inside, table, 1, D, BITS, DTYPE)
    if BITS == 16:
        return low, high, tl.full([vectors.shape[0]], 1.0, tl.float32)
    else:
        # The whole page is readable, and a mask on these few bytes would keep them from being prefetched.
        return low, high, tl.load(scale_ptr + vectors).to(tl.float32)
