"""Strict loading of a checkpoint directory, in any format onebox knows, into float32 tensors for `reference.py`.

Every weight is bound once by the checkpoint room; a fatal problem there is an error here, before any weight is read.
Quantised weights are dequantised. The vision tower's tensors are known and left on disk: text needs none of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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

__all__ = ["Loaded", "load_weights"]


@dataclass(frozen=True)
class Loaded:
    """The model's shape, its float32 weights by plain name, and what was left on disk on purpose."""

    spec: ModelSpec
    weights: Mapping[str, Tensor]
    num_skipped_vision_tensors: int


def load_weights(directory: Path) -> Loaded:
    """All text and MTP weights of the checkpoint in `directory`, as float32, after its headers were found right."""
    checkpoint, binding = open_bound(directory)
    wanted = [bound for bound in binding.modules.values() if bound.module.module_class is not ModuleClass.VISION]
    _require_memory(sum(4 * bound.module.numel for bound in wanted))
    weights = dict(_read(wanted, checkpoint.gptq_zeros_offset))
    return Loaded(checkpoint.spec, weights, num_skipped_vision_tensors=len(binding.modules) - len(wanted))


def _read(wanted: list[Bound], zeros_offset: int) -> Iterator[tuple[str, Tensor]]:
    """Names and numbers; experts that are stored fused are read fused, once."""
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
