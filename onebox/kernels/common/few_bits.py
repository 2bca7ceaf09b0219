"""INT3 and INT2 codes out of the bytes of their tiles (`onebox.formats.fragments`), in Triton.

For decode as signed bytes, scaled by a power of two; for prefill as bfloat16, exact. The assembly works on all codes of
a register at once, with as few instructions as the layout allows; the interpreter has no assembly, and a test on a GPU
checks that both give the same bits.

As bfloat16: with the bits of 128 above it, a field in the lowest seven bits of a half register is 128 + 2^place times
the field. Its sign bit flipped, the field is the code plus a constant, and one multiply-add leaves the code.
"""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import IS_INTERPRETED

__all__ = [
    "int2_bytes",
    "int2_bytes_by_assembly",
    "int2_bytes_plainly",
    "int2_values",
    "int2_values_by_assembly",
    "int2_values_plainly",
    "int3_bytes",
    "int3_bytes_by_assembly",
    "int3_bytes_plainly",
    "int3_pair",
    "int3_pair_by_assembly",
    "int3_pair_plainly",
    "int3_spare",
    "int3_spare_by_assembly",
    "int3_spare_plainly",
]


@triton.jit
def int3_bytes(first, second, third):
    """The eight codes times 32, int8, from the three bytes that hold them."""
    if IS_INTERPRETED:
        return int3_bytes_plainly(first, second, third)
    else:
        return int3_bytes_by_assembly(first, second, third)


@triton.jit
def int3_bytes_plainly(first, second, third):
    six = (first << 6) | ((second << 4) & 0x20)
    seven = (third << 6) | ((second << 5) & 0x20)
    return (
        (first & 0xE0).to(tl.int8, bitcast=True),
        ((first << 3) & 0xE0).to(tl.int8, bitcast=True),
        (second & 0xE0).to(tl.int8, bitcast=True),
        ((second << 3) & 0xE0).to(tl.int8, bitcast=True),
        (third & 0xE0).to(tl.int8, bitcast=True),
        ((third << 3) & 0xE0).to(tl.int8, bitcast=True),
        six.to(tl.int8, bitcast=True),
        seven.to(tl.int8, bitcast=True),
    )


@triton.jit
def int3_bytes_by_assembly(first, second, third):
    """17 instructions for the 32 codes of three registers."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 upper, lower;
        and.b32 $0, $8, 0xE0E0E0E0;
        shl.b32 upper, $8, 3;
        and.b32 $1, upper, 0xE0E0E0E0;
        and.b32 $2, $9, 0xE0E0E0E0;
        shl.b32 upper, $9, 3;
        and.b32 $3, upper, 0xE0E0E0E0;
        and.b32 $4, $10, 0xE0E0E0E0;
        shl.b32 upper, $10, 3;
        and.b32 $5, upper, 0xE0E0E0E0;
        shl.b32 upper, $8, 6;
        and.b32 upper, upper, 0xC0C0C0C0;
        shl.b32 lower, $9, 4;
        lop3.b32 $6, lower, 0x20202020, upper, 0xEA;
        shl.b32 upper, $10, 6;
        and.b32 upper, upper, 0xC0C0C0C0;
        shl.b32 lower, $9, 5;
        lop3.b32 $7, lower, 0x20202020, upper, 0xEA;
        }""",
        constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        args=[first, second, third],
        dtype=(tl.int8,) * 8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def int2_bytes(tiles):
    """The four codes of each byte times 64, int8."""
    if IS_INTERPRETED:
        return int2_bytes_plainly(tiles)
    else:
        return int2_bytes_by_assembly(tiles)


@triton.jit
def int2_bytes_plainly(tiles):
    return (
        (tiles & 0xC0).to(tl.int8, bitcast=True),
        ((tiles << 2) & 0xC0).to(tl.int8, bitcast=True),
        ((tiles << 4) & 0xC0).to(tl.int8, bitcast=True),
        (tiles << 6).to(tl.int8, bitcast=True),
    )


@triton.jit
def int2_bytes_by_assembly(tiles):
    """7 instructions for the 16 codes of a register."""
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 moved;
        and.b32 $0, $4, 0xC0C0C0C0;
        shl.b32 moved, $4, 2;
        and.b32 $1, moved, 0xC0C0C0C0;
        shl.b32 moved, $4, 4;
        and.b32 $2, moved, 0xC0C0C0C0;
        shl.b32 moved, $4, 6;
        and.b32 $3, moved, 0xC0C0C0C0;
        }""",
        constraints="=&r,=&r,=&r,=&r,r",
        args=[tiles],
        dtype=(tl.int8,) * 4,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _value(words, LEFT: tl.constexpr, BITS: tl.constexpr):
    """A field of each word as a signed number: shifted left to the sign bit and back right. Exact in bfloat16."""
    return ((words << LEFT) >> (32 - BITS)).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _two_fields(words, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr):
    """The bytes 0, 2, 1, 3 of each word: their first field, then their second; both by their lowest bit."""
    return (
        _value(words, 32 - BITS - FIRST, BITS),
        _value(words, 16 - BITS - FIRST, BITS),
        _value(words, 24 - BITS - FIRST, BITS),
        _value(words, 8 - BITS - FIRST, BITS),
        _value(words, 32 - BITS - SECOND, BITS),
        _value(words, 16 - BITS - SECOND, BITS),
        _value(words, 24 - BITS - SECOND, BITS),
        _value(words, 8 - BITS - SECOND, BITS),
    )


@triton.jit
def int3_pair(words):
    """The two whole codes of each byte, bfloat16: of bytes 0, 2, 1, 3 the upper one, then the lower one."""
    if IS_INTERPRETED:
        return int3_pair_plainly(words)
    else:
        return int3_pair_by_assembly(words)


@triton.jit
def int3_pair_plainly(words):
    return _two_fields(words, 5, 2, 3)


@triton.jit
def int3_pair_by_assembly(words):
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 even, odd, a, b, c, d, sixteenth, half, twelve, sixty_eight;
        mov.b32 sixteenth, 0x3D803D80;
        mov.b32 twelve, 0xC140C140;
        mov.b32 half, 0x3F003F00;
        mov.b32 sixty_eight, 0xC288C288;
        shr.u32 even, $8, 1;
        shr.u32 odd, $8, 9;
        lop3.b32 a, even, 0x00700070, 0x43404340, 0x6A;
        lop3.b32 b, odd, 0x00700070, 0x43404340, 0x6A;
        lop3.b32 c, even, 0x000E000E, 0x43084308, 0x6A;
        lop3.b32 d, odd, 0x000E000E, 0x43084308, 0x6A;
        fma.rn.bf16x2 a, a, sixteenth, twelve;
        fma.rn.bf16x2 b, b, sixteenth, twelve;
        fma.rn.bf16x2 c, c, half, sixty_eight;
        fma.rn.bf16x2 d, d, half, sixty_eight;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r",
        args=[words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def int3_spare(first, second, third):
    """The codes 6 and 7, whose bits lie in three words, bfloat16: of bytes 0, 2, 1, 3 code 6, then code 7."""
    if IS_INTERPRETED:
        return int3_spare_plainly(first, second, third)
    else:
        return int3_spare_by_assembly(first, second, third)


@triton.jit
def _with_spare(upper, lower, PLACE: tl.constexpr):
    """Words whose bytes have two upper bits from the bits 1, 0 of `upper` and a lowest one from a place of `lower`."""
    return ((upper << 1) & 0x06060606) | ((lower >> PLACE) & 0x01010101)


@triton.jit
def int3_spare_plainly(first, second, third):
    a, b, c, d, _, _, _, _ = _two_fields(_with_spare(first, second, 1), 0, 0, 3)
    e, f, g, h, _, _, _, _ = _two_fields(_with_spare(third, second, 0), 0, 0, 3)
    return a, b, c, d, e, f, g, h


@triton.jit
def int3_spare_by_assembly(first, second, third):
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 upper, lower, a, b, c, d, s;
        mov.b32 s, 0x43044304;
        shl.b32 upper, $8, 1;
        shr.u32 lower, $9, 1;
        lop3.b32 a, upper, 0x00060006, s, 0x6A;
        lop3.b32 a, lower, 0x00010001, a, 0xEA;
        shr.u32 upper, $8, 7;
        shr.u32 lower, $9, 9;
        lop3.b32 b, upper, 0x00060006, s, 0x6A;
        lop3.b32 b, lower, 0x00010001, b, 0xEA;
        shl.b32 upper, $10, 1;
        lop3.b32 c, upper, 0x00060006, s, 0x6A;
        lop3.b32 c, $9, 0x00010001, c, 0xEA;
        shr.u32 upper, $10, 7;
        shr.u32 lower, $9, 8;
        lop3.b32 d, upper, 0x00060006, s, 0x6A;
        lop3.b32 d, lower, 0x00010001, d, 0xEA;
        sub.rn.bf16x2 a, a, s;
        sub.rn.bf16x2 b, b, s;
        sub.rn.bf16x2 c, c, s;
        sub.rn.bf16x2 d, d, s;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        args=[first, second, third],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def int2_values(words, UPPER: tl.constexpr):
    """Two of the four codes of each byte, the UPPER or the lower ones, bfloat16, in the order of `int3_pair`."""
    if IS_INTERPRETED:
        return int2_values_plainly(words, UPPER)
    else:
        return int2_values_by_assembly(words, UPPER)


@triton.jit
def int2_values_plainly(words, UPPER: tl.constexpr):
    if UPPER:
        return _two_fields(words, 6, 4, 2)
    else:
        return _two_fields(words, 2, 0, 2)


@triton.jit
def int2_values_by_assembly(words, UPPER: tl.constexpr):
    """Both fields two bits above the place where the lower ones lie: there 16 and 4 times the code, exact as well."""
    fields = words >> 2 if UPPER else words << 2
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 odd, a, b, c, d, sixteenth, quarter, ten, thirty_four;
        mov.b32 sixteenth, 0x3D803D80;
        mov.b32 ten, 0xC120C120;
        mov.b32 quarter, 0x3E803E80;
        mov.b32 thirty_four, 0xC208C208;
        shr.u32 odd, $8, 8;
        lop3.b32 a, $8, 0x00300030, 0x43204320, 0x6A;
        lop3.b32 b, odd, 0x00300030, 0x43204320, 0x6A;
        lop3.b32 c, $8, 0x000C000C, 0x43084308, 0x6A;
        lop3.b32 d, odd, 0x000C000C, 0x43084308, 0x6A;
        fma.rn.bf16x2 a, a, sixteenth, ten;
        fma.rn.bf16x2 b, b, sixteenth, ten;
        fma.rn.bf16x2 c, c, quarter, thirty_four;
        fma.rn.bf16x2 d, d, quarter, thirty_four;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""",
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r",
        args=[fields],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
