"""FP8 and NVFP4 codes decoded in registers to bfloat16, exactly, in Triton.

The interpreter has no inline assembly and decodes without it; both give the same bits, which a test checks on a GPU.
"""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import IS_INTERPRETED

__all__ = [
    "E2M1_IN_MULTIPLIER",
    "decode_e2m1_quads",
    "decode_e4m3",
    "e2m1_by_assembly",
    "e2m1_plainly",
    "e2m1_quads_by_assembly",
    "e2m1_quads_plainly",
    "e4m3_by_assembly",
    "e4m3_plainly",
    "load_nvfp4",
]

# E2M1 bits are read as the lowest exponents of bfloat16, 2^126 too small. The whole factor could overflow the scale of
# 16 columns: this much is applied there, and the rest in the multiplier.
_E2M1_IN_SCALE = tl.constexpr(2.0**118)
E2M1_IN_MULTIPLIER = tl.constexpr(2.0**8)


@triton.jit
def decode_e4m3(codes):
    """uint8 codes to bfloat16, exactly: the code's bits, shifted to bfloat16's positions, are 2^120 too small.

    The two NaN codes decode as 480 and -480; `onebox.formats` never writes them.
    """
    if IS_INTERPRETED:
        return e4m3_plainly(codes)
    else:
        return e4m3_by_assembly(codes)


@triton.jit
def e4m3_plainly(codes):
    wide = codes.to(tl.int32)
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return (bits.to(tl.float32, bitcast=True) * 2.0**120).to(tl.bfloat16)


@triton.jit
def e4m3_by_assembly(codes):
    """Four codes at a time on the integer units and one packed multiplication.

    Triton's own conversion goes through half and float, five slow instructions per two codes, and would take longer
    than loading the weight.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, t;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 s, a, 4;
        shr.u32 t, b, 4;
        and.b32 s, s, 0x07F007F0;
        and.b32 t, t, 0x07F007F0;
        lop3.b32 a, a, 0x80008000, s, 0xEA;
        lop3.b32 b, b, 0x80008000, t, 0xEA;
        mov.b32 s, 0x7B807B80;
        mul.rn.bf16x2 $0, a, s;
        mul.rn.bf16x2 $1, b, s;
        }""",
        "=&r,=&r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _decode_e2m1(packed, scale):
    """Bytes of two codes and bfloat16 scales of one shape to bfloat16 (even, odd columns): value * scale / 2^126."""
    if IS_INTERPRETED:
        return e2m1_plainly(packed, scale)
    else:
        return e2m1_by_assembly(packed, scale)


@triton.jit
def e2m1_plainly(packed, scale):
    wide = packed.to(tl.int32)
    return _e2m1_times(wide & 15, scale), _e2m1_times(wide >> 4, scale)


@triton.jit
def _e2m1_times(nibbles, scale):
    """int32 nibbles to bfloat16: value * scale / 2^126."""
    bits = ((nibbles & 7) << 22) | ((nibbles & 8) << 28)
    return (bits.to(tl.float32, bitcast=True) * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def e2m1_by_assembly(packed, scale):
    """Four bytes at a time, with one packed multiplication by the scale.

    Two bytes go to the upper halves of two 16-bit lanes; sign and magnitude are shifted to bfloat16's positions.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, t, u, v;
        prmt.b32 b, $4, 0, 0x1404;
        prmt.b32 d, $4, 0, 0x3424;
        shl.b32 a, b, 4;
        shl.b32 c, d, 4;
        shr.u32 s, a, 6;
        shr.u32 t, b, 6;
        shr.u32 u, c, 6;
        shr.u32 v, d, 6;
        and.b32 s, s, 0x01C001C0;
        and.b32 t, t, 0x01C001C0;
        and.b32 u, u, 0x01C001C0;
        and.b32 v, v, 0x01C001C0;
        lop3.b32 a, a, 0x80008000, s, 0xEA;
        lop3.b32 b, b, 0x80008000, t, 0xEA;
        lop3.b32 c, c, 0x80008000, u, 0xEA;
        lop3.b32 d, d, 0x80008000, v, 0xEA;
        mul.rn.bf16x2 $0, a, $5;
        mul.rn.bf16x2 $1, c, $6;
        mul.rn.bf16x2 $2, b, $5;
        mul.rn.bf16x2 $3, d, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def decode_e2m1_quads(packed, scale):
    """Bytes of two codes [N, 4 * n] and bfloat16 scales, one for each four bytes, to bfloat16: value * scale / 2^126.

    The eight numbers of four bytes are (first, second)[:, 4 * i : 4 * i + 4] in their order: neighbours stay together.
    """
    if IS_INTERPRETED:
        return e2m1_quads_plainly(packed, scale)
    else:
        return e2m1_quads_by_assembly(packed, scale)


@triton.jit
def e2m1_quads_plainly(packed, scale):
    N: tl.constexpr = packed.shape[0]
    QUADS: tl.constexpr = packed.shape[1] // 4
    even, odd = e2m1_plainly(packed, scale)
    columns = tl.reshape(tl.join(even, odd), (N, QUADS, 2, 4))
    first, second = tl.split(tl.permute(columns, (0, 1, 3, 2)))
    return tl.reshape(first, (N, 4 * QUADS)), tl.reshape(second, (N, 4 * QUADS))


@triton.jit
def e2m1_quads_by_assembly(packed, scale):
    """As `e2m1_by_assembly`, with both codes of a byte in one register."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 w, a, b, c, d, s, t, u, v;
        shl.b32 w, $4, 4;
        prmt.b32 a, w, $4, 0x4404;
        prmt.b32 b, w, $4, 0x5414;
        prmt.b32 c, w, $4, 0x6424;
        prmt.b32 d, w, $4, 0x7434;
        shr.u32 s, a, 6;
        shr.u32 t, b, 6;
        shr.u32 u, c, 6;
        shr.u32 v, d, 6;
        and.b32 s, s, 0x01C001C0;
        and.b32 t, t, 0x01C001C0;
        and.b32 u, u, 0x01C001C0;
        and.b32 v, v, 0x01C001C0;
        lop3.b32 a, a, 0x80008000, s, 0xEA;
        lop3.b32 b, b, 0x80008000, t, 0xEA;
        lop3.b32 c, c, 0x80008000, u, 0xEA;
        lop3.b32 d, d, 0x80008000, v, 0xEA;
        mul.rn.bf16x2 $0, a, $5;
        mul.rn.bf16x2 $1, b, $5;
        mul.rn.bf16x2 $2, c, $5;
        mul.rn.bf16x2 $3, d, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def load_nvfp4(weight_ptr, scale_ptr, n, first, N, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns first .. first + BLOCK_K of weight rows n, bfloat16 [BLOCK_N, BLOCK_K], 2^8 too small."""
    BLOCK_N: tl.constexpr = n.shape[0]
    pairs = first // 2 + tl.arange(0, BLOCK_K // 2)
    groups = first // 16 + tl.arange(0, BLOCK_K // 16)
    inside = (n < N)[:, None]
    packed = tl.load(weight_ptr + n[:, None] * (K // 2) + pairs[None, :], inside & (pairs < K // 2)[None, :], other=0)
    codes = tl.load(scale_ptr + n[:, None] * (K // 16) + groups[None, :], inside & (groups < K // 16)[None, :], other=0)
    scale = (decode_e4m3(codes).to(tl.float32) * _E2M1_IN_SCALE).to(tl.bfloat16)
    spread = tl.broadcast_to(scale[:, :, None], (BLOCK_N, BLOCK_K // 16, 8))
    even, odd = _decode_e2m1(packed, tl.reshape(spread, (BLOCK_N, BLOCK_K // 2)))
    return tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K))
