"""A row of an INT4 expert's tiles times a few rows' planes, as exact integers a group: what gate_up and down share."""

import triton
import triton.language as tl

from onebox.kernels.common.dependent import wait
from onebox.kernels.int_linear.groups import prefetch

__all__ = ["GROUP", "TILE_BYTES", "tile_row_dot"]

GROUP = tl.constexpr(128)
TILE_BYTES = tl.constexpr(1024)


@triton.jit
def _nibbles(packed, INTERPRETED: tl.constexpr):
    """Sixteen times the codes of a tile's two halves, as int8.

    The assembly works on four bytes at once; Triton's own operators would take a register for each byte. The
    interpreter has no assembly and takes the plain path, which gives the same bits.
    """
    if INTERPRETED:
        low = ((packed << 4) & 0xF0).to(tl.int8, bitcast=True)
        high = (packed & 0xF0).to(tl.int8, bitcast=True)
        return low, high
    else:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 shifted;
            shl.b32 shifted, $2, 4;
            and.b32 $1, $2, 0xF0F0F0F0;
            and.b32 $0, shifted, 0xF0F0F0F0;
            }""",
            constraints="=&r,=&r,r",
            args=[packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _as_weights(half):
    """Bytes of half a tile in fragment order to [16, 64], the columns in the order of `_as_columns`."""
    split = tl.reshape(half, (2, 8, 4, 2, 2, 4))  # kt g t k16 r8 k4
    return tl.reshape(tl.permute(split, (4, 1, 0, 3, 2, 5)), (16, 64))  # r8 g | kt k16 t k4


@triton.jit
def _as_columns(x, COLUMNS: tl.constexpr):
    """Half a group of activations [COLUMNS, 64] to [64, COLUMNS], in the order of the MMA's registers."""
    split = tl.reshape(x, (COLUMNS, 4, 2, 2, 4))  # column t kt k16 k4
    return tl.reshape(tl.permute(split, (2, 3, 1, 4, 0)), (64, COLUMNS))


@triton.jit
def _group_dot(packed, x_ptrs, used, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """16 times the exact dots of a tile with COLUMNS planes; neighbouring planes joined as 256 * even + odd.

    float32 [16, COLUMNS / 2]. The integers stay below 2^30: 128 products of at most 2^7 * 2^7, joined.
    """
    first = tl.load(x_ptrs, mask=used, other=0)
    second = tl.load(x_ptrs + 64, mask=used, other=0)
    low, high = _nibbles(packed, INTERPRETED)
    dots = tl.dot(_as_weights(low), _as_columns(first, COLUMNS), out_dtype=tl.int32)
    dots = tl.dot(_as_weights(high), _as_columns(second, COLUMNS), dots, out_dtype=tl.int32)
    even, odd = tl.split(tl.reshape(dots, (16, COLUMNS // 2, 2)))
    return (even * 256 + odd).to(tl.float32)


@triton.jit
def _load_groups(tile_ptrs, tile_scale_ptrs, start, UNROLL: tl.constexpr):
    """(tiles, scales) of UNROLL groups: so many bytes are under way before the first is used."""
    packed = ()
    scales = ()
    for i in tl.static_range(UNROLL):
        tile = tl.load(tile_ptrs + (start + i) * TILE_BYTES, eviction_policy="evict_first")
        packed += (tile,)  # type: ignore[assignment]
        scales += (tl.load(tile_scale_ptrs + (start + i) * 16),)  # type: ignore[assignment]
    return packed, scales


@triton.jit
def _add_groups(
    total,
    packed,
    scales,
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    for i in tl.static_range(UNROLL):
        dots = _group_dot(packed[i], x_ptrs + i * GROUP, used, COLUMNS, INTERPRETED)
        x_scale = tl.load(x_scale_ptrs + i, mask=scale_used, other=0.0)
        # Said as one operation, so that no variant of this kernel rounds where another does not.
        total = tl.fma(dots, scales[i].to(tl.float32)[:, None] * x_scale[None, :], total)
    return total


@triton.jit
def tile_row_dot(
    tile_ptrs,
    scale_ptr,  # [GROUPS, 16]
    x_ptrs,
    used,
    x_scale_ptrs,
    scale_used,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A row of tiles with COLUMNS planes: float32 [16, COLUMNS / 2], group after group.

    The first weights are under way before it waits for the planes.
    """
    total = tl.zeros((16, COLUMNS // 2), tl.float32)
    if PREFETCH and not INTERPRETED and GROUPS > UNROLL:
        # The compiler has no registers for all scales at once and asks for most of them last.
        prefetch(scale_ptr + tl.minimum(tl.arange(0, 32), GROUPS - 1) * 16)
    tile_scale_ptrs = scale_ptr + tl.arange(0, 16)
    packed, scales = _load_groups(tile_ptrs, tile_scale_ptrs, 0, UNROLL)
    wait(DEPENDENT)
    if GROUPS <= 4 * UNROLL:
        # Few enough to be written out: the next groups are under way while these are multiplied.
        for start in tl.static_range(0, GROUPS, UNROLL):
            next_packed, next_scales = packed, scales
            if start + UNROLL < GROUPS:
                next_packed, next_scales = _load_groups(tile_ptrs, tile_scale_ptrs, start + UNROLL, UNROLL)
            total = _add_groups(
                total,
                packed,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                UNROLL,
                COLUMNS,
                INTERPRETED,
            )
            packed, scales = next_packed, next_scales
    else:
        total = _add_groups(total, packed, scales, x_ptrs, used, x_scale_ptrs, scale_used, UNROLL, COLUMNS, INTERPRETED)
        for start in tl.range(UNROLL, GROUPS, UNROLL, num_stages=1):
            packed, scales = _load_groups(tile_ptrs, tile_scale_ptrs, start, UNROLL)
            total = _add_groups(
                total,
                packed,
                scales,
                x_ptrs + start * GROUP,
                used,
                x_scale_ptrs + start,
                scale_used,
                UNROLL,
                COLUMNS,
                INTERPRETED,
            )
    return total * 0.0625
