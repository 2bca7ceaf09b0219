"""Linears, one class per stored format, each with a decode and a prefill operation; the class is chosen at load.

Owns how stored tensors become the kernels' layouts. Layers never ask which format they have. Matrices that read the
same input are joined into one where they share a format.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.staging import Read
from onebox.checkpoint.weights import weight_tensors
from onebox.formats import GroupInt, int8_rows_to_group_int, unpack_gptq, unpack_quantized
from onebox.formats.fragments import TILE_COLUMNS, TILE_ROWS, rows_of_tiles, tile_index, to_fragments
from onebox.kernels import float_linear, int_linear
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.float_linear import float_parts
from onebox.spec.errors import MismatchError, UnsupportedError
from onebox.spec.weights import FP8_BLOCK, INTEGER_BITS, Layout, WeightFormat

__all__ = [
    "DecodeActivations",
    "FloatLinear",
    "IntLinear",
    "Linear",
    "PartLinear",
    "PlainLinear",
    "RowLinear",
    "can_join",
    "group_int_of",
    "make_linear",
    "nvfp4_tensors",
    "same_kind",
]


@dataclass(frozen=True)
class DecodeActivations:
    """Activations [R, K] of a decode step; their fixed-point form is computed once, for the first linear that reads it.

    A row's bits may differ between a linear's decode and its prefill, but not with the number of rows.
    """

    x: Tensor

    @cached_property
    def fixed_point(self) -> tuple[Tensor, Tensor]:
        return int_linear.fixed_point(self.x)


class Linear(Protocol):
    """y = x W^T: [R, N] from rows [R, K], in the rows' dtype or in `out_dtype`."""

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        """Few rows, where the bytes of the weight count."""

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Many rows of prompts."""


@runtime_checkable
class RowLinear(Protocol):
    """A linear of decode steps whose rows can be copied as they are stored: some rows of a head make another head."""

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        """As a `Linear`."""

    def blank(self, num_rows: int) -> "RowLinear":
        """One of so many rows into which rows of this one can be copied; its numbers are anything."""

    def copy_rows(self, source: "RowLinear", rows: Tensor, places: Tensor) -> None:
        """Copies rows, int64 [n], of the linear that this one is a `blank` of to `places`, int64 [n], of this one."""


@runtime_checkable
class PartLinear(Linear, Protocol):
    """A linear that can leave its last sum to the operation that reads it."""

    def parts(self, rows: FixedRows) -> Tensor:
        """float32 [P, R, N] whose sum over P, in this order, is the linear of a decode step's rows."""

    def rows_of(self, x: Tensor) -> FixedRows:
        """Rows [R, K] in the form that `parts` reads."""


@dataclass(frozen=True)
class IntLinear:
    """INT4 in groups of 128, or INT8 with a scale a row, in fragment order; fewer bits are widened to INT4."""

    bits: int
    tiles: Tensor
    scales: Tensor

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        run = int_linear.int4_linear if self.bits == 4 else int_linear.int8_linear
        return run(*rows.fixed_point, self.tiles, self.scales, out_dtype or rows.x.dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        run = int_linear.int4_matmul if self.bits == 4 else int_linear.int8_matmul
        return run(x, self.tiles, self.scales).to(out_dtype or x.dtype)

    def parts(self, rows: FixedRows) -> Tensor:
        run = int_linear.int4_parts if self.bits == 4 else int_linear.int8_parts
        return run(rows, self.tiles, self.scales)

    def rows_of(self, x: Tensor) -> FixedRows:
        return FixedRows(x, *int_linear.fixed_point(x), None)

    def blank(self, num_rows: int) -> "IntLinear":
        groups, _, width = self.tiles.shape
        tiles = self.tiles.new_zeros(groups, -(-num_rows // TILE_ROWS), width)
        return IntLinear(self.bits, tiles, self.scales.new_empty(*self.scales.shape[:-1], num_rows))

    def copy_rows(self, source: "RowLinear", rows: Tensor, places: Tensor) -> None:
        given = same_kind(self, source)
        rows_of_tiles(self.tiles)[tile_index(places)] = rows_of_tiles(given.tiles)[tile_index(rows)]
        self.scales[..., places] = given.scales[..., rows]


class FloatLinear(ABC):
    """A linear over FP8, NVFP4 or BF16 weights."""

    @property
    @abstractmethod
    def stored(self) -> FloatWeight: ...

    @abstractmethod
    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor: ...

    @abstractmethod
    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor: ...

    def parts(self, rows: FixedRows) -> Tensor:
        return float_parts(rows, self.stored)

    def rows_of(self, x: Tensor) -> FixedRows:
        # The fixed-point form is not read.
        return FixedRows(x, x, x, None)


@dataclass(frozen=True)
class Fp8Linear(FloatLinear):
    """E4M3 in blocks of 128x128 (`is_block`), or with a scale a row or one for all."""

    is_block: bool
    weight: Tensor
    scale: Tensor

    @property
    def stored(self) -> FloatWeight:
        return FloatWeight("block" if self.is_block else "row", self.weight.view(torch.uint8), self.scale)

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        run = float_linear.fp8_block_linear if self.is_block else float_linear.fp8_row_linear
        return run(rows.x, self.weight, self.scale, out_dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        run = float_linear.fp8_block_matmul if self.is_block else float_linear.fp8_row_matmul
        return run(x, self.weight, self.scale, out_dtype)

    def blank(self, num_rows: int) -> "RowLinear":
        weight = self.weight.new_empty(num_rows, self.weight.shape[1])
        if self.is_block:
            return Fp8RowBlockLinear(weight, self.scale.new_empty(num_rows, self.scale.shape[1]))
        return Fp8Linear(False, weight, self.scale.new_empty(num_rows))

    def copy_rows(self, source: "RowLinear", rows: Tensor, places: Tensor) -> None:
        given = same_kind(self, source)
        self.weight.view(torch.uint8)[places] = given.weight.view(torch.uint8)[rows]
        self.scale[places] = given.scale[rows] if given.scale.numel() > 1 else given.scale


@dataclass(frozen=True)
class Fp8RowBlockLinear:
    """Rows of a matrix in blocks of 128x128: E4M3 with a scale [N, ceil(K/128)] for 128 columns of each row."""

    weight: Tensor
    scale: Tensor

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        return float_linear.fp8_row_block_linear(rows.x, self.weight, self.scale, out_dtype)

    def blank(self, num_rows: int) -> "Fp8RowBlockLinear":
        weight = self.weight.new_empty(num_rows, self.weight.shape[1])
        return Fp8RowBlockLinear(weight, self.scale.new_empty(num_rows, self.scale.shape[1]))

    def copy_rows(self, source: "RowLinear", rows: Tensor, places: Tensor) -> None:
        """Of another of its kind, or of the matrix in blocks."""
        if not isinstance(source, Fp8Linear | Fp8RowBlockLinear):
            raise _other_kind(self, source)
        self.weight.view(torch.uint8)[places] = source.weight.view(torch.uint8)[rows]
        in_blocks = isinstance(source, Fp8Linear)
        self.scale[places] = source.scale[rows // FP8_BLOCK if in_blocks else rows]


@dataclass(frozen=True)
class Nvfp4Linear(FloatLinear):
    """E2M1 in groups of 16 under one multiplier."""

    packed: Tensor
    scale: Tensor
    multiplier: Tensor

    @property
    def stored(self) -> FloatWeight:
        return FloatWeight("nvfp4", self.packed, self.scale.view(torch.uint8), self.multiplier)

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        return float_linear.nvfp4_linear(rows.x, self.packed, self.scale, self.multiplier, out_dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return float_linear.nvfp4_matmul(x, self.packed, self.scale, self.multiplier, out_dtype)

    def blank(self, num_rows: int) -> "Nvfp4Linear":
        packed = self.packed.new_empty(num_rows, self.packed.shape[1])
        return Nvfp4Linear(packed, self.scale.new_empty(num_rows, self.scale.shape[1]), self.multiplier)

    def copy_rows(self, source: "RowLinear", rows: Tensor, places: Tensor) -> None:
        given = same_kind(self, source)
        self.packed[places] = given.packed[rows]
        self.scale.view(torch.uint8)[places] = given.scale.view(torch.uint8)[rows]


@dataclass(frozen=True)
class PlainLinear(FloatLinear):
    """BF16 weights."""

    weight: Tensor

    @property
    def stored(self) -> FloatWeight:
        return FloatWeight("bf16", self.weight, None)

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        return float_linear.bf16_linear(rows.x, self.weight, out_dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return float_linear.bf16_matmul(x, self.weight, out_dtype)

    def blank(self, num_rows: int) -> "PlainLinear":
        return PlainLinear(self.weight.new_empty(num_rows, self.weight.shape[1]))

    def copy_rows(self, source: "RowLinear", rows: Tensor, places: Tensor) -> None:
        self.weight[places] = same_kind(self, source).weight[rows]


L = TypeVar("L")


def same_kind(own: L, source: RowLinear) -> L:
    """The linear that rows are taken from."""
    if not isinstance(source, type(own)):
        raise _other_kind(own, source)
    return source


def _other_kind(own: object, source: RowLinear) -> MismatchError:
    return MismatchError(f"Rows of a {type(source).__name__} cannot be copied into a {type(own).__name__}.")


@dataclass(frozen=True)
class JoinedLinear:
    """Matrices of different formats over one input, their outputs side by side."""

    linears: tuple[PartLinear, ...]

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat([linear.decode(rows, out_dtype) for linear in self.linears], dim=-1)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat([linear.prefill(x, out_dtype) for linear in self.linears], dim=-1)

    def parts(self, rows: FixedRows) -> Tensor:
        # The linears differ in their number of parts: only their sums, added in order, fit side by side.
        return torch.cat([reduce(torch.add, linear.parts(rows)) for linear in self.linears], dim=-1).unsqueeze(0)

    def rows_of(self, x: Tensor) -> FixedRows:
        return FixedRows(x, *int_linear.fixed_point(x), None)


def make_linear(bounds: list[Bound], read: Read, zeros_offset: int = 1) -> PartLinear:
    """One linear over the rows of all `bounds`, in their order, whose tensors `read` brings to a CUDA device.

    `zeros_offset` is the checkpoint's GPTQ convention.
    """
    if len({bound.stored for bound in bounds}) > 1:
        return JoinedLinear(tuple(make_linear([bound], read, zeros_offset) for bound in bounds))
    stored = bounds[0].stored
    if stored.layout is Layout.PLAIN:
        return PlainLinear(_join([read(bound.tensors["weight"]).to(torch.bfloat16) for bound in bounds]))
    if stored.format in INTEGER_BITS:
        return _int_linear(group_int_of(bounds, read, zeros_offset))
    if stored.format is WeightFormat.NVFP4:
        parts = tuple(Nvfp4Linear(*nvfp4_tensors(bound, read)) for bound in bounds)
        return parts[0] if len(parts) == 1 else JoinedLinear(parts)
    return _fp8_linear(bounds, read)


def can_join(bounds: Sequence[Bound]) -> bool:
    """Whether the rows of all `bounds` can be one matrix: integers or plain numbers, stored alike."""
    stored = bounds[0].stored
    is_joinable = stored.layout is Layout.PLAIN or stored.format in INTEGER_BITS
    return is_joinable and all(bound.stored == stored for bound in bounds)


def group_int_of(bounds: Sequence[Bound], read: Read, zeros_offset: int) -> GroupInt:
    """The integer matrix of the rows of all `bounds`, which are stored alike.

    Zero points and reordered columns have no kernel and are errors.
    """
    stored, columns = bounds[0].stored, bounds[0].module.shape[1]
    bits, size = INTEGER_BITS[stored.format], stored.group_size or None
    parts = _read_joined(bounds, read)
    if stored.layout is Layout.GPTQ:
        matrix = unpack_gptq(**parts, zeros_offset=zeros_offset, bits=bits, group_size=size)
    elif stored.layout is Layout.PACKED:
        matrix = unpack_quantized(**parts, bits=bits, group_size=size)
    else:
        matrix = int8_rows_to_group_int(parts["weight"], parts["weight_scale"])
    fits = matrix.group_size == (columns if bits == 8 else TILE_COLUMNS) and columns % TILE_COLUMNS == 0
    if matrix.zeros is not None or matrix.group_index is not None or not fits:
        raise _no_kernel(bounds[0])
    return matrix


# Along which dimension the rows of two matrices are joined, by the suffix of their tensors.
_ROW_DIMENSION = {"qweight": 1, "qzeros": 1, "scales": 1}


def _read_joined(bounds: Sequence[Bound], read: Read) -> dict[str, Tensor]:
    """The tensors of one integer matrix that has the rows of all `bounds`."""
    joined, suffixes = {}, set(weight_tensors(bounds[0]))
    for bound in bounds:
        if set(weight_tensors(bound)) != suffixes:
            raise MismatchError(
                f"{bound.module.name} has other tensors than {bounds[0].module.name}, with which it is joined: "
                "one tool writes them alike; download the checkpoint again."
            )
    for suffix in suffixes:
        tensors = [read(bound.tensors[suffix]) for bound in bounds]
        if suffix == "weight_shape":
            joined[suffix] = _joined_shape(bounds, tensors)
        elif suffix in ("g_idx", "weight_g_idx"):
            # Indices that differ are not all in order, and reordered columns have no kernel.
            if any(not torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
                raise _no_kernel(bounds[0])
            joined[suffix] = tensors[0]
        else:
            joined[suffix] = _join(tensors, _ROW_DIMENSION.get(suffix, 0))
    return joined


def _joined_shape(bounds: Sequence[Bound], shapes: list[Tensor]) -> Tensor:
    for bound, shape in zip(bounds, shapes, strict=True):
        if tuple(shape.tolist()) != bound.module.shape:
            raise MismatchError(
                f"{bound.module.name}.weight_shape says {shape.tolist()} where the model has "
                f"{list(bound.module.shape)}: download this file again, or check config.json."
            )
    return torch.tensor([sum(bound.module.shape[0] for bound in bounds), bounds[0].module.shape[1]])


def _no_kernel(bound: Bound) -> UnsupportedError:
    return UnsupportedError(
        f"{bound.module.name} is stored as {bound.stored}; kernels take symmetric INT4, INT3 and INT2 in groups of "
        "128 and INT8 with a scale a row, in columns that are a multiple of 128: build from the BF16 checkpoint "
        "instead."
    )


def _join(tensors: list[Tensor], dimension: int = 0) -> Tensor:
    """Tensors concatenated; a single one is not copied, because a copy of the largest would set the peak of memory."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dimension)


def _int_linear(matrix: GroupInt) -> IntLinear:
    # The last tile is padded with rows of zeros; the scales' length is the number of real rows.
    codes = pad(matrix.codes, (0, 0, 0, -len(matrix.codes) % TILE_ROWS))
    by_group = matrix.scales.reshape(-1) if matrix.bits == 8 else matrix.scales.t().contiguous()
    # Codes of 3 and 2 bits are INT4 codes too, with the same scales: the values do not change.
    bits = max(4, matrix.bits)
    return IntLinear(bits, to_fragments(codes, bits), by_group)


def _fp8_linear(bounds: list[Bound], read: Read) -> PartLinear:
    layout = bounds[0].stored.layout
    is_block = layout in (Layout.FP8_BLOCK, Layout.FP8_BLOCK_INV)
    suffix = "weight_scale_inv" if layout is Layout.FP8_BLOCK_INV else "weight_scale"
    ragged = is_block and any(bound.module.shape[0] % 128 for bound in bounds[:-1])
    if len(bounds) > 1 and (ragged or layout is Layout.FP8_TENSOR):
        # A scale of a block or of a tensor does not hold for the rows of the next matrix.
        return JoinedLinear(tuple(_fp8_linear([bound], read) for bound in bounds))
    weight = _join([read(bound.tensors["weight"]).view(torch.uint8) for bound in bounds]).view(torch.float8_e4m3fn)
    scales = [read(bound.tensors[suffix]) for bound in bounds]
    scale = _join(scales) if is_block else _join([part.reshape(-1).to(torch.float32) for part in scales])
    return Fp8Linear(is_block, weight, scale)


def nvfp4_tensors(bound: Bound, read: Read) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [N, K/2], group scales [N, K/16], multiplier [1])."""
    parts = {suffix: read(entry) for suffix, entry in weight_tensors(bound).items()}
    if bound.stored.layout is Layout.NVFP4_DIVIDES:
        return parts["weight_packed"], parts["weight_scale"], parts["weight_global_scale"].reshape(1).reciprocal()
    return parts["weight"], parts["weight_scale"], parts["weight_scale_2"].reshape(1)
