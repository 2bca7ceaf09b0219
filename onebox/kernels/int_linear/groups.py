"""A few tiles of an integer matrix times all rows of a decode step, group after group: what the linears are made of.

One program takes a few tiles (16 matrix rows each). A row's two planes are two columns of the MMA, neighbours in a
thread's registers. Weights and activations are both permuted along K, alike, so that a fragment is what a thread
loaded; up to 8 rows, where one warp is a program, next to nothing goes through shared memory.
"""

import triton
import triton.language as tl

from onebox.kernels.common.dependent import wait

__all__ = ["load_squares", "prefetch", "row_factors", "sum_groups"]


@triton.jit
def weight_operand(half, TILES: tl.constexpr):
    """Half the columns of some tiles, int8 [TILES, 1024], as the MMA takes them: [16 * TILES, 64]."""
    split = tl.reshape(half, (TILES, 2, 8, 4, 2, 2, 4))  # n kt g t k16 r8 k4
    return tl.reshape(tl.permute(split, (0, 5, 2, 1, 4, 3, 6)), (TILES * 16, 64))  # n r8 g | kt k16 t k4


@triton.jit
def plane_operand(planes, COLUMNS: tl.constexpr):
    """64 columns of the planes, int8 [COLUMNS, 64], with K in the order of `weight_operand`: [64, COLUMNS]."""
    split = tl.reshape(planes, (COLUMNS, 4, 2, 2, 4))  # c t kt k16 k4
    return tl.reshape(tl.permute(split, (2, 3, 1, 4, 0)), (64, COLUMNS))  # kt k16 t k4 | c


@triton.jit
def int4_halves(tiles, USE_ASM: tl.constexpr):
    """Sixteen times the codes of both halves, int8, from bytes that hold one of each.

    Written for single bytes the compiler takes the bytes of a register apart; the assembly masks four at a time. The
    interpreter has no assembly. Both give the same bytes.
    """
    if USE_ASM:
        first, second = tl.inline_asm_elementwise(
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
    else:
        first = ((tiles << 4) & 0xF0).to(tl.int8, bitcast=True)
        second = (tiles & 0xF0).to(tl.int8, bitcast=True)
    return first, second


@triton.jit
def load_tiles(tiles_ptr, inside, stride, UNROLL: tl.constexpr, BITS: tl.constexpr):
    """Bytes of UNROLL groups, asked for before any is needed: firsts alone for INT4, whose bytes hold both halves."""
    firsts = ()
    seconds = ()
    for step in tl.static_range(UNROLL):
        at = tiles_ptr + step * stride
        first = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
        firsts += (first,)  # type: ignore[assignment]
        if BITS == 8:
            second = tl.load(at + 1024, mask=inside, other=0, eviction_policy="evict_first")
            seconds += (second,)  # type: ignore[assignment]
    return firsts, seconds


@triton.jit
def group_dot(first, second, planes_ptr, inside, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [16 * TILES, COLUMNS / 2]: the dot products of a group, exact up to the conversion to float32."""
    before = plane_operand(tl.load(planes_ptr, mask=inside, other=0), COLUMNS)
    behind = plane_operand(tl.load(planes_ptr + 64, mask=inside, other=0), COLUMNS)
    dots = tl.dot(weight_operand(first, TILES), before, out_dtype=tl.int32)
    dots = tl.dot(weight_operand(second, TILES), behind, dots, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(dots, (TILES * 16, COLUMNS // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def load_scales(scale_ptrs, inside, stride, UNROLL: tl.constexpr, BITS: tl.constexpr):
    """Scales of UNROLL groups of INT4 tiles; INT8 has none here."""
    scales = ()
    for step in tl.static_range(UNROLL):
        if BITS == 4:
            scales += (tl.load(scale_ptrs + step * stride, mask=inside, other=0.0),)  # type: ignore[assignment]
    return scales


@triton.jit
def prefetch(pointers):
    """Has memory bring what stands at `pointers` nearer, so that loads of it which come late do not take long."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_groups(
    total,
    firsts,
    seconds,
    weight_scales,
    plane_ptrs,
    planes_inside,
    scale_ptrs,
    rows_inside,
    BITS: tl.constexpr,
    UNROLL: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Total and the dots of UNROLL groups whose weights are loaded, one after the other."""
    for step in tl.static_range(UNROLL):
        scale = tl.load(scale_ptrs + step, mask=rows_inside, other=0.0)[None, :]
        if BITS == 4:
            first, second = int4_halves(firsts[step], USE_ASM)
            scale = weight_scales[step].to(tl.float32)[:, None] * scale
        else:
            first = firsts[step].to(tl.int8, bitcast=True)
            second = seconds[step].to(tl.int8, bitcast=True)
            scale = tl.broadcast_to(scale, total.shape)
        dots = group_dot(first, second, plane_ptrs + step * 128, planes_inside, TILES, COLUMNS)
        # Said as one operation, so that no variant of this kernel rounds where another does not.
        total = tl.fma(dots, scale, total)
    return total


@triton.jit
def load_squares(squares_ptr, rows, R, K: tl.constexpr, GROUPS_BLOCK: tl.constexpr):
    """float32 [rows, GROUPS_BLOCK]: the groups' sums of squares, of `squares` [R, K/128]."""
    groups = tl.arange(0, GROUPS_BLOCK)
    inside = (rows < R)[:, None] & (groups < K // 128)[None, :]
    return tl.load(squares_ptr + rows[:, None] * (K // 128) + groups[None, :], mask=inside, other=0.0)


@triton.jit
def row_factors(squares, eps, K: tl.constexpr):
    """float32 [rows]: what makes rows with these `squares`, from `load_squares`, rows of length one."""
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def sum_groups(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    weight_ptr,  # uint8 [K/128, tiles, 256 * BITS]
    weight_scale_ptr,  # [K/128, N] or [N]
    squares_ptr,  # float32 [R, K/128], or None for rows that have their length already
    R,
    N,
    num_tiles,
    first_tile,
    first_group,
    eps,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    USE_ASM: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """float32 [16 * TILES, COLUMNS / 2]: the linear over GROUPS groups, in their order, from `first_group`.

    The first weights are under way before it waits for the rows, and what is only needed at the end is asked for at the
    beginning: a program's last act would else be to wait for a number or two.
    """
    TILE_BYTES: tl.constexpr = 256 * BITS
    tiles = first_tile + tl.arange(0, TILES)
    tiles_inside = (tiles < num_tiles)[:, None]
    tile_stride = num_tiles.to(tl.int64) * TILE_BYTES
    tile_ptrs = weight_ptr + tiles.to(tl.int64)[:, None] * TILE_BYTES + tl.arange(0, 1024)[None, :]
    tile_ptrs += first_group * tile_stride
    columns = first_tile * 16 + tl.arange(0, 16 * TILES)
    columns_inside = columns < N
    weight_scale_ptrs = weight_scale_ptr + first_group * N + columns
    planes = tl.arange(0, COLUMNS)
    planes_inside = (planes < 2 * R)[:, None]
    plane_ptrs = planes_ptr + planes[:, None] * K + first_group * 128 + tl.arange(0, 64)[None, :]
    rows = tl.arange(0, COLUMNS // 2)
    scale_ptrs = scale_ptr + rows * (K // 128) + first_group
    total = tl.zeros((16 * TILES, COLUMNS // 2), tl.float32)
    if PREFETCH and USE_ASM and BITS == 4 and TILES == 1 and GROUPS > UNROLL:
        # The compiler has no registers for all scales at once and asks for most of them last.
        groups = tl.minimum(tl.arange(0, 32), GROUPS - 1)
        prefetch(weight_scale_ptr + (first_group + groups) * N + first_tile * 16)
    scales = load_scales(weight_scale_ptrs, columns_inside, N, UNROLL, BITS)
    firsts, seconds = load_tiles(tile_ptrs, tiles_inside, tile_stride, UNROLL, BITS)
    if BITS == 8:
        row_scales = tl.load(weight_scale_ptr + columns, mask=columns_inside, other=0.0)
    wait(DEPENDENT)
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, rows, R, K, GROUPS_BLOCK)
    total = add_groups(
        total,
        firsts,
        seconds,
        scales,
        plane_ptrs,
        planes_inside,
        scale_ptrs,
        rows < R,
        BITS,
        UNROLL,
        TILES,
        COLUMNS,
        USE_ASM,
    )
    if squares_ptr is not None:
        factors = row_factors(squares, eps, K)
    for group in tl.range(UNROLL, GROUPS, UNROLL, num_stages=1):
        scales = load_scales(weight_scale_ptrs + group * N, columns_inside, N, UNROLL, BITS)
        firsts, seconds = load_tiles(tile_ptrs + group * tile_stride, tiles_inside, tile_stride, UNROLL, BITS)
        total = add_groups(
            total,
            firsts,
            seconds,
            scales,
            plane_ptrs + group * 128,
            planes_inside,
            scale_ptrs + group,
            rows < R,
            BITS,
            UNROLL,
            TILES,
            COLUMNS,
            USE_ASM,
        )
    if BITS == 4:
        total *= 0.0625
    else:
        total *= row_scales.to(tl.float32)[:, None]
    if squares_ptr is not None:
        total *= factors[None, :]
    return total
