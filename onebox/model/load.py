"""Loads a checkpoint onto a device for serving: opened, checked, read ahead and built into the model (`build.py`)."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from onebox.checkpoint.bind import Binding, bind
from onebox.checkpoint.conversion import convert_binding
from onebox.checkpoint.converting import Converter, converted_order, shape_tensor
from onebox.checkpoint.fast import FastReader
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import Checkpoint, open_checkpoint
from onebox.checkpoint.staging import StagedReader, TensorReader, place_of
from onebox.checkpoint.tensors import load as load_tensor
from onebox.checkpoint.tensors import torch_dtype
from onebox.checkpoint.weights import weight_tensors
from onebox.kernels.common.dispatch import uses_kernels
from onebox.model.build import build_model
from onebox.model.dummy import HYBRID, dummy_model
from onebox.model.parts import CheckpointParts, CpuParts, DryRunParts, Parts
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.conversion import AS_STORED, LoadConversion
from onebox.spec.errors import MismatchError, UsageError
from onebox.spec.model import ModelSpec, read_config
from onebox.spec.modules import ModuleClass

__all__ = ["LoadFormat", "load_model", "loading_order", "model_without_weights", "open_bound", "raise_first"]


class LoadFormat(StrEnum):
    """How weights are read from disk, by vLLM's names."""

    AUTO = "auto"
    """`safetensors`."""
    SAFETENSORS = "safetensors"
    """Direct reads through one bounded staging buffer."""
    FASTSAFETENSORS = "fastsafetensors"
    """The fastsafetensors package, a whole shard at a time."""
    DUMMY = "dummy"
    """Random weights; only config.json is read."""

    @classmethod
    def parse(cls, text: str) -> "LoadFormat":
        """The format of this name; otherwise an error that lists all names."""
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"The load format {text} is not known: use {', '.join(cls)}.") from None


def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    load_format: LoadFormat = LoadFormat.AUTO,
    *,
    with_mtp: bool = True,
    overrides: Mapping[str, Any] | None = None,
    conversion: LoadConversion = AS_STORED,
) -> Qwen35:
    """The model in `directory` on `device`, with activations in `dtype`, without the vision tower.

    The MTP head is loaded if `with_mtp` and the checkpoint has one. Headers are checked first, each tensor is bound
    once, and leftover or missing tensors are errors. Beyond the model itself, loading takes at most the reader's
    staging buffer and the stored tensors of the module that is being repacked. `overrides` are those of
    `--hf-overrides`. With a `conversion` the model is the one that a build with these formats would load as.
    """
    if load_format is LoadFormat.DUMMY:
        spec = read_config(directory, overrides)
        return dummy_model(spec, HYBRID if uses_kernels(device) else {}, device, dtype, with_mtp=with_mtp)
    with _collector_paused():
        checkpoint, stored = open_bound(directory, overrides)
        binding, converted = convert_binding(stored, conversion)
        order = loading_order(checkpoint.spec, binding, with_mtp=with_mtp)
        with (
            _reader(checkpoint, converted_order(order, converted), device, load_format) as reader,
            Converter(reader.read, converted, order, device) as converter,
        ):
            parts: Parts = (
                CheckpointParts(checkpoint, binding, converter.read, device)
                if uses_kernels(device)
                else CpuParts(checkpoint, binding, converter.read, dtype)
            )
            model = build_model(checkpoint.spec, parts, dtype, with_mtp=with_mtp)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def model_without_weights(
    directory: Path,
    dtype: torch.dtype,
    load_format: LoadFormat,
    *,
    with_mtp: bool = True,
    conversion: LoadConversion = AS_STORED,
) -> Qwen35:
    """The model as `load_model` builds it for a GPU, of tensors that have shapes and no memory (`meta`)."""
    device = torch.device("meta")
    if load_format is LoadFormat.DUMMY:
        return load_model(directory, device, dtype, load_format, with_mtp=with_mtp)
    with _collector_paused():
        checkpoint, stored = open_bound(directory)
        binding, converted = convert_binding(stored, conversion)

        def read(entry: TensorEntry) -> torch.Tensor:
            if place_of(entry, device) != device:
                return shape_tensor(converted[entry.name]) if entry.name in converted else load_tensor(entry)
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=device)

        return build_model(
            checkpoint.spec, CheckpointParts(checkpoint, binding, read, device), dtype, with_mtp=with_mtp
        )


def open_bound(directory: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Checkpoint, Binding]:
    """The checkpoint in `directory` with its tensors bound to modules; its first fatal problem is raised.

    Only headers are read.
    """
    checkpoint = open_checkpoint(directory, overrides)
    binding = bind(checkpoint)
    raise_first(directory, [problem.message for problem in binding.problems if problem.is_fatal])
    return checkpoint, binding


def raise_first(directory: Path, messages: list[str]) -> None:
    """Raises the first of a checkpoint's fatal problems, if any, with the number of others."""
    if messages:
        others = len(messages) - 1
        more = f" ({others} more problems: `onebox inspect {directory}` lists them)" if others else ""
        raise MismatchError(f"{messages[0]}{more}")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Garbage collection off: among the entries of 100,000 tensors it doubles the time to plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def loading_order(spec: ModelSpec, binding: Binding, *, with_mtp: bool = True) -> list[list[TensorEntry]]:
    """The tensors that building the model reads, in groups read together, in the order of reading.

    Found by a dry run with placeholder weights, so that a reader can read ahead.
    """
    parts = DryRunParts(spec, binding)
    build_model(spec, parts, torch.float32, with_mtp=with_mtp)
    recorded = {entry.name for group in parts.groups for entry in group}
    for bound in binding.modules.values():
        left = [entry.name for entry in weight_tensors(bound).values() if entry.name not in recorded]
        kind = bound.module.module_class
        if left and kind is not ModuleClass.VISION and (with_mtp or not kind.in_mtp):
            raise MismatchError(f"{left[0]} belongs to no layer of the model.")
    return parts.groups


def _reader(
    checkpoint: Checkpoint, order: list[list[TensorEntry]], device: torch.device, load_format: LoadFormat
) -> TensorReader:
    if load_format is LoadFormat.FASTSAFETENSORS:
        return FastReader(checkpoint, order, device)
    return StagedReader(order, device)
