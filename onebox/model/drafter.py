"""A block drafter beside a model: the bytes that it will take on a device, and its loading."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from onebox.checkpoint.bind import Bound
from onebox.kernels.common.dispatch import uses_kernels
from onebox.model.dflash import DFlash, build_dflash
from onebox.model.dflash_parts import open_bound_drafter, open_drafter_parts
from onebox.model.dummy import dummy_drafter
from onebox.model.load import LoadFormat
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.dflash import DFlashSpec, refuse_other_target
from onebox.spec.dflash_config import read_drafter_config
from onebox.spec.model import ModelSpec
from onebox.spec.modules import Module
from onebox.spec.weights import WeightFormat

__all__ = ["DrafterFootprint", "attach_drafter", "drafter_footprint", "dummy_drafter_bytes", "load_drafter"]

_DUMMY_BITS = 4.125
"""Of a dummy drafter's weights on a GPU, INT4 with a float16 scale for 128 of them."""


class DrafterFootprint(NamedTuple):
    """A drafter's shape, and the bytes of its weights on the device."""

    spec: DFlashSpec
    num_bytes: int


def drafter_footprint(
    directory: Path, target: ModelSpec, device: torch.device, dtype: torch.dtype, load_format: LoadFormat
) -> DrafterFootprint:
    """Reads headers only. Refuses a drafter of another model, and one with wrong tensors, as loading does."""
    if load_format is LoadFormat.DUMMY:
        spec = read_drafter_config(directory)
        refuse_other_target(spec, target)
        return DrafterFootprint(spec, dummy_drafter_bytes(spec, device))
    checkpoint, binding = open_bound_drafter(directory, target)
    sizes = (_copies(bound.module) * _bytes(bound, device, dtype) for bound in binding.modules.values())
    return DrafterFootprint(checkpoint.spec, sum(sizes))


def load_drafter(
    directory: Path, target: ModelSpec, device: torch.device, dtype: torch.dtype, load_format: LoadFormat
) -> DFlash:
    """The drafter in `directory`, which must have been made for `target`; on `meta` it has no weights."""
    if load_format is LoadFormat.DUMMY:
        spec = read_drafter_config(directory)
        refuse_other_target(spec, target)
        chosen = WeightFormat.INT4 if uses_kernels(device) else WeightFormat.BF16
        return dummy_drafter(spec, chosen, device, dtype)
    spec, parts = open_drafter_parts(directory, target, device, dtype)
    return build_dflash(spec, parts, dtype)


def dummy_drafter_bytes(spec: DFlashSpec, device: torch.device) -> int:
    """Of a drafter with random weights: INT4 on a GPU, float32 on a CPU."""
    return sum(_copies(module) * _dummy_bytes(module, device) for module in spec.modules())


def attach_drafter(model: Qwen35, drafter: DFlash) -> Qwen35:
    """The model with this drafter beside it."""
    return replace(model, drafter=drafter, tap_ids=drafter.spec.target_layer_ids)


def _copies(module: Module) -> int:
    """Keys and values are in two linears: with a block's queries, and with those of all layers, for the context."""
    return 2 if module.name.endswith((".k_proj", ".v_proj")) else 1


def _bytes(bound: Bound, device: torch.device, dtype: torch.dtype) -> int:
    if not bound.module.is_matrix:
        return 4 * bound.module.numel
    if not uses_kernels(device):
        return dtype.itemsize * bound.module.numel
    return sum(entry.nbytes for entry in bound.tensors.values())


def _dummy_bytes(module: Module, device: torch.device) -> int:
    if not module.is_matrix or not uses_kernels(device):
        return 4 * module.numel
    return int(_DUMMY_BITS * module.numel / 8)
