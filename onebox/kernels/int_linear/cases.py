"""Inputs of the integer linears: one row to the most, a padded last tile, groups of zeros, published projections."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.formats.fragments import TILE_ROWS, to_fragments
from onebox.formats.head_planes import split_planes
from onebox.kernels.common.case import Case, generator
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.int_linear.reference import fixed_point

__all__ = ["CASES", "activations", "fixed_rows", "matrix"]

_Shape = tuple[int, int]  # columns and depth of a weight


def activations(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns]: groups of very different size, one of them all zeros, one outlier."""
    draw = partial(torch.randn, generator=generator(rows * columns))
    x = draw(rows, columns // 128, 128) * torch.exp(2 * draw(rows, columns // 128, 1))
    if rows:
        x[rows // 2, -1] = 0
        x[0, 0, 5] = 300.0
    return x.reshape(rows, columns).to(dtype)


def matrix(num_columns: int, depth: int, bits: int, scale_dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """(tiles, scales) of a random matrix [num_columns, depth]; the last tile is padded with codes that do not count."""
    source = generator(num_columns + depth + bits)
    limit = 2 ** (bits - 1)
    padded = -(-num_columns // TILE_ROWS) * TILE_ROWS
    codes = torch.randint(-limit, limit, (padded, depth), generator=source, dtype=torch.int8)
    shape = (depth // 128, num_columns) if bits == 4 else (num_columns,)
    scales = (0.5 + torch.rand(shape, generator=source)) / (limit * depth**0.5)
    tiles = split_planes(codes << 2)[0] if bits == 6 else to_fragments(codes, bits)
    return tiles, scales.to(scale_dtype)


def _fixed_point(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": activations(rows, columns, dtype).to(device)}


def _linear(
    device: torch.device, rows: int, shape: _Shape, bits: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> dict[str, Any]:
    planes, scale = fixed_point(activations(rows, shape[1], torch.float32))
    weight, weight_scale = matrix(*shape, bits, scale_dtype)
    tensors = {"planes": planes, "scale": scale, "weight": weight, "weight_scale": weight_scale}
    return {**{name: tensor.to(device) for name, tensor in tensors.items()}, "dtype": dtype}


def fixed_rows(rows: int, columns: int, dtype: torch.dtype, *, is_normed: bool = True) -> FixedRows:
    """Rows with a pending norm division and their sums of squares, or rows without."""
    x = activations(rows, columns, dtype)
    squares = x.to(torch.float32).square().reshape(rows, columns // 128, 128).sum(-1) if is_normed else None
    return FixedRows(x, *fixed_point(x), squares, 1e-6)


def _parts(
    device: torch.device, rows: int, shape: _Shape, bits: int, dtype: torch.dtype, is_normed: bool
) -> dict[str, Any]:
    weight, weight_scale = matrix(*shape, bits)
    given = fixed_rows(rows, shape[1], dtype, is_normed=is_normed)
    return {"rows": given.to(device), "weight": weight.to(device), "weight_scale": weight_scale.to(device)}


def _matmul(
    device: torch.device, rows: int, shape: _Shape, bits: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> dict[str, Any]:
    weight, weight_scale = matrix(*shape, bits, scale_dtype)
    tensors = {"x": activations(rows, shape[1], dtype), "weight": weight, "weight_scale": weight_scale}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _fixed_point_case(rows: int, columns: int, dtype: torch.dtype, is_full: bool = False) -> Case:
    make = partial(_fixed_point, rows=rows, columns=columns, dtype=dtype)
    return Case("fixed_point", f"{rows}x{columns}-{dtype}", make, is_full)


def _case(
    op: str,
    rows: int,
    shape: _Shape,
    dtype: torch.dtype,
    scale_dtype: torch.dtype = torch.float16,
    is_full: bool = False,
) -> Case:
    inputs = _linear if op.endswith("linear") else _matmul
    make = partial(inputs, rows=rows, shape=shape, bits=int(op[3]), scale_dtype=scale_dtype, dtype=dtype)
    return Case(op, f"{rows}x{shape[0]}x{shape[1]}-{dtype}-{scale_dtype}", make, is_full)


def _parts_case(op: str, rows: int, shape: _Shape, *, is_normed: bool = True, is_full: bool = False) -> Case:
    make = partial(_parts, rows=rows, shape=shape, bits=int(op[3]), dtype=torch.float32, is_normed=is_normed)
    return Case(op, f"{rows}x{shape[0]}x{shape[1]}-{'normed' if is_normed else 'plain'}", make, is_full)


FLOAT, BRAIN = torch.float32, torch.bfloat16

CASES = [
    _fixed_point_case(1, 128, BRAIN),
    _fixed_point_case(3, 640, FLOAT),
    _fixed_point_case(0, 256, FLOAT),
    _fixed_point_case(1, 3072, BRAIN, is_full=True),
    _fixed_point_case(64, 8192, FLOAT, is_full=True),
    _case("int4_linear", 1, (32, 128), FLOAT),
    _case("int4_linear", 5, (40, 384), BRAIN, BRAIN),
    _case("int4_linear", 17, (16, 640), FLOAT),
    _case("int4_linear", 33, (72, 256), FLOAT),
    _case("int4_linear", 0, (16, 128), FLOAT),
    _case("int6_linear", 3, (40, 256), FLOAT),
    _case("int6_linear", 20, (17, 128), FLOAT, FLOAT),
    _case("int8_linear", 1, (17, 256), FLOAT, FLOAT),
    _case("int8_linear", 9, (80, 128), BRAIN, BRAIN),
    _case("int8_linear", 64, (48, 256), FLOAT),
    _parts_case("int4_parts", 1, (40, 1024)),
    _parts_case("int4_parts", 3, (32, 640), is_normed=False),
    _parts_case("int4_parts", 9, (16, 384)),
    _parts_case("int4_parts", 70, (72, 256)),
    _parts_case("int8_parts", 128, (17, 128)),
    _parts_case("int8_parts", 2, (17, 256)),
    _parts_case("int8_parts", 0, (16, 128), is_normed=False),
    _case("int4_matmul", 1, (32, 128), BRAIN),
    _case("int4_matmul", 65, (144, 256), BRAIN, BRAIN),
    _case("int4_matmul", 3, (24, 384), FLOAT),
    _case("int4_matmul", 0, (16, 128), BRAIN),
    _case("int8_matmul", 66, (130, 256), BRAIN, FLOAT),
    _case("int8_matmul", 2, (16, 128), FLOAT, BRAIN),
    # DeltaNet in, attention in, either out, the shared expert; then the 35B model's.
    *(_case("int4_linear", rows, (20480, 3072), BRAIN, is_full=True) for rows in (1, 8, 16, 32, 64, 128)),
    _case("int4_linear", 3, (17408, 3072), FLOAT, is_full=True),
    _case("int4_linear", 1, (3072, 8192), FLOAT, is_full=True),
    _case("int4_linear", 8, (2048, 4096), FLOAT, BRAIN, is_full=True),
    *(_case("int8_linear", rows, (2048, 3072), BRAIN, BRAIN, is_full=True) for rows in (1, 8, 64)),
    _case("int8_linear", 3, (3072, 1024), FLOAT, is_full=True),
    *(_case("int6_linear", rows, (20_480, 3072), FLOAT, BRAIN, is_full=True) for rows in (3, 32)),
    *(_parts_case("int4_parts", rows, (20608, 3072), is_full=True) for rows in (1, 3, 12, 24, 96)),
    _parts_case("int4_parts", 3, (3072, 8192), is_normed=False, is_full=True),
    _parts_case("int8_parts", 3, (2048, 3072), is_full=True),
    _case("int4_matmul", 1024, (12288, 3072), BRAIN, is_full=True),
    _case("int4_matmul", 130, (3072, 8192), BRAIN, is_full=True),
    _case("int4_matmul", 512, (12288, 2048), BRAIN, BRAIN, is_full=True),
    _case("int8_matmul", 1000, (2048, 3072), BRAIN, is_full=True),
]
