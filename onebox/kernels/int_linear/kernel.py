"""The integer linears in Triton.

Decode: one program takes a few tiles (16 matrix rows each) and all rows of the step. A row's two planes are two columns
of the MMA, neighbours in a thread's registers. Weights and activations are both permuted along K, alike, so that a
fragment is what a thread loaded; up to 8 rows, where one warp is a program, next to nothing goes through shared memory.
Prefill is in `prefill.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS
from onebox.kernels.dependent import dependent, release, wait
from onebox.kernels.int_linear.prefill import matmul
from onebox.kernels.int_linear.reference import LARGEST, SMALLEST_ABSMAX, num_parts
from onebox.kernels.rows import FixedRows
from onebox.kernels.tuning import choose
from onebox.spec.errors import MismatchError

__all__ = [
    "decode_shape",
    "fixed_point",
    "int4_linear",
    "int4_matmul",
    "int4_parts",
    "int8_linear",
    "int8_matmul",
    "int8_parts",
    "linear",
    "row_factors",
    "sum_groups",
]

MAX_ROWS = 64


@triton.jit
def fixed_point_split_kernel(
    x_ptr,  # [R, K]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_ABSMAX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = columns < K
    x = tl.load(x_ptr + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), SMALLEST_ABSMAX), LARGEST)
    # Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded, half to even.
    steps = ((tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)) + 12582912.0) - 12582912.0).to(tl.int32)
    low = ((steps + 128) & 255) - 128
    at = planes_ptr + row * 2 * K + columns
    tl.store(at, ((steps - low) >> 8).to(tl.int8), mask=inside)
    tl.store(at + K, low.to(tl.int8), mask=inside)
    tl.store(scale_ptr + row * (K // 128) + groups, scale, mask=groups * 128 < K)


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
def sum_groups(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    weight_ptr,  # uint8 [K/128, tiles, 256 * BITS]
    weight_scale_ptr,  # [K/128, N] if BITS is 4
    R,
    N,
    num_tiles,
    first_tile,
    first_group,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    USE_ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """float32 [16 * TILES, COLUMNS / 2]: the linear over GROUPS groups, in their order, from `first_group`.

    The INT4 codes come sixteen times too large and are scaled; the INT8 codes are not scaled yet. The first weights are
    under way before it waits for the rows.
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
    scales = load_scales(weight_scale_ptrs, columns_inside, N, UNROLL, BITS)
    firsts, seconds = load_tiles(tile_ptrs, tiles_inside, tile_stride, UNROLL, BITS)
    wait(DEPENDENT)
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
    return total


@triton.jit
def row_factors(squares_ptr, rows, R, eps, K: tl.constexpr, GROUPS_BLOCK: tl.constexpr):
    """float32 [rows]: what makes rows of `squares` [R, K/128], their groups' sums of squares, rows of length one."""
    groups = tl.arange(0, GROUPS_BLOCK)
    inside = (rows < R)[:, None] & (groups < K // 128)[None, :]
    squares = tl.load(squares_ptr + rows[:, None] * (K // 128) + groups[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit(do_not_specialize=["R", "num_tiles"])
def linear_part_kernel(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    weight_ptr,  # uint8 [K/128, tiles, 256 * BITS]
    weight_scale_ptr,  # [K/128, N] or [N]
    squares_ptr,  # float32 [R, K/128], or None for rows that have their length already
    out_ptr,  # [SPLITS, R, N]: float32 parts, or the result if there is one split
    R,
    N,
    num_tiles,
    eps,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    USE_ASM: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GROUPS: tl.constexpr = K // 128 // SPLITS
    release(DEPENDENT)
    first_tile = tl.program_id(0) * TILES
    split = tl.program_id(1)
    total = sum_groups(
        planes_ptr,
        scale_ptr,
        weight_ptr,
        weight_scale_ptr,
        R,
        N,
        num_tiles,
        first_tile,
        split * GROUPS,
        K,
        BITS,
        GROUPS,
        COLUMNS,
        TILES,
        UNROLL,
        USE_ASM,
        DEPENDENT,
    )
    columns = first_tile * 16 + tl.arange(0, 16 * TILES)
    rows = tl.arange(0, COLUMNS // 2)
    if BITS == 4:
        total *= 0.0625
    else:
        total *= tl.load(weight_scale_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    if squares_ptr is not None:
        total *= row_factors(squares_ptr, rows, R, eps, K, GROUPS_BLOCK)[None, :]
    at = out_ptr + (split * R + rows).to(tl.int64)[None, :] * N + columns[:, None]
    inside = (rows < R)[None, :] & (columns < N)[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def linear_sum_kernel(
    parts_ptr,  # float32 [SPLITS, R, N]
    out_ptr,  # [R, N]
    R,
    N,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (split * R + row).to(tl.int64) * N + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.int_linear.fixed_point`."""
    x = x.contiguous()
    rows, columns = x.shape
    num_groups = columns // TILE_COLUMNS
    planes = torch.empty((rows, 2, columns), dtype=torch.int8, device=x.device)
    scale = torch.empty((rows, num_groups), dtype=torch.float32, device=x.device)
    groups = 4
    fixed_point_split_kernel[(triton.cdiv(num_groups, groups), rows)](
        x,
        planes,
        scale,
        K=columns,
        GROUPS=groups,
        LARGEST=float(LARGEST),
        SMALLEST_ABSMAX=SMALLEST_ABSMAX,
        num_warps=groups,
        **dependent(x, "fixed_point"),
    )
    return planes, scale


def int4_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """See `onebox.kernels.int_linear.int4_linear`."""
    return linear(planes, scale, weight, weight_scale, dtype, 4, num_parts(weight))


def int8_linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """See `onebox.kernels.int_linear.int8_linear`."""
    return linear(planes, scale, weight, weight_scale, dtype, 8, num_parts(weight))


def int4_parts(rows: FixedRows, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.int_linear.int4_parts`."""
    return _parts(rows, weight, weight_scale, 4, num_parts(weight))


def int8_parts(rows: FixedRows, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.int_linear.int8_parts`."""
    return _parts(rows, weight, weight_scale, 8, num_parts(weight))


def int4_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.int_linear.int4_matmul`."""
    return matmul(x, weight, weight_scale, 4)


def int8_matmul(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.int_linear.int8_matmul`."""
    return matmul(x, weight, weight_scale, 8)


def linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, bits: int, splits: int
) -> Tensor:
    """[R, N] of `dtype`, K cut in `splits` equal parts; the cut belongs to the weight, never to the rows."""
    only_dtype = dtype if splits == 1 else torch.float32
    parts = _parts(FixedRows(planes, planes, scale, None), weight, weight_scale, bits, splits, only_dtype)
    if splits == 1:
        return parts[0]
    _, rows, num_columns = parts.shape
    out = torch.empty((rows, num_columns), dtype=dtype, device=planes.device)
    block = 512
    linear_sum_kernel[(triton.cdiv(num_columns, block), rows)](
        parts, out, rows, num_columns, SPLITS=splits, BLOCK=block, num_warps=4, **dependent(planes, "linear_sum")
    )
    return out


def _parts(
    rows: FixedRows, weight: Tensor, weight_scale: Tensor, bits: int, splits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[splits, R, N] of `dtype`."""
    num_rows, num_columns = len(rows.planes), weight_scale.shape[-1]
    num_groups, num_tiles = weight.shape[:2]
    parts = torch.empty((splits, num_rows, num_columns), dtype=dtype, device=weight.device)
    shape = decode_shape(num_rows, num_groups // splits, _name(bits, decode_columns(num_rows), num_groups))
    linear_part_kernel[(triton.cdiv(num_tiles, shape["TILES"]), splits)](
        rows.planes,
        rows.scale,
        weight,
        weight_scale,
        rows.squares,
        parts,
        num_rows,
        num_columns,
        num_tiles,
        rows.eps,
        K=num_groups * TILE_COLUMNS,
        BITS=bits,
        SPLITS=splits,
        GROUPS_BLOCK=triton.next_power_of_2(num_groups),
        **shape,
        **dependent(weight, _name(bits, shape["COLUMNS"], num_groups)),
    )
    return parts


def decode_columns(rows: int) -> int:
    """Columns of the MMA: two planes a row, a power of two."""
    if rows > MAX_ROWS:
        raise MismatchError(f"A decode step has at most {MAX_ROWS} rows, not {rows}: use the matmul for more.")
    columns: int = max(8, triton.next_power_of_2(2 * rows))
    return columns


def decode_shape(rows: int, num_groups: int, kernel: str) -> dict[str, int]:
    """What a decode program holds and how it is compiled. Results do not depend on it, only speed does.

    Up to 16 rows one warp takes one tile; more rows share the planes they load among more tiles and warps.
    """
    columns = decode_columns(rows)
    tiles, warps, unroll = {8: (1, 1, 4), 16: (1, 1, 4), 32: (1, 1, 2), 64: (8, 8, 1), 128: (8, 8, 1)}[columns]
    # More registers would let the compiler put the loads off until they are needed.
    chosen = choose(kernel, {"UNROLL": unroll, **({"maxnreg": 128 if columns < 32 else 168} if warps == 1 else {})})
    return {
        **chosen,
        "COLUMNS": columns,
        "TILES": tiles,
        "UNROLL": _divisor(num_groups, chosen["UNROLL"]),
        "USE_ASM": not triton.knobs.runtime.interpret,
        "num_warps": warps,
        "num_stages": 1,
    }


def _name(bits: int, columns: int, num_groups: int) -> str:
    """Under which a linear's choices are kept."""
    return f"int{bits}_{columns}_{num_groups}"


def _divisor(number: int, at_most: int) -> int:
    return max(divisor for divisor in range(1, at_most + 1) if number % divisor == 0)
