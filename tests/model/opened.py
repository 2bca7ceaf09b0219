"""Checkpoints opened and bound, models built from them in the kernels' layouts on a CPU, and all tensors of a model."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from onebox.checkpoint.bind import Binding, bind
from onebox.checkpoint.conversion import convert_binding
from onebox.checkpoint.converting import Converter, converted_order
from onebox.checkpoint.source import Checkpoint, open_checkpoint
from onebox.checkpoint.staging import StagedReader
from onebox.model.build import build_model
from onebox.model.load import loading_order
from onebox.model.parts import CheckpointParts
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.conversion import AS_STORED, LoadConversion

CPU = torch.device("cpu")
LAYER = "model.language_model.layers.0"


def opened(directory: Path) -> tuple[Checkpoint, Binding]:
    checkpoint = open_checkpoint(directory)
    return checkpoint, bind(checkpoint)


def packed_model(directory: Path, conversion: LoadConversion = AS_STORED) -> Qwen35:
    """The model with packed weights, as on a GPU, with float32 activations and plain layers."""
    checkpoint, stored = opened(directory)
    binding, converted = convert_binding(stored, conversion)
    order = loading_order(checkpoint.spec, binding)
    with (
        StagedReader(converted_order(order, converted), CPU) as reader,
        Converter(reader.read, converted, order, CPU) as converter,
    ):
        return build_model(checkpoint.spec, CheckpointParts(checkpoint, binding, converter.read, CPU), torch.float32)


def tensors_in(part: object) -> Iterator[torch.Tensor]:
    """All tensors of a model, in the order of its fields; those that several implementations share come once."""
    seen = set()
    for tensor in _all_tensors(part):
        place = tensor.data_ptr(), tensor.nbytes
        if place not in seen:
            seen.add(place)
            yield tensor


def _all_tensors(part: object) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple | list):
        for item in part:
            yield from _all_tensors(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _all_tensors(getattr(part, field.name))
