"""Opens a DFlash drafter's directory and binds its tensors to the modules of its config. Reads headers only.

A drafter has no optional part: every tensor of the table in `spec/dflash.py` is there in its shape, and nothing else.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.checkpoint.bind import (
    Binding,
    Problem,
    ProblemKind,
    bind_module,
    duplicate_problems,
    index_problems,
)
from onebox.checkpoint.header import TensorEntry, read_header
from onebox.checkpoint.source import gptq_zeros_offset, join_shards, list_shards, read_index
from onebox.spec.dflash import DFlashSpec
from onebox.spec.dflash_config import drafter_from_config, is_drafter_config
from onebox.spec.model import read_json

__all__ = ["DrafterCheckpoint", "bind_drafter", "is_drafter", "open_drafter"]


@dataclass(frozen=True)
class DrafterCheckpoint:
    """An opened drafter. `tensors` comes from the shards' headers alone; `index` is the index file, unchecked."""

    directory: Path
    config: dict[str, Any]
    spec: DFlashSpec
    shards: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    duplicates: dict[str, tuple[str, str]]
    index: dict[str, str] | None

    @property
    def gptq_zeros_offset(self) -> int:
        """The offset subtracted from each stored GPTQ zero point."""
        return gptq_zeros_offset(self.config.get("quantization_config"))


def is_drafter(directory: Path) -> bool:
    """Whether `directory` holds a block drafter instead of a model; False where its config.json cannot be read."""
    path = directory / "config.json"
    return path.is_file() and is_drafter_config(read_json(path))


def open_drafter(directory: Path) -> DrafterCheckpoint:
    """Reads config.json, the index and the header of every *.safetensors file in `directory`. Reads no tensor."""
    config = read_json(directory / "config.json")
    spec = drafter_from_config(config)
    shards = list_shards(directory)
    tensors, duplicates = join_shards(read_header(shard) for shard in shards)
    return DrafterCheckpoint(directory, config, spec, shards, tensors, duplicates, read_index(directory))


def bind_drafter(checkpoint: DrafterCheckpoint) -> Binding:
    """Binds every tensor of `checkpoint` once; unknown or missing tensors and wrong shapes become problems."""
    wanted = {module.name: module for module in checkpoint.spec.modules()}
    found: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    problems = duplicate_problems(checkpoint.duplicates)
    for name, entry in checkpoint.tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem in wanted:
            found[stem][suffix] = entry
        else:
            problems.append(_unexpected(name))
    binding = Binding(problems=problems)
    for name, module in wanted.items():
        parts = found.get(name)
        if parts is None:
            binding.problems.append(_missing(module.plain_tensor))
        elif not module.is_matrix and set(parts) != {"weight"}:
            binding.problems += [_quantised_norm(name, suffix) for suffix in parts if suffix != "weight"]
        else:
            bind_module(binding, module, parts)
    binding.problems += _side_file_problems(checkpoint.directory)
    binding.problems += index_problems(checkpoint.index, checkpoint.tensors)
    return binding


_OWN_VOCABULARY = (
    "lists a draft vocabulary of the drafter's own; onebox drafts from the model's (--draft-vocab): remove it if the "
    "drafter was trained with the whole head"
)
# Tensors that drafters for other engines may have, and why this one runs without.
_OTHERS: Mapping[str, str] = {
    "lm_head": "is a head of the drafter's own; onebox takes its logits from the model's head: a drafter trained with "
    "another cannot be run",
    "embed_tokens": "is an embedding of the drafter's own; onebox takes the model's: a drafter trained with another "
    "cannot be run",
    "d2t": _OWN_VOCABULARY,
    "t2d": _OWN_VOCABULARY,
    "mask_embedding": "is a mask embedding of its own; onebox embeds the mask token by the model's table",
    "attention_conv": "belongs to a DFlash2 drafter, which onebox does not run",
    "mlp_conv": "belongs to a DFlash2 drafter, which onebox does not run",
    "candidate_selector": "belongs to a DFlash2 drafter, which onebox does not run",
}


def _unexpected(name: str) -> Problem:
    part = next((part for part in name.split(".") if part in _OTHERS), None)
    why = _OTHERS[part] if part else "belongs to no module of the drafter that its config.json describes: remove it"
    return Problem(ProblemKind.UNEXPECTED, name, f"{name} {why}.")


def _missing(tensor: str) -> Problem:
    return Problem(ProblemKind.MISSING, tensor, f"{tensor} is missing: download the drafter again.")


def _quantised_norm(name: str, suffix: str) -> Problem:
    tensor = f"{name}.{suffix}"
    return Problem(
        ProblemKind.UNEXPECTED,
        tensor,
        f"{tensor} belongs to a norm, which is read as plain BF16, FP16 or FP32: remove it.",
    )


def _side_file_problems(directory: Path) -> list[Problem]:
    name = "mask_embedding.pt"
    if not (directory / name).exists():
        return []
    message = f"{name} {_OTHERS['mask_embedding']}: a drafter trained with another cannot be run."
    return [Problem(ProblemKind.SIDE_FILE, name, message)]
