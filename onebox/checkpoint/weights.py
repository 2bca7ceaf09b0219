"""Reads one bound module and dequantises it to float32, from any supported format."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.tensors import load
from onebox.formats import (
    Dialect,
    dequantize,
    dequantize_fp8_block,
    dequantize_fp8_rows,
    dequantize_fp8_tensor,
    dequantize_int8_rows,
    dequantize_nvfp4,
    unpack_gptq,
    unpack_quantized,
)
from onebox.spec.errors import UnsupportedError
from onebox.spec.weights import DTYPE_BITS, FP8_BLOCK, INTEGER_BITS, Layout

__all__ = ["can_slice_rows", "read_weight", "slice_rows", "weight_tensors"]

# Activation scales: unused, because onebox does not quantise activations below 16 bits.
_UNUSED_SUFFIXES = {"input_scale", "input_global_scale"}


def weight_tensors(bound: Bound) -> dict[str, TensorEntry]:
    """The tensors of the module's weight, by suffix, without the input scales that some tools store."""
    return {suffix: entry for suffix, entry in bound.tensors.items() if suffix not in _UNUSED_SUFFIXES}


def read_weight(bound: Bound, *, zeros_offset: int = 1, read: Callable[[TensorEntry], Tensor] = load) -> Tensor:
    """The dequantised weight, float32, in its plain shape; `read` loads its tensors.

    `zeros_offset` is GPTQ's: 1, or 0 for a gptq_v2 checkpoint.
    """
    parts = {suffix: read(entry) for suffix, entry in weight_tensors(bound).items()}
    layout = bound.stored.layout
    if layout is Layout.PLAIN:
        return parts["weight"].to(torch.float32)
    bits, size = INTEGER_BITS.get(bound.stored.format, 0), bound.stored.group_size or None
    if layout is Layout.GPTQ:
        return dequantize(unpack_gptq(**parts, zeros_offset=zeros_offset, bits=bits, group_size=size))
    if layout is Layout.PACKED:
        return dequantize(unpack_quantized(**parts, bits=bits, group_size=size))
    return _READERS[layout](parts)


_READERS: dict[Layout, Callable[[dict[str, Tensor]], Tensor]] = {
    Layout.FP8_BLOCK_INV: lambda p: dequantize_fp8_block(p["weight"], p["weight_scale_inv"]),
    Layout.FP8_BLOCK: lambda p: dequantize_fp8_block(p["weight"], p["weight_scale"]),
    Layout.FP8_ROW: lambda p: dequantize_fp8_rows(p["weight"], p["weight_scale"].reshape(-1, 1)),
    Layout.FP8_TENSOR: lambda p: dequantize_fp8_tensor(p["weight"], p["weight_scale"]),
    Layout.INT8_ROW: lambda p: dequantize_int8_rows(p["weight"], p["weight_scale"].reshape(-1, 1)),
    Layout.NVFP4_DIVIDES: lambda p: dequantize_nvfp4(
        p["weight_packed"], p["weight_scale"], p["weight_global_scale"], Dialect.LLM_COMPRESSOR
    ),
    Layout.NVFP4_MULTIPLIES: lambda p: dequantize_nvfp4(
        p["weight"], p["weight_scale"], p["weight_scale_2"], Dialect.MODELOPT
    ),
}

# Row-major layouts: the number of weight rows per row of each tensor; 0: the tensor applies to all rows.
_ROWS_COVERED = {
    Layout.PLAIN: {"weight": 1},
    Layout.FP8_BLOCK_INV: {"weight": 1, "weight_scale_inv": FP8_BLOCK},
    Layout.FP8_BLOCK: {"weight": 1, "weight_scale": FP8_BLOCK},
    Layout.FP8_ROW: {"weight": 1, "weight_scale": 1},
    Layout.FP8_TENSOR: {"weight": 1, "weight_scale": 0},
    Layout.INT8_ROW: {"weight": 1, "weight_scale": 1},
}


def can_slice_rows(bound: Bound) -> bool:
    """Whether rows of this matrix lie together, so that some of them can be read alone."""
    return bound.stored.layout in _ROWS_COVERED


def slice_rows(bound: Bound, begin: int, end: int) -> Bound:
    """Rows begin..end of a matrix as a separate bound module; `begin` is a multiple of the FP8 block.

    Only for layouts with contiguous rows, which are the ones that may be quantised again.
    """
    covered = _ROWS_COVERED.get(bound.stored.layout)
    if covered is None:
        raise UnsupportedError(f"{bound.module.name} is stored as {bound.stored}, whose rows are not contiguous.")
    tensors = {
        suffix: _rows(bound.tensors[suffix], begin // step, -(-end // step)) if step else bound.tensors[suffix]
        for suffix, step in covered.items()
    }
    shape = (end - begin, *bound.module.shape[1:])
    return replace(bound, module=bound.module._replace(shape=shape), tensors=tensors)


def _rows(entry: TensorEntry, begin: int, end: int) -> TensorEntry:
    inner = entry.shape[1:]
    row_bits = DTYPE_BITS[entry.dtype]
    for size in inner:
        row_bits *= size
    row_bytes = row_bits // 8
    return replace(
        entry,
        name=f"{entry.name}[{begin}:{end}]",
        shape=(end - begin, *inner),
        begin=entry.begin + begin * row_bytes,
        nbytes=(end - begin) * row_bytes,
    )
