"""The weights of a DFlash drafter in the kernels' layouts, read from its directory: BF16, INT4 or FP8.

A drafter is small, so its tensors are read one after the other without a staging buffer, and one may be read twice.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from onebox.checkpoint.bind import Binding, Bound
from onebox.checkpoint.drafter import DrafterCheckpoint, bind_drafter, open_drafter
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.staging import place_of
from onebox.checkpoint.tensors import load, torch_dtype
from onebox.checkpoint.weights import read_weight
from onebox.kernels.common.dispatch import uses_kernels
from onebox.model.cpu import cpu_linear
from onebox.model.linear import Linear, can_join, make_linear
from onebox.model.load import raise_first
from onebox.spec.dflash import DFlashSpec, refuse_other_target
from onebox.spec.model import ModelSpec

__all__ = ["DrafterParts", "load_reference_drafter", "open_bound_drafter", "open_drafter_parts"]


class DrafterParts:
    """Linears and small tensors of a bound drafter by module name, on `device`; `dtype` is that of activations."""

    def __init__(
        self, checkpoint: DrafterCheckpoint, binding: Binding, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = device
        self._modules = binding.modules
        self._zeros_offset = checkpoint.gptq_zeros_offset
        self._dtype = dtype

    def linear(self, *names: str) -> Linear:
        """One linear over the rows of all named matrices, in this order."""
        bounds = self._bounds(*names)
        if uses_kernels(self.device):
            return make_linear(bounds, self._read, self._zeros_offset)
        return cpu_linear(torch.cat([read_weight(b, zeros_offset=self._zeros_offset) for b in bounds]), self._dtype)

    def can_join(self, *names: str) -> bool:
        """Whether all named matrices are stored alike, so that a linear over them is one matrix."""
        return can_join(self._bounds(*names))

    def small(self, name: str) -> Tensor:
        """A norm's weight, float32; it is the factor itself, not an offset from one."""
        return read_weight(self._modules[name], read=self._read)

    def _bounds(self, *names: str) -> list[Bound]:
        return [self._modules[name] for name in names]

    def _read(self, entry: TensorEntry) -> Tensor:
        place = place_of(entry, self.device)
        if place.type == "meta":
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=place)
        return load(entry).to(place)


def open_bound_drafter(directory: Path, target: ModelSpec) -> tuple[DrafterCheckpoint, Binding]:
    """The drafter in `directory` with its tensors bound to modules; only headers are read.

    Its first fatal problem is raised, and so is the reason if it was made for another model than `target`.
    """
    checkpoint = open_drafter(directory)
    refuse_other_target(checkpoint.spec, target)
    binding = bind_drafter(checkpoint)
    raise_first(directory, [problem.message for problem in binding.problems if problem.is_fatal])
    return checkpoint, binding


def open_drafter_parts(
    directory: Path, target: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[DFlashSpec, DrafterParts]:
    """The shape and the weights of the drafter in `directory`, which must have been made for `target`."""
    checkpoint, binding = open_bound_drafter(directory, target)
    return checkpoint.spec, DrafterParts(checkpoint, binding, device, dtype)


def load_reference_drafter(directory: Path, target: ModelSpec) -> tuple[DFlashSpec, Mapping[str, Tensor]]:
    """The shape and all weights by plain name, float32, for `dflash_reference.py`; quantised ones are dequantised."""
    checkpoint, binding = open_bound_drafter(directory, target)
    offset = checkpoint.gptq_zeros_offset
    weights = {bound.module.plain_tensor: read_weight(bound, zeros_offset=offset) for bound in binding.modules.values()}
    return checkpoint.spec, weights
