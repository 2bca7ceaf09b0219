"""Fixed point and the integer linears of a decode step, in Triton; products are in `groups.py` and `many.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import LARGEST, SMALLEST_ABSMAX, store_planes
from onebox.kernels.common.launch import ceil_div, divisor, next_power_of_2
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.common.tuning import WEIGHT_LOADS, Tunable
from onebox.kernels.int_linear.groups import sum_groups
from onebox.kernels.int_linear.many import launch_many
from onebox.kernels.int_linear.reference import num_parts
from onebox.spec.errors import MismatchError

__all__ = [
    "fixed_point",
    "int4_linear",
    "int4_parts",
    "int6_linear",
    "int8_linear",
    "int8_parts",
]

_LINEARS = {bits: Tunable(f"int{bits}", WEIGHT_LOADS) for bits in (4, 6, 8)}
_FIXED_POINT, _SUM = Tunable("fixed_point"), Tunable("linear_sum")

_MAX_ROWS = 128
_FEW_ROWS = 16
"""Up to so many rows the weights' bytes decide, and one warp computes one tile."""


@triton.jit
def fixed_point_split_kernel(
    x_ptr,  # [R, K]
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    K: tl.constexpr,
    GROUPS: tl.constexpr,
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
    quotients = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    store_planes(quotients, planes_ptr, row, columns, K, inside)
    tl.store(scale_ptr + row * (K // 128) + groups, scale, mask=groups * 128 < K)


@triton.jit(do_not_specialize=["R", "num_tiles"])
def linear_part_kernel(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    weight_ptr,  # uint8 [K/128, tiles, 256 * BITS]
    weight_scale_ptr,  # [K/128, N] or [N]
    squares_ptr,  # float32 [R, K/128], or None for rows without a pending norm division
    out_ptr,  # [PARTS, R, N]: float32 parts, or the result if there is one part
    R,
    N,
    num_tiles,
    eps,
    K: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GROUPS: tl.constexpr = K // 128 // PARTS
    release(DEPENDENT)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    total = sum_groups(
        planes_ptr,
        scale_ptr,
        weight_ptr,
        weight_scale_ptr,
        squares_ptr,
        R,
        N,
        num_tiles,
        tile,
        part * GROUPS,
        eps,
        K,
        BITS,
        GROUPS,
        COLUMNS,
        UNROLL,
        GROUPS_BLOCK,
        PREFETCH,
        DEPENDENT,
    )
    columns = tile * 16 + tl.arange(0, 16)
    rows = tl.arange(0, COLUMNS // 2)
    at = out_ptr + (part * R + rows).to(tl.int64)[None, :] * N + columns[:, None]
    inside = (rows < R)[None, :] & (columns < N)[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def linear_sum_kernel(
    parts_ptr,  # float32 [PARTS, R, N]
    out_ptr,  # [R, N]
    R,
    N,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + (part * R + row).to(tl.int64) * N + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def fixed_point(x):
    x = x.contiguous()
    rows, columns = x.shape
    num_groups = columns // TILE_COLUMNS
    planes = torch.empty((rows, 2, columns), dtype=torch.int8, device=x.device)
    scale = torch.empty((rows, num_groups), dtype=torch.float32, device=x.device)
    groups = 4
    fixed_point_split_kernel[(ceil_div(num_groups, groups), rows)](
        x,
        planes,
        scale,
        K=columns,
        GROUPS=groups,
        num_warps=groups,
        **launch_options(_FIXED_POINT, num_groups),
    )
    return planes, scale


def int4_linear(planes, scale, weight, weight_scale, dtype=torch.float32):
    return _linear(planes, scale, weight, weight_scale, dtype, 4)


def int6_linear(planes, scale, weight, weight_scale, dtype=torch.float32):
    return _linear(planes, scale, weight, weight_scale, dtype, 6)


def int8_linear(planes, scale, weight, weight_scale, dtype=torch.float32):
    return _linear(planes, scale, weight, weight_scale, dtype, 8)


def int4_parts(rows, weight, weight_scale):
    return _parts(rows, weight, weight_scale, 4)


def int8_parts(rows, weight, weight_scale):
    return _parts(rows, weight, weight_scale, 8)


def _linear(
    planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, bits: int
) -> Tensor:
    """[R, N] of `dtype`."""
    is_whole = num_parts(weight) == 1
    rows = FixedRows(planes, planes, scale, None)
    parts = _parts(rows, weight, weight_scale, bits, dtype if is_whole else torch.float32)
    if is_whole:
        return parts[0]
    count, num_rows, num_columns = parts.shape
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=planes.device)
    block = 512
    linear_sum_kernel[(ceil_div(num_columns, block), num_rows)](
        parts,
        out,
        num_rows,
        num_columns,
        PARTS=count,
        BLOCK=block,
        num_warps=4,
        **launch_options(_SUM, num_columns),
    )
    return out


def _parts(
    rows: FixedRows, weight: Tensor, weight_scale: Tensor, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[parts, R, N] of `dtype`; the split of K depends on the weight alone, never on the rows."""
    num_rows, num_columns = len(rows.planes), weight_scale.shape[-1]
    num_groups, num_tiles = weight.shape[:2]
    count = num_parts(weight)
    parts = torch.empty((count, num_rows, num_columns), dtype=dtype, device=weight.device)
    if num_rows > _MAX_ROWS:
        raise MismatchError(f"A decode step has at most {_MAX_ROWS} rows, not {num_rows}: use the matmul for more.")
    if num_rows > _FEW_ROWS:
        launch_many(rows, weight, weight_scale, bits, parts)
        return parts
    columns = max(8, next_power_of_2(2 * num_rows))  # of the MMA: two planes per row
    linear_part_kernel[(num_tiles, count)](
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
        PARTS=count,
        GROUPS_BLOCK=next_power_of_2(num_groups),
        COLUMNS=columns,
        num_warps=1,
        num_stages=1,
        **_options(weight, bits, columns, num_groups // count),
    )
    return parts


def _options(weight: Tensor, bits: int, columns: int, groups: int) -> dict[str, int | bool]:
    """Launch options of a decode program that adds `groups` groups."""
    # With more registers the compiler would delay the loads until their values are used.
    default = {"UNROLL": 4 if columns < 32 else 2, "PREFETCH": 1, "maxnreg": 128 if columns < 32 else 168}
    options = launch_options(_LINEARS[bits], f"{columns}_{len(weight)}", **default)
    return {**options, "UNROLL": divisor(groups, options["UNROLL"])}
