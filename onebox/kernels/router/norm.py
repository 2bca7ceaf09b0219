"""The norm before the experts and the router's product of its rows, in one launch, in Triton.

One warp per slice of two groups (256 columns), tile of 8 of the router's rows and block of rows. Each adds up its slice
of a row itself, which takes a few loads in flight at once, so that no launch stands between the sum and the product.
The first tile's programs also write what `add_rms_norm_fused` writes. The router's weights are loaded before the wait.
With many rows adding up a slice in every tile would cost more than a launch: the first tile then has a launch of its
own, and the others read the rows that it wrote. The products are the same instructions on the same numbers.
"""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.fixed_point import store_groups
from onebox.kernels.common.launch import ceil_div
from onebox.kernels.common.rows import FixedRows, new_rows
from onebox.kernels.common.tuning import MODES, Tunable
from onebox.kernels.router.reference import groups_of_slice

__all__ = ["add_rms_norm_router"]

_NORM_ROUTER = Tunable("norm_router", (*MODES, *({"maxnreg": count} for count in (128, 168, 200))))

_TILE = 8
"""The router's rows of a program: 64 weights a lane, all in flight before the wait."""
_ROWS = 4
"""Up to so many rows a program has one; with more it has so many, so that weights are read less often."""
_MAX_JOINT_ROWS = 16
"""With more rows there are two launches."""


@triton.jit
def _add_up(
    row,
    is_there,
    source,  # residual [C] and parts [C] of row 0, strides over parts and rows
    H: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The residual and all parts of a row, added in order."""
    residual_ptr, parts_ptr, part_stride, row_stride = source
    at = parts_ptr + row.to(tl.int64) * row_stride
    total = tl.load(residual_ptr + row.to(tl.int64) * H, mask=is_there, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(at + part * part_stride, mask=is_there, other=0.0)
    return total


@triton.jit(do_not_specialize=["R", "rows_each", "first_tile"])
def add_rms_norm_router_kernel(
    residual_ptr,  # [R, H]
    parts_ptr,  # float32 [PARTS, R, H], strides part_stride and row_stride
    weight_ptr,  # [H]
    router_ptr,  # bfloat16 [N, H]
    x_ptr,  # [R, H]
    planes_ptr,  # int8 [R, 2, H]
    scale_ptr,  # float32 [R, H/128]
    squares_ptr,  # float32 [R, H/128]
    total_ptr,  # float32 [R, H]
    out_ptr,  # float32 [slices, R, N]
    part_stride,
    row_stride,
    R,
    rows_each,
    first_tile,
    N: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,  # of a slice
    IS_NORMED: tl.constexpr,  # whether x is written already: it is read, and nothing but products is computed
    DEPENDENT: tl.constexpr,
):
    """Program (tile, slice, block of `rows_each` rows). A row's instructions do not depend on the number of rows."""
    release(DEPENDENT)
    tile, slice_id = first_tile + tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * rows_each
    end = tl.minimum(row + rows_each, R)
    places = tl.arange(0, GROUPS * 128)
    columns = slice_id * (GROUPS * 128) + places
    outputs = tile * TILE + tl.arange(0, TILE)
    weight = 1 + tl.load(weight_ptr + columns).to(tl.float32)
    at = router_ptr + outputs[:, None] * H + columns[None, :]
    router = tl.load(at, mask=(outputs < N)[:, None], other=0.0).to(tl.float32)
    wait(DEPENDENT)
    source = (residual_ptr + columns, parts_ptr + columns, part_stride, row_stride)
    x_at = x_ptr + columns
    if IS_NORMED:
        total = tl.load(x_at + row.to(tl.int64) * H, mask=row < end, other=0.0).to(tl.float32)
    else:
        total = _add_up(row, row < end, source, H, PARTS)
    while row < end:
        at_row = row.to(tl.int64)
        # The next row's loads are in flight while this row is computed.
        if IS_NORMED:
            next_total = tl.load(x_at + (at_row + 1) * H, mask=row + 1 < end, other=0.0).to(tl.float32)
            x = total
        else:
            next_total = _add_up(row + 1, row + 1 < end, source, H, PARTS)
            values = total * weight
            x = rounded(values, x_ptr.dtype.element_ty).to(tl.float32)
        dots = tl.sum(router * x[None, :], 1)
        tl.store(out_ptr + (slice_id * R + at_row) * N + outputs, dots, mask=outputs < N)
        if not IS_NORMED and tile == 0:
            tl.store(total_ptr + at_row * H + columns, total)
            groups = slice_id * GROUPS + tl.arange(0, GROUPS)
            squares = tl.sum(tl.reshape(total * total, (GROUPS, 128)), 1)
            tl.store(squares_ptr + at_row * (H // 128) + groups, squares)
            store_groups(values, places, at_row, slice_id * GROUPS, x_ptr, planes_ptr, scale_ptr, H)
        total = next_total
        row += 1


def add_rms_norm_router(residual, parts, weight, eps, dtype, router):
    num_parts, num_rows, hidden = parts.shape
    x, planes, scale = new_rows(num_rows, hidden, dtype, parts.device)
    squares, total = torch.empty_like(scale), torch.empty((num_rows, hidden), dtype=torch.float32, device=parts.device)
    num_outputs, groups = len(router), groups_of_slice(hidden)
    slices = hidden // (groups * 128)
    out = torch.empty((slices, num_rows, num_outputs), dtype=torch.float32, device=parts.device)
    tiles, is_joint = ceil_div(num_outputs, _TILE), num_rows <= _MAX_JOINT_ROWS
    # (first tile, tiles, whether x is written already) of each launch.
    launches = [(0, tiles, False)] if is_joint else [(0, 1, False), (1, tiles - 1, True)]
    rows_each = 1 if num_rows <= _ROWS else _ROWS
    for first_tile, count, is_normed in launches if num_rows else []:
        add_rms_norm_router_kernel[(count, slices, ceil_div(num_rows, rows_each))](
            residual,
            parts,
            weight,
            router,
            x,
            planes,
            scale,
            squares,
            total,
            out,
            parts.stride(0),
            parts.stride(1),
            num_rows,
            rows_each,
            first_tile,
            N=num_outputs,
            H=hidden,
            PARTS=num_parts,
            TILE=_TILE,
            GROUPS=groups,
            IS_NORMED=is_normed,
            num_warps=1,
            **launch_options(_NORM_ROUTER, f"{'products' if is_normed else 'rows'}_{hidden}", maxnreg=168),
        )
    return FixedRows(x, planes, scale, squares, eps), total, out
