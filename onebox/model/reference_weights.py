"""A checkpoint in any known format as float32 tensors for `reference.py`; quantised weights are dequantised.

Headers are checked before any weight is read. The vision tower is not read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.tensors import load
from onebox.checkpoint.weights import read_weight
from onebox.model.load import open_bound
from onebox.spec.errors import DoesNotFitError
from onebox.spec.hardware import available_memory_bytes
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["ReferenceWeights", "load_weights"]


class ReferenceWeights(NamedTuple):
    """The model's shape and its float32 weights by plain name; the vision tower's tensors are counted, not read."""

    spec: ModelSpec
    weights: Mapping[str, Tensor]
    num_skipped_vision_tensors: int


def load_weights(directory: Path) -> ReferenceWeights:
    """All text and MTP weights of the checkpoint in `directory`."""
    checkpoint, binding = open_bound(directory)
    wanted = [bound for bound in binding.modules.values() if bound.module.module_class is not ModuleClass.VISION]
    _require_memory(sum(4 * bound.module.numel for bound in wanted))
    weights = dict(_read(wanted, checkpoint.gptq_zeros_offset))
    return ReferenceWeights(checkpoint.spec, weights, num_skipped_vision_tensors=len(binding.modules) - len(wanted))


def _read(wanted: list[Bound], zeros_offset: int) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) pairs; experts that are stored fused are read fused, once."""
    fused: set[str] = set()
    for bound in wanted:
        if bound.fused is None:
            yield bound.module.plain_tensor, read_weight(bound, zeros_offset=zeros_offset)
        elif bound.fused.name not in fused:
            fused.add(bound.fused.name)
            yield bound.fused.name, load(bound.fused).to(torch.float32)


def _require_memory(needed_bytes: int) -> None:
    available = available_memory_bytes()
    if needed_bytes > available:
        raise DoesNotFitError(
            f"The weights take {needed_bytes / 1e9:.1f} GB as float32 and {available / 1e9:.1f} GB of memory are free; "
            "serve a smaller model."
        )
