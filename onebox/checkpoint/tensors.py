"""Conversion between safetensors' and torch's dtypes, and between bytes and tensors."""

from typing import Any

import torch

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import read_tensor
from onebox.spec.errors import UnsupportedError

__all__ = ["dtype_name", "load", "tensor_of", "to_bytes", "torch_dtype"]

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a safetensors dtype name."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise UnsupportedError(f"onebox does not read tensors of dtype {name}.") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype."""
    return _NAMES[dtype]


def tensor_of(buffer: bytearray | memoryview, dtype: str) -> torch.Tensor:
    """A flat tensor that shares the memory of `buffer`."""
    if not len(buffer):
        return torch.empty(0, dtype=torch_dtype(dtype))
    return torch.frombuffer(buffer, dtype=torch_dtype(dtype))


def load(entry: TensorEntry) -> torch.Tensor:
    """A whole tensor, read into its own memory."""
    return tensor_of(read_tensor(entry), entry.dtype).reshape(entry.shape)


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
