"""Integer tiles (`onebox.formats.fragments`) as the left operand of a prefill's products, for linears and experts.

A thread loads four bytes of a tile, one word: codes of four neighbouring columns. It decodes them in registers to its
elements of the MMA's left operand, so no weight goes through shared memory; the right operand, the tokens, is permuted
to match. Along a group's 128 columns the order is

    column     j 2 | t 4 | kt 2 | k16 2 | lo 2 | hi 2
    place      j 2 | kt 2 | k16 2 | hi 2 | t 4 | lo 2

and `in_tile_order` permutes tokens into it. A group's sum has the same terms in this order, and the order of its
additions does not depend on the token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import IS_INTERPRETED
from onebox.kernels.common.few_bits import int2_values, int3_pair, int3_spare
from onebox.kernels.common.launch import ceil_div

__all__ = ["WORDS", "in_tile_order", "sum_tiles", "tile_order_64"]

WORDS = tl.constexpr(128)  # words of a tile that one warp loads at once, four words per thread
_PERMUTED_TOKENS = 16


@triton.jit
def _int4_codes(words):
    """Eight codes of each word, bfloat16: of j = 0 the columns 0, 2, 1, 3 of the four, then those of j = 1.

    The assembly decodes two at a time: masking leaves a nibble in the lowest bits of each half, flipping its sign bit
    adds 8, and with the bfloat16 bits of 128 above them the half is 136 + code. The interpreter has no assembly.
    """
    if not IS_INTERPRETED:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 a, b, c, d, s;
            shr.u32 b, $8, 8;
            shr.u32 c, $8, 4;
            shr.u32 d, $8, 12;
            mov.b32 s, 0x43084308;
            lop3.b32 a, $8, 0x000F000F, s, 0x6A;
            lop3.b32 b, b, 0x000F000F, s, 0x6A;
            lop3.b32 c, c, 0x000F000F, s, 0x6A;
            lop3.b32 d, d, 0x000F000F, s, 0x6A;
            sub.rn.bf16x2 a, a, s;
            sub.rn.bf16x2 b, b, s;
            sub.rn.bf16x2 c, c, s;
            sub.rn.bf16x2 d, d, s;
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
    else:
        return (
            _code(words, 28, 28),
            _code(words, 12, 28),
            _code(words, 20, 28),
            _code(words, 4, 28),
            _code(words, 24, 28),
            _code(words, 8, 28),
            _code(words, 16, 28),
            _code(words, 0, 28),
        )


@triton.jit
def _code(words, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Bits of each word as a signed number: shifted left to the sign bit and back right. Exact in bfloat16."""
    return ((words << LEFT) >> RIGHT).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _int8_codes(words):
    """[..., lo, hi] from words of four codes."""
    even = tl.join(_code(words, 24, 24), _code(words, 8, 24))
    return tl.join(even, tl.join(_code(words, 16, 24), _code(words, 0, 24)))


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    """[..., lo, hi, first four or last four]."""
    return tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def _int3_weights(tile_ptrs, rest_ptrs):
    """bfloat16 [TILES * 16, 128] of one group of some INT3 tiles, columns in tile order."""
    TILES: tl.constexpr = tile_ptrs.shape[0]
    both = tl.permute(tl.reshape(tl.load(tile_ptrs), (TILES, 32, 2, 2)), (0, 1, 3, 2))
    first, second = tl.split(both)  # [TILES, g t, r8]
    third = tl.reshape(tl.load(rest_ptrs), (TILES, 32, 2))
    a, b, c, d, e, f, g, h = int3_pair(first)
    one = _joined(a, b, c, d, e, f, g, h)  # ... lo hi k16
    a, b, c, d, e, f, g, h = int3_pair(second)
    two = _joined(a, b, c, d, e, f, g, h)
    a, b, c, d, e, f, g, h = int3_pair(third)
    three = _joined(a, b, c, d, e, f, g, h)
    a, b, c, d, e, f, g, h = int3_spare(first, second, third)
    four = _joined(a, b, c, d, e, f, g, h)
    codes = tl.join(tl.join(one, two), tl.join(three, four))
    split = tl.reshape(codes, (TILES, 8, 4, 2, 2, 2, 2, 2, 2))  # n g t r8 lo hi k16 kt j
    return tl.reshape(tl.permute(split, (0, 3, 1, 8, 7, 6, 5, 2, 4)), (TILES * 16, 128))


@triton.jit
def _int2_codes(words):
    """[..., lo, hi, kt, j] of words of sixteen codes."""
    a, b, c, d, e, f, g, h = int2_values(words, True)
    first = _joined(a, b, c, d, e, f, g, h)
    a, b, c, d, e, f, g, h = int2_values(words, False)
    return tl.join(first, _joined(a, b, c, d, e, f, g, h))


@triton.jit
def _weights(tile_ptrs, rest_ptrs, BITS: tl.constexpr):
    """bfloat16 [TILES * 16, 128] of one group of some tiles, columns in tile order."""
    TILES: tl.constexpr = tile_ptrs.shape[0]
    if BITS == 3:
        return _int3_weights(tile_ptrs, rest_ptrs)
    elif BITS == 2:
        split = tl.reshape(_int2_codes(tl.load(tile_ptrs)), (TILES, 8, 4, 2, 2, 2, 2, 2, 2))  # n g t k16 r8 lo hi kt j
        return tl.reshape(tl.permute(split, (0, 4, 1, 8, 7, 3, 6, 2, 5)), (TILES * 16, 128))
    else:
        split = tl.reshape(_group_codes(tile_ptrs, BITS), (TILES, 8, 4, 2, 2, 2, 2, 2, 2))  # n g t k16 r8 lo hi j kt
        return tl.reshape(tl.permute(split, (0, 4, 1, 7, 8, 3, 6, 2, 5)), (TILES * 16, 128))


@triton.jit
def _group_codes(tile_ptrs, BITS: tl.constexpr):
    """[TILES, WORDS, lo, hi, j, kt] of one group of some tiles of INT4 or INT8."""
    if BITS == 4:
        a, b, c, d, e, f, g, h = _int4_codes(tl.load(tile_ptrs))
        first = _joined(a, b, c, d, e, f, g, h)
        a, b, c, d, e, f, g, h = _int4_codes(tl.load(tile_ptrs + WORDS))
        second = _joined(a, b, c, d, e, f, g, h)
    else:
        a = _int8_codes(tl.load(tile_ptrs))
        b = _int8_codes(tl.load(tile_ptrs + WORDS))
        c = _int8_codes(tl.load(tile_ptrs + 2 * WORDS))
        d = _int8_codes(tl.load(tile_ptrs + 3 * WORDS))
        first = tl.join(a, c)
        second = tl.join(b, d)
    return tl.join(first, second)


@triton.jit
def sum_tiles(
    x_ptrs,  # [128, TOKENS]: the tokens' first group, in tile order
    tile_ptrs,  # of each block of rows: int32 [TILES, WORDS], the tiles' first group
    tile_stride,  # stride over groups, in words
    scale_ptrs,  # of each block: [TILES * 16], the rows' scales in the first group; not read for INT8
    scale_stride,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr = 1,
    rest_ptrs=None,  # of each block of INT3: int32 [TILES, WORDS / 2], the last words of the tiles' first group
):
    """Of each block of rows float32 [TILES * 16, TOKENS]: its rows times the tokens, group after group.

    Tokens are copied to shared memory once for all blocks. A group's codes (not INT8's) are multiplied unscaled and its
    scale is applied to their sum: no weight is rounded. All pointers are read without masks, so those of rows and
    tokens out of range must point to valid ones: masks would cost more than the discarded results.
    """
    TILES: tl.constexpr = tile_ptrs[0].shape[0]
    TOKENS: tl.constexpr = x_ptrs.shape[1]
    totals = ()
    for _ in tl.static_range(BLOCKS):
        totals += (tl.zeros((TILES * 16, TOKENS), tl.float32),)  # type: ignore[assignment]
    for group in range(GROUPS):
        x = tl.load(x_ptrs + group * 128)
        if IS_INTERPRETED:  # it has no bfloat16
            x = x.to(tl.float32)
        added = ()
        for block in tl.static_range(BLOCKS):
            rest = rest_ptrs[block] + group * tile_stride if BITS == 3 else None
            weight = _weights(tile_ptrs[block] + group * tile_stride, rest, BITS).to(x.dtype)
            if BITS != 8:
                dots = tl.dot(weight, x, input_precision="tf32x3")
                scale = tl.load(scale_ptrs[block] + group * scale_stride).to(tl.float32)
                scale = tl.broadcast_to(scale[:, None], dots.shape)
                added += (tl.fma(dots, scale, totals[block]),)  # type: ignore[assignment]
            else:
                added += (tl.dot(weight, x, totals[block], input_precision="tf32x3"),)  # type: ignore[assignment]
        totals = added
    return totals


@triton.jit
def tile_order_64(rows):
    """Half a group's columns [64, N] in tile order, the row order that `sum_tiles` reads."""
    N: tl.constexpr = rows.shape[1]
    split = tl.reshape(rows, (4, 2, 2, 2, 2, N))  # t kt k16 lo hi
    return tl.reshape(tl.permute(split, (1, 2, 4, 0, 3, 5)), (64, N))


@triton.jit(do_not_specialize=["T"])
def tile_order_kernel(
    x_ptr,  # [T, K], row stride x_stride
    out_ptr,  # [T, K]
    T,
    x_stride,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) * 128 + tl.arange(0, 128)
    used = (tokens < T)[:, None]
    x = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=used)
    split = tl.reshape(x, (TOKENS, 2, 4, 2, 2, 2, 2))  # token j t kt k16 lo hi
    ordered = tl.reshape(tl.permute(split, (0, 1, 3, 4, 6, 2, 5)), (TOKENS, 128))
    tl.store(out_ptr + tokens.to(tl.int64)[:, None] * K + columns[None, :], ordered, mask=used)


def in_tile_order(x: Tensor) -> Tensor:
    """[T, K], K a multiple of 128: each group's columns of x in the order that `sum_tiles` reads."""
    num_tokens, columns = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((num_tokens, columns), dtype=x.dtype, device=x.device)
    if num_tokens:
        tile_order_kernel[(columns // 128, ceil_div(num_tokens, _PERMUTED_TOKENS))](
            x, out, num_tokens, x.stride(0), K=columns, TOKENS=_PERMUTED_TOKENS, num_warps=4
        )
    return out
