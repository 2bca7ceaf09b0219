"""Checkpoints of a training run: the weights in BF16 with Qwen3.5's tensor names, and how far the run has come."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onebox.checkpoint.bind import bind
from onebox.checkpoint.source import open_checkpoint
from onebox.checkpoint.weights import read_weight
from onebox.model.reference_weights import load_weights
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec, read_json, spec_from_config
from onebox.spec.modules import ModuleClass, fused_experts
from recipes.pocket.training.network import Weights
from recipes.pocket.training.schedule import RunClock
from recipes.pocket.training.vision import READER

__all__ = [
    "MAX_FILE_BYTES",
    "PROGRESS",
    "checkpoint_tensors",
    "read_progress",
    "read_weights",
    "save_run",
    "write_checkpoint",
    "write_json",
    "write_tensors",
]

MAX_FILE_BYTES = 15 * 2**20
PROGRESS = "progress.json"
READER_FILE = "reader.weights"
"""In safetensors' format, but not by that name: it is no part of the checkpoint."""


def save_run(directory: Path, config: Mapping[str, Any], clock: RunClock, weights: Weights) -> None:
    """Writes the checkpoint, then the progress. While files are being replaced there is no progress file."""
    path = directory / PROGRESS
    path.unlink(missing_ok=True)
    write_checkpoint(directory, config, weights)
    path.write_text(json.dumps({"progress": min(1.0, clock.progress)}) + "\n", encoding="utf-8")


def read_progress(directory: Path) -> float:
    """The completed share of the run whose checkpoint is in `directory`: 0 if there is none, 1 if it is finished."""
    path = directory / PROGRESS
    if not path.exists():
        return 0.0
    share = read_json(path).get("progress")
    if not isinstance(share, float | int) or not 0 <= share <= 1:
        raise MismatchError(f"{path} has no progress between 0 and 1: remove {directory} to start again.")
    return float(share)


def write_checkpoint(directory: Path, config: Mapping[str, Any], weights: Weights) -> None:
    """Writes config.json and the weights, in files of at most MAX_FILE_BYTES. Existing files are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = list(_split_by_size(checkpoint_tensors(spec_from_config(config), weights)))
    for number, part in enumerate(parts, 1):
        write_tensors(directory / f"model-{number:05}-of-{len(parts):05}.safetensors", part)
    write_json(directory / "config.json", config)
    reader = {name: w.detach().cpu().clone() for name, w in weights.items() if name.startswith(READER)}
    if reader:
        write_tensors(directory / READER_FILE, reader)


def checkpoint_tensors(spec: ModelSpec, weights: Weights) -> dict[str, Tensor]:
    """The tensors of a checkpoint, BF16 on the CPU. The layers' experts stay fused, the MTP head's are split."""
    tensors = {
        name: weight.detach().to("cpu", torch.bfloat16)
        for name, weight in weights.items()
        if not name.startswith(READER)
    }
    for group in fused_experts(spec):
        if group.module_class.in_mtp:
            fused = tensors.pop(group.tensor)
            for expert in range(spec.num_experts):
                for part, rows in zip(group.parts, fused[expert].chunk(len(group.parts)), strict=True):
                    tensors[f"{group.experts_name}.{expert}.{part}.weight"] = rows
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def read_weights(directory: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec and float32 weights of a checkpoint under the names that the network reads: all experts fused.

    Those of the tower are among them, and the reader's, if the run that wrote the checkpoint had one.
    """
    loaded = load_weights(directory)
    weights = dict(loaded.weights)
    checkpoint = open_checkpoint(directory)
    for bound in bind(checkpoint).of_class(ModuleClass.VISION):
        weights[bound.module.plain_tensor] = read_weight(bound).float()
    if (directory / READER_FILE).exists():
        weights |= load_file(directory / READER_FILE)
    for group in fused_experts(loaded.spec):
        if group.tensor not in weights:
            experts = [
                torch.cat([weights.pop(f"{group.experts_name}.{expert}.{part}.weight") for part in group.parts])
                for expert in range(loaded.spec.num_experts)
            ]
            weights[group.tensor] = torch.stack(experts)
    return loaded.spec, weights


def _split_by_size(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > MAX_FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes to a temporary name and renames, so that a file under its own name is always complete."""
    scratch = path.with_name(f"{path.name}.partial")
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.chmod(0o644)
    scratch.rename(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
