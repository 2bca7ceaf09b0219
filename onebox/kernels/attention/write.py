"""The cache write in Triton: one program per key and its value, a vector in the registers of one warp.

Codes must equal those of `onebox.formats`, so the float32 operations and their order are the encoder's: divisions and
roots round to nearest, sums are the same tree, and the kernel is compiled without fused multiply-add.
"""

import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import FP8_BITS, PLAIN_BITS, turboquant_tables
from onebox.kernels.attention.hadamard import hadamard, partner_in_pair, rotation_constants
from onebox.kernels.attention.rope import fused_heads, qk_norm_rope_fused
from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.tuning import Tunable

__all__ = ["kv_write", "kv_write_fused"]

_WRITE = Tunable("kv_write")

_E4M3_MAX = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-14)
_LARGEST_HALF = tl.constexpr(65504.0)
_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32
_ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _tree_sum(x, D: tl.constexpr, LOG_D: tl.constexpr):
    """The sum of float32 [D], adding halves: every element ends with the same bits, since a + b equals b + a."""
    index = tl.arange(0, D)
    for layer in tl.static_range(LOG_D):
        x += partner_in_pair(x, LOG_D - 1 - layer, D)
    return tl.sum(tl.where(index == 0, x, 0.0), 0)


@triton.jit
def _largest(x):
    """The largest magnitude in x [D], NaN if an element is NaN."""
    magnitude = tl.abs(x)
    is_nan = tl.max((magnitude != magnitude).to(tl.int32), 0) > 0
    return tl.where(is_nan, float("nan"), tl.max(magnitude, 0))


@triton.jit
def _to_e4m3(x):
    """The E4M3 byte of each float32 within ±448, rounded to nearest even, by integer arithmetic.

    Triton's interpreter rounds differently when it casts to float8; these operations give torch's bits everywhere.
    """
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    # Above 2**-6: keep three mantissa bits, then move the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below: multiples of 2**-9, which is the unit in the last place of 2**14, so adding 2**14 does the rounding.
    steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(x) < 0.015625, steps, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_fp8(x, codes_ptr, scale_ptr, vector, D: tl.constexpr):
    ratio = tl.div_rn(_largest(x), _E4M3_MAX)
    ratio = tl.minimum(tl.maximum(ratio, _SMALLEST_SCALE, propagate_nan=_ALL), _LARGEST_HALF, propagate_nan=_ALL)
    scale = ratio.to(tl.float16)
    scaled = tl.div_rn(x, tl.zeros([D], tl.float32) + scale.to(tl.float32))
    scaled = tl.minimum(tl.maximum(scaled, -_E4M3_MAX, propagate_nan=_ALL), _E4M3_MAX, propagate_nan=_ALL)
    tl.store(codes_ptr + vector * D + tl.arange(0, D), _to_e4m3(scaled))
    tl.store(scale_ptr + vector, scale)


@triton.jit
def _write_turboquant(
    x,
    codes_ptr,
    scale_ptr,
    signs_ptr,
    levels_ptr,
    boundaries_ptr,
    vector,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INVERSE_ROOT: tl.constexpr,
    BITS: tl.constexpr,
):
    largest = tl.maximum(_largest(x), _TINY, propagate_nan=_ALL)
    scaled = tl.div_rn(x, tl.zeros([D], tl.float32) + largest)
    length = tl.sqrt_rn(_tree_sum(scaled * scaled, D, LOG_D))
    unit = tl.div_rn(scaled, tl.zeros([D], tl.float32) + tl.maximum(length, _TINY, propagate_nan=_ALL))
    rotated = hadamard(unit * tl.load(signs_ptr + tl.arange(0, D)), D, LOG_D, INVERSE_ROOT)
    code = tl.zeros([D], tl.int32)  # number of boundaries that are not above; all of them for NaN
    centroid = tl.zeros([D], tl.float32) + tl.load(levels_ptr)
    for index in tl.static_range((1 << BITS) - 1):
        is_below = tl.load(boundaries_ptr + index) > rotated
        code += tl.where(is_below, 0, 1)
        centroid = tl.where(is_below, centroid, tl.load(levels_ptr + index + 1))
    # Eight codes fill BITS bytes, lowest bits first; their bits do not overlap, so the sum is an or.
    place = tl.arange(0, 8) * BITS
    word = tl.sum(tl.reshape(code, [D // 8, 8]) << place[None, :], 1)
    unit_ptr = codes_ptr + vector * (D // 8 * BITS) + tl.arange(0, D // 8) * BITS
    for byte in tl.static_range(BITS):
        tl.store(unit_ptr + byte, ((word >> (8 * byte)) & 0xFF).to(tl.uint8))
    scale = tl.div_rn(length * largest, tl.sqrt_rn(_tree_sum(centroid * centroid, D, LOG_D)))
    tl.store(scale_ptr + vector, tl.minimum(scale, _LARGEST_HALF, propagate_nan=_ALL).to(tl.float16))


@triton.jit
def _write_vector(
    x_ptr,
    codes_ptr,
    scale_ptr,
    signs_ptr,
    levels_ptr,
    boundaries_ptr,
    row_head,
    vector,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INVERSE_ROOT: tl.constexpr,
    BITS: tl.constexpr,
):
    columns = tl.arange(0, D)
    x = tl.load(x_ptr + row_head * D + columns).to(tl.float32)
    if BITS == 16:
        tl.store(codes_ptr + vector * D + columns, rounded(x, tl.bfloat16))
    elif BITS == 8:
        _write_fp8(x, codes_ptr, scale_ptr, vector, D)
    else:
        _write_turboquant(
            x, codes_ptr, scale_ptr, signs_ptr, levels_ptr, boundaries_ptr, vector, D, LOG_D, INVERSE_ROOT, BITS
        )


@triton.jit(do_not_specialize=["slots_ptr"])
def kv_write_encode_kernel(
    key_ptr,  # [R, KV, D]
    value_ptr,  # [R, KV, D]
    slots_ptr,  # int64 [R]
    key_codes_ptr,  # [pages, KV, P, ...]
    key_scale_ptr,  # float16 [pages, KV, P]
    value_codes_ptr,
    value_scale_ptr,
    signs_ptr,  # float32 [D]; this and the next four only for TurboQuant
    key_levels_ptr,  # float32 [2**KEY_BITS]
    key_boundaries_ptr,  # float32 [2**KEY_BITS - 1]
    value_levels_ptr,
    value_boundaries_ptr,
    KV: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INVERSE_ROOT: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row_head = tl.program_id(0).to(tl.int64)
    head = row_head % KV
    slot = tl.load(slots_ptr + row_head // KV)
    if slot >= 0:
        vector = ((slot // P) * KV + head) * P + slot % P
        _write_vector(
            key_ptr,
            key_codes_ptr,
            key_scale_ptr,
            signs_ptr,
            key_levels_ptr,
            key_boundaries_ptr,
            row_head,
            vector,
            D,
            LOG_D,
            INVERSE_ROOT,
            KEY_BITS,
        )
        _write_vector(
            value_ptr,
            value_codes_ptr,
            value_scale_ptr,
            signs_ptr,
            value_levels_ptr,
            value_boundaries_ptr,
            row_head,
            vector,
            D,
            LOG_D,
            INVERSE_ROOT,
            VALUE_BITS,
        )


def kv_write(pages, key, value, slots):
    rows, heads, dim = key.shape
    if not rows:
        return
    signs, codebooks = None, list[Tensor | None]()
    for bits in (pages.format.key_bits, pages.format.value_bits):
        tables = turboquant_tables(dim, bits, key.device) if bits < FP8_BITS else None
        signs = tables.signs if tables else signs
        codebooks += [tables.levels, tables.boundaries] if tables else [None, None]
    kv_write_encode_kernel[(rows * heads,)](
        key.contiguous(),
        value.contiguous(),
        slots,
        pages.key_codes,
        pages.key_scale,
        pages.value_codes,
        pages.value_scale,
        signs,
        *codebooks,
        KV=heads,
        P=pages.page_tokens,
        **rotation_constants(dim),
        KEY_BITS=pages.format.key_bits,
        VALUE_BITS=pages.format.value_bits,
        num_warps=1,
        enable_fp_fusion=False,
        **launch_options(_WRITE, key.shape[1]),
    )


def kv_write_fused(qkv_parts, q_weight, k_weight, cos, sin, eps, dtype, pages, slots):
    turning = q_weight, k_weight, cos, sin
    if pages.format.key_bits == pages.format.value_bits == PLAIN_BITS:
        places = pages.key_codes, pages.value_codes, slots
        return fused_heads(qkv_parts, turning, eps, dtype, places, pages.kv_heads, pages.page_tokens)
    query, key, value = qk_norm_rope_fused(qkv_parts, *turning, eps, pages.kv_heads, dtype)
    kv_write(pages, key, value, slots)
    return query
