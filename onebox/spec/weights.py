"""The weight formats and how each splits a matrix [out, in] over named tensors: dtypes, shapes, exact bytes.

A *format* is the number type (INT4 in groups, FP8 in blocks); a *layout* is the set of tensors that stores it in one
tool's checkpoints. Two layouts of one format dequantise to the same values. The bit layout inside a tensor is defined
in `onebox.formats`. Stdlib only, so that a checkpoint can be inspected without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "DTYPE_BITS",
    "FP8_BLOCK",
    "INTEGER_BITS",
    "NVFP4_GROUP",
    "PARTS",
    "ExpertFormats",
    "Geometry",
    "Layout",
    "Part",
    "Stored",
    "StoredTensor",
    "WeightFormat",
    "identify",
    "plain_layout",
    "tensor_bytes",
]

FP8_BLOCK = 128
NVFP4_GROUP = 16

# Bits per element by safetensors dtype name. A tensor of a sub-byte dtype must fill whole bytes.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class WeightFormat(StrEnum):
    """The number type of a weight, independent of the tool that packed it."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"
    NVFP4 = "nvfp4"


INTEGER_BITS: Mapping[WeightFormat, int] = {
    WeightFormat.INT8: 8,
    WeightFormat.INT4: 4,
    WeightFormat.INT3: 3,
    WeightFormat.INT2: 2,
}
"""Bits of a code, by integer format; widest first."""


class ExpertFormats(NamedTuple):
    """The formats of a class of routed experts whose down projections have one of their own."""

    gate_up: WeightFormat
    down: WeightFormat


class Layout(StrEnum):
    """The tensors that store a weight, and their arrangement."""

    PLAIN = "plain"
    FP8_BLOCK_INV = "fp8-block (weight_scale_inv)"
    FP8_BLOCK = "fp8-block"
    FP8_ROW = "fp8-row"
    FP8_TENSOR = "fp8-tensor"
    INT8_ROW = "int8-row"
    GPTQ = "gptq"
    PACKED = "pack-quantized"
    NVFP4_DIVIDES = "nvfp4 (compressed-tensors)"
    NVFP4_MULTIPLIES = "nvfp4 (modelopt)"


@dataclass(frozen=True)
class Geometry:
    """The sizes that determine a layout's shapes. `groups` is the number of scales along a row."""

    rows: int
    columns: int
    groups: int
    bits: int


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Part:
    """One tensor of a layout: the suffix of its name, its allowed dtypes, its allowed shapes."""

    suffix: str
    dtypes: tuple[str, ...]
    shapes: Callable[[Geometry], Shapes]
    required: bool = True


class StoredTensor(NamedTuple):
    """A tensor as declared in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """How one weight is stored. `group_size` is the columns per scale; 0: one scale per row or per block."""

    format: WeightFormat
    layout: Layout
    group_size: int = 0
    has_zero_points: bool = False

    def __str__(self) -> str:
        if self.layout is Layout.PLAIN:
            return self.format.value
        group = f" g{self.group_size}" if self.group_size else " row" if self.layout is Layout.PACKED else ""
        asymmetric = " asym" if self.has_zero_points else ""
        return f"{self.format.value}{group}{asymmetric} [{self.layout.value}]"


PLAIN_FORMATS = {"BF16": WeightFormat.BF16, "F16": WeightFormat.FP16, "F32": WeightFormat.FP32}
_SCALES = ("BF16", "F16", "F32")


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


def _matrix(g: Geometry) -> Shapes:
    return ((g.rows, g.columns),)


def _blocks(g: Geometry) -> Shapes:
    return ((_ceil(g.rows, FP8_BLOCK), _ceil(g.columns, FP8_BLOCK)),)


def _scalar(_: Geometry) -> Shapes:
    return ((1,), ())


def _per_row(g: Geometry) -> Shapes:
    return ((g.rows, 1), (g.rows,))


_FP8 = Part("weight", ("F8_E4M3",), _matrix)
_INPUT_SCALE = Part("input_scale", ("F32", "BF16"), _scalar, required=False)

PARTS: Mapping[Layout, tuple[Part, ...]] = {
    Layout.PLAIN: (Part("weight", tuple(PLAIN_FORMATS), _matrix),),
    Layout.FP8_BLOCK_INV: (_FP8, Part("weight_scale_inv", _SCALES, _blocks), _INPUT_SCALE),
    Layout.FP8_BLOCK: (_FP8, Part("weight_scale", _SCALES, _blocks), _INPUT_SCALE),
    Layout.FP8_ROW: (_FP8, Part("weight_scale", _SCALES, _per_row), _INPUT_SCALE),
    Layout.FP8_TENSOR: (_FP8, Part("weight_scale", _SCALES, _scalar), _INPUT_SCALE),
    Layout.INT8_ROW: (Part("weight", ("I8",), _matrix), Part("weight_scale", _SCALES, _per_row), _INPUT_SCALE),
    Layout.GPTQ: (
        Part("qweight", ("I32",), lambda g: ((g.columns * g.bits // 32, g.rows),)),
        Part("qzeros", ("I32",), lambda g: ((g.groups, g.rows * g.bits // 32),)),
        Part("scales", ("F16", "BF16", "F32"), lambda g: ((g.groups, g.rows),)),
        Part("g_idx", ("I32",), lambda g: ((g.columns,),), required=False),
    ),
    Layout.PACKED: (
        Part("weight_packed", ("I32",), lambda g: ((g.rows, _ceil(g.columns * g.bits, 32)),)),
        Part("weight_scale", _SCALES, lambda g: ((g.rows, g.groups),)),
        Part("weight_shape", ("I64", "I32"), lambda _: ((2,),)),
        Part("weight_zero_point", ("I32",), lambda g: ((_ceil(g.rows * g.bits, 32), g.groups),), required=False),
        Part("weight_g_idx", ("I32",), lambda g: ((g.columns,),), required=False),
    ),
    Layout.NVFP4_DIVIDES: (
        Part("weight_packed", ("U8",), lambda g: ((g.rows, g.columns // 2),)),
        Part("weight_scale", ("F8_E4M3",), lambda g: ((g.rows, g.columns // NVFP4_GROUP),)),
        Part("weight_global_scale", ("F32",), _scalar),
        Part("input_global_scale", ("F32",), _scalar, required=False),
    ),
    Layout.NVFP4_MULTIPLIES: (
        Part("weight", ("U8",), lambda g: ((g.rows, g.columns // 2),)),
        Part("weight_scale", ("F8_E4M3",), lambda g: ((g.rows, g.columns // NVFP4_GROUP),)),
        Part("weight_scale_2", ("F32",), lambda _: ((), (1,))),
        _INPUT_SCALE,
    ),
}


def tensor_bytes(tensor: StoredTensor) -> int:
    """Exact bytes of a tensor's data."""
    count = 1
    for size in tensor.shape:
        count *= size
    return count * DTYPE_BITS[tensor.dtype] // 8


def plain_layout(tensor: StoredTensor) -> Stored | None:
    """The format of an unquantised weight; None if the dtype is not BF16, F16 or F32."""
    plain = PLAIN_FORMATS.get(tensor.dtype)
    return Stored(plain, Layout.PLAIN) if plain else None


def identify(found: Mapping[str, StoredTensor], rows: int, columns: int) -> tuple[Stored | None, list[str]]:
    """The format and layout of the matrix [rows, columns], given its tensors by suffix, and their problems.

    Uses only the headers, never the config, because the headers describe the actual content of a file. Each problem is
    a clause that continues the module's name: "`.scales` is missing".
    """
    guess = _guess(found, rows, columns)
    if guess is None:
        return None, [_unknown(found)]
    stored, geometry = guess
    width = _unread_width(stored.layout, found, columns)
    if width:
        return stored, [width]
    parts = PARTS[stored.layout]
    problems = [text for part in parts for text in _check(part, found.get(part.suffix), geometry)]
    known = {part.suffix for part in parts}
    problems += [
        f".{suffix} is unexpected beside {stored.layout.value} tensors" for suffix in found if suffix not in known
    ]
    return stored, problems


def _guess(found: Mapping[str, StoredTensor], rows: int, columns: int) -> tuple[Stored, Geometry] | None:
    if "qweight" in found:
        return _guess_grouped(Layout.GPTQ, found, rows, columns)
    if "weight_packed" in found:
        if found["weight_packed"].dtype == "U8":
            return _fixed(WeightFormat.NVFP4, Layout.NVFP4_DIVIDES, rows, columns, NVFP4_GROUP)
        return _guess_grouped(Layout.PACKED, found, rows, columns)
    weight = found.get("weight")
    if weight is None:
        return None
    if weight.dtype == "U8":
        return _fixed(WeightFormat.NVFP4, Layout.NVFP4_MULTIPLIES, rows, columns, NVFP4_GROUP)
    if weight.dtype == "I8":
        return _fixed(WeightFormat.INT8, Layout.INT8_ROW, rows, columns)
    if weight.dtype == "F8_E4M3":
        return _fixed(WeightFormat.FP8, _fp8_layout(found, rows), rows, columns)
    plain = plain_layout(weight)
    return (plain, Geometry(rows, columns, 1, 16)) if plain else None


def _fixed(fmt: WeightFormat, layout: Layout, rows: int, columns: int, group: int = 0) -> tuple[Stored, Geometry]:
    bits = 4 if fmt is WeightFormat.NVFP4 else 8
    return Stored(fmt, layout, group), Geometry(rows, columns, columns // group if group else 1, bits)


def _fp8_layout(found: Mapping[str, StoredTensor], rows: int) -> Layout:
    scale = found.get("weight_scale")
    if "weight_scale_inv" in found or scale is None:
        return Layout.FP8_BLOCK_INV
    if scale.shape in ((), (1,)):
        return Layout.FP8_TENSOR
    return Layout.FP8_ROW if scale.shape in ((rows, 1), (rows,)) and rows > 1 else Layout.FP8_BLOCK


def _guess_grouped(
    layout: Layout, found: Mapping[str, StoredTensor], rows: int, columns: int
) -> tuple[Stored, Geometry]:
    """Integers in groups: the packed width gives the bits, the scales' width gives the group size."""
    is_gptq = layout is Layout.GPTQ
    scales = found.get("scales" if is_gptq else "weight_scale")
    words = _words_per_row(layout, found)
    fmt, bits = _integer_format(words, columns)
    shape = scales.shape if scales and len(scales.shape) == 2 else (1, 1)
    groups = max(1, shape[0] if is_gptq else shape[1])
    size = _ceil(columns, groups)
    if bits == 8 and groups == 1:
        return Stored(WeightFormat.INT8, layout, 0, "weight_zero_point" in found), Geometry(rows, columns, 1, bits)
    # A group size need not divide the row; one that implies a different number of groups is a wrong shape.
    groups = _ceil(columns, size)
    return Stored(fmt, layout, size, "weight_zero_point" in found), Geometry(rows, columns, groups, bits)


def _words_per_row(layout: Layout, found: Mapping[str, StoredTensor]) -> int:
    is_gptq = layout is Layout.GPTQ
    packed = found["qweight" if is_gptq else "weight_packed"].shape
    return packed[0 if is_gptq else -1] if packed else 0


def _unread_width(layout: Layout, found: Mapping[str, StoredTensor], columns: int) -> str | None:
    """A clause on codes that fill their words in a way that is known and not read; None for all others."""
    if layout not in (Layout.GPTQ, Layout.PACKED):
        return None
    suffix, words = "qweight" if layout is Layout.GPTQ else "weight_packed", _words_per_row(layout, found)
    widths = {_ceil(columns * bits, 32): bits for bits in (1, 5, 6, 7)}
    if words in {_ceil(columns * bits, 32) for bits in INTEGER_BITS.values()}:
        return None
    if words == _ceil(columns, 10) and layout is Layout.PACKED:
        return (
            f".{suffix} holds 10 codes of 3 bits in each word, as compressed-tensors before 0.17 packed them; onebox "
            "and later versions read 32 codes in three words: quantise it again with a later version"
        )
    if words in widths:
        return f".{suffix} holds {widths[words]}-bit codes; onebox reads integers of 2, 3, 4 and 8 bits"
    return None


def _integer_format(words: int, columns: int) -> tuple[WeightFormat, int]:
    """The format whose codes fill `words` 32-bit words a row, and its bits; INT4 if none does, as a wrong shape.

    Rows of 32 columns and more are never ambiguous.
    """
    for fmt, bits in INTEGER_BITS.items():
        if words == _ceil(columns * bits, 32):
            return fmt, bits
    return WeightFormat.INT4, 4


def _check(part: Part, tensor: StoredTensor | None, geometry: Geometry) -> list[str]:
    if tensor is None:
        return [f".{part.suffix} is missing"] if part.required else []
    problems = []
    if tensor.dtype not in part.dtypes:
        problems.append(f".{part.suffix} has dtype {tensor.dtype} where {' or '.join(part.dtypes)} is expected")
    shapes = part.shapes(geometry)
    if tensor.shape not in shapes:
        problems.append(f".{part.suffix} has shape {list(tensor.shape)} where {list(shapes[0])} is expected")
    return problems


def _unknown(found: Mapping[str, StoredTensor]) -> str:
    held = ", ".join(f".{suffix} {tensor.dtype}" for suffix, tensor in sorted(found.items()))
    return f" is stored as {held}, which is not a format that onebox supports" if held else ".weight is missing"
