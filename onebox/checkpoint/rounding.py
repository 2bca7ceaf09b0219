"""Quantises a matrix, rounding to nearest, for a build: its output tensors and their bytes, slab by slab.

Handles one module at a time and, for NVFP4, the modules that other tools fuse it with; no files or shards.
"""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.recipe import Action, ModuleChoice
from onebox.checkpoint.tensors import to_bytes
from onebox.checkpoint.weights import read_weight, slice_rows
from onebox.formats import Dialect, nvfp4_global_scale, pack_quantized, quantize, quantize_fp8_block, quantize_nvfp4
from onebox.spec.weights import FP8_BLOCK, INTEGER_BITS, Stored, WeightFormat

__all__ = ["SharedScale", "TensorChunk", "round_matrix", "round_slab", "shared_scales", "slabs"]

# Scales of what onebox quantises. Other tools cast scales to the model's dtype, bfloat16, so bfloat16 scales make all
# tools dequantise to the same bits; codes are rounded against the stored scale, so no accuracy is lost by it.
_SCALE_DTYPE = torch.bfloat16
_SLAB_BYTES = 16 << 20
# Projections that other engines fuse into one matrix product with one global scale.
_FUSED = re.compile(r"\.(?:(?P<attention>[qkv]_proj)|(?P<delta>in_proj_(?:qkv|z))|(?P<swiglu>(?:gate|up)_proj))$")

TensorChunk = tuple[int, memoryview]
"""(index of a tensor of the module, its next bytes)."""


@dataclass
class SharedScale:
    """NVFP4's global scale of matrices that other tools fuse, from their largest weight; computed on first use."""

    members: list[Bound] = field(default_factory=list)
    _value: Tensor | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def value(self) -> Tensor:
        """float32 [1]. Locked, because shards are written in parallel and two members may need it at once."""
        with self._lock:
            if self._value is None:
                # Non-finite weights are skipped here: quantising them raises an error with the name of their module.
                sizes = [
                    read_weight(slab).abs_().nan_to_num_(0.0, 0.0, 0.0).max()
                    for bound in self.members
                    for slab in slabs(bound)
                ]
                self._value = nvfp4_global_scale(torch.stack(sizes), Dialect.LLM_COMPRESSOR)
            return self._value


def shared_scales(choices: list[ModuleChoice]) -> dict[str, SharedScale]:
    """The global scale of each module that will be quantised to NVFP4, by module name."""
    groups: dict[str, SharedScale] = {}
    of_module: dict[str, SharedScale] = {}
    for choice in choices:
        if choice.action is Action.QUANTIZE and choice.target.format is WeightFormat.NVFP4:
            shared = groups.setdefault(_fused_name(choice.module.name), SharedScale())
            shared.members.append(choice.bound)
            of_module[choice.module.name] = shared
    return of_module


def _fused_name(name: str) -> str:
    """A name that is equal for all projections that are fused with each other."""
    return _FUSED.sub(lambda found: f".{found.lastgroup}", name)


def round_matrix(choice: ModuleChoice, shared: SharedScale | None) -> Iterator[TensorChunk]:
    """The bytes of `rounded_tensors`: codes and scales slab by slab, then the global scale or the shape."""
    scale = shared.value() if shared else None
    for slab in slabs(choice.bound):
        codes, scales = round_slab(read_weight(slab), choice.target, scale)
        yield 0, to_bytes(codes)
        yield 1, to_bytes(scales)
    if scale is not None:
        yield 2, to_bytes(scale)
    elif choice.target.format is not WeightFormat.FP8:
        yield 2, to_bytes(torch.tensor(choice.module.shape, dtype=torch.int64))


def slabs(bound: Bound) -> list[Bound]:
    """The matrix in slabs of rows, which are independent (for FP8, in blocks), to bound memory."""
    rows, columns = bound.module.shape
    step = max(FP8_BLOCK, _SLAB_BYTES // (4 * columns) // FP8_BLOCK * FP8_BLOCK)
    return [slice_rows(bound, begin, min(rows, begin + step)) for begin in range(0, rows, step)]


def round_slab(weight: Tensor, target: Stored, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 rows; NVFP4 needs a global scale."""
    if target.format is WeightFormat.FP8:
        return quantize_fp8_block(weight, FP8_BLOCK, _SCALE_DTYPE)
    if target.format is WeightFormat.NVFP4:
        packed, scale, _ = quantize_nvfp4(weight, Dialect.LLM_COMPRESSOR, global_scale)
        return packed, scale
    bits = INTEGER_BITS[target.format]
    tensors = pack_quantized(quantize(weight, bits, target.group_size or None, _SCALE_DTYPE))
    return tensors["weight_packed"], tensors["weight_scale"]
