"""Integer tiles (`onebox.formats.fragments`) times fixed-point planes on the int8 tensor cores, in Triton.

For the decode kernels of linears and experts. A row's two planes are two columns of the MMA, adjacent in a thread's
registers. Weights and planes have the same permutation along K, so that a thread loads exactly its MMA fragment. The
interpreter has no inline assembly; a test on a GPU checks that both implementations give the same bits.
"""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import IS_INTERPRETED
from onebox.kernels.common.few_bits import int2_bytes, int3_bytes

__all__ = [
    "code_halves",
    "group_dot",
    "int4_halves",
    "int4_halves_by_assembly",
    "int4_halves_plainly",
    "int6_quarters",
    "int6_quarters_by_assembly",
    "int6_quarters_plainly",
    "operands_dot",
    "plane_operand",
    "prefetch",
    "quarters_operand",
]


@triton.jit
def _weight_operand(half, TILES: tl.constexpr, JOINED: tl.constexpr):
    """Half the columns of some tiles, int8 [TILES, 1024], as an operand of the MMA: [16 * TILES, 64].

    A thread's part of an operand is four neighbouring bytes twice, or eight if it was JOINED: Triton then takes its
    elements for unpacked ones. The order along K is the one that leaves every byte in its thread.
    """
    split = tl.reshape(half, (TILES, 2, 8, 4, 2, 2, 4))  # n kt g t k16 r8 k4
    if JOINED:
        return tl.reshape(tl.permute(split, (0, 5, 2, 4, 3, 1, 6)), (TILES * 16, 64))  # n r8 g | k16 t kt k4
    else:
        return tl.reshape(tl.permute(split, (0, 5, 2, 1, 4, 3, 6)), (TILES * 16, 64))  # n r8 g | kt k16 t k4


@triton.jit
def quarters_operand(first, second, TILES: tl.constexpr):
    """The same from quarters of some tiles (kt 0 and 1), int8 [TILES, 512] each."""
    split = tl.reshape(tl.join(first, second), (TILES, 8, 4, 2, 2, 4, 2))  # n g t k16 r8 k4 kt
    return tl.reshape(tl.permute(split, (0, 4, 1, 6, 3, 2, 5)), (TILES * 16, 64))  # n r8 g | kt k16 t k4


@triton.jit
def plane_operand(planes, COLUMNS: tl.constexpr, JOINED: tl.constexpr = False):
    """64 columns of the planes, int8 [COLUMNS, 64], with K in the order of `_weight_operand`: [64, COLUMNS]."""
    split = tl.reshape(planes, (COLUMNS, 4, 2, 2, 4))  # c t kt k16 k4
    if JOINED:
        return tl.reshape(tl.permute(split, (3, 1, 2, 4, 0)), (64, COLUMNS))  # k16 t kt k4 | c
    else:
        return tl.reshape(tl.permute(split, (2, 3, 1, 4, 0)), (64, COLUMNS))  # kt k16 t k4 | c


@triton.jit
def int4_halves(tiles):
    """Codes of both halves times 16, int8, from bytes with one code of each half."""
    if IS_INTERPRETED:
        return int4_halves_plainly(tiles)
    else:
        return int4_halves_by_assembly(tiles)


@triton.jit
def int4_halves_plainly(tiles):
    return ((tiles << 4) & 0xF0).to(tl.int8, bitcast=True), (tiles & 0xF0).to(tl.int8, bitcast=True)


@triton.jit
def int4_halves_by_assembly(tiles):
    """Masks four bytes at a time; without assembly the compiler would unpack the bytes of each register."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 moved;
        shl.b32 moved, $2, 4;
        and.b32 $0, moved, 0xF0F0F0F0;
        and.b32 $1, $2, 0xF0F0F0F0;
        }""",
        constraints="=&r,=&r,r",
        args=[tiles],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def int6_quarters(first, second, pairs):
    """Codes times 4, int8, of j 0 kt 0, j 0 kt 1, j 1 kt 0 and j 1 kt 1, from bytes of `onebox.formats.head_planes`.

    first and second have the upper four bits of kt 0 and 1, `pairs` the lower two of all.
    """
    if IS_INTERPRETED:
        return int6_quarters_plainly(first, second, pairs)
    else:
        return int6_quarters_by_assembly(first, second, pairs)


@triton.jit
def int6_quarters_plainly(first, second, pairs):
    return (
        (((first << 4) & 0xF0) | ((pairs << 2) & 0x0C)).to(tl.int8, bitcast=True),
        (((second << 4) & 0xF0) | ((pairs >> 2) & 0x0C)).to(tl.int8, bitcast=True),
        ((first & 0xF0) | (pairs & 0x0C)).to(tl.int8, bitcast=True),
        ((second & 0xF0) | ((pairs >> 4) & 0x0C)).to(tl.int8, bitcast=True),
    )


@triton.jit
def int6_quarters_by_assembly(first, second, pairs):
    """Four bytes at a time; bits that a shift brings in from the next byte are masked off."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 upper, lower;
        shl.b32 upper, $4, 4;
        and.b32 upper, upper, 0xF0F0F0F0;
        shl.b32 lower, $6, 2;
        lop3.b32 $0, lower, 0x0C0C0C0C, upper, 0xEA;
        shl.b32 upper, $5, 4;
        and.b32 upper, upper, 0xF0F0F0F0;
        shr.u32 lower, $6, 2;
        lop3.b32 $1, lower, 0x0C0C0C0C, upper, 0xEA;
        and.b32 upper, $4, 0xF0F0F0F0;
        lop3.b32 $2, $6, 0x0C0C0C0C, upper, 0xEA;
        and.b32 upper, $5, 0xF0F0F0F0;
        shr.u32 lower, $6, 4;
        lop3.b32 $3, lower, 0x0C0C0C0C, upper, 0xEA;
        }""",
        constraints="=&r,=&r,=&r,=&r,r,r,r",
        args=[first, second, pairs],
        dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _int3_half(a, b, c, d, TILES: tl.constexpr):
    """[TILES, 1024] in the order of INT4's bytes, from the codes of kt and k16 (0 0, 0 1, 1 0, 1 1)."""
    joined = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (TILES, 8, 4, 2, 4, 2, 2))  # n g t r8 k4 k16 kt
    return tl.reshape(tl.permute(joined, (0, 6, 1, 2, 5, 3, 4)), (TILES, 1024))


@triton.jit
def _int2_half(a, b, TILES: tl.constexpr):
    """[TILES, 1024] in the order of INT4's bytes, from the codes of kt = 0 and 1."""
    joined = tl.reshape(tl.join(a, b), (TILES, 8, 4, 2, 2, 4, 2))  # n g t k16 r8 k4 kt
    return tl.reshape(tl.permute(joined, (0, 6, 1, 2, 3, 4, 5)), (TILES, 1024))


@triton.jit
def code_halves(tiles, rest, BITS: tl.constexpr, TILES: tl.constexpr):
    """Codes of both halves times 2^(8 - BITS), int8, in the order of INT4's bytes, from the bytes of TILES tiles.

    `tiles` are the first 512 bytes of each (INT4: all 1,024); `rest` [32, TILES, 8] the other 256 of INT3, else None.
    """
    if BITS == 3:
        both = tl.permute(tl.reshape(tiles, (TILES, 32, 2, 8)), (0, 1, 3, 2))
        first, second = tl.split(both)
        a, b, c, d, e, f, g, h = int3_bytes(first, second, tl.permute(rest, (1, 0, 2)))
        return _int3_half(a, b, c, d, TILES), _int3_half(e, f, g, h, TILES)
    elif BITS == 2:
        a, b, c, d = int2_bytes(tiles)
        return _int2_half(a, b, TILES), _int2_half(c, d, TILES)
    else:
        return int4_halves(tiles)


@triton.jit
def group_dot(first, second, before, behind, TILES: tl.constexpr, COLUMNS: tl.constexpr, JOINED: tl.constexpr = False):
    """float32 [16 * TILES, COLUMNS / 2]: the dot products of a group, exact up to the conversion to float32.

    first and second, int8 [TILES, 1024], are the codes of its halves, JOINED for INT3 and INT2; before and behind, from
    `plane_operand`, their planes.
    """
    first, second = _weight_operand(first, TILES, JOINED), _weight_operand(second, TILES, JOINED)
    return operands_dot(first, second, before, behind, TILES, COLUMNS)


@triton.jit
def operands_dot(first, second, before, behind, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """The same of halves that are operands of the MMA, int8 [16 * TILES, 64].

    The integers stay below 2^31: 128 products of at most 2^14, neighbouring planes joined as 256 * high + low.
    """
    dots = tl.dot(first, before, out_dtype=tl.int32)
    dots = tl.dot(second, behind, dots, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(dots, (TILES * 16, COLUMNS // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def prefetch(pointers):
    """Prefetches the data at `pointers` into L2, so that late loads of it are short."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
