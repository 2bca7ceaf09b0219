"""The bytes a model will take on a device, before any of it is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onebox.checkpoint.conversion import convert_binding
from onebox.checkpoint.draft_vocab import read_draft_vocab
from onebox.checkpoint.inspect import report_on
from onebox.kernels.common.dispatch import uses_kernels
from onebox.model.cpu import has_float32_output, head_dtype
from onebox.model.dummy import HYBRID
from onebox.model.load import LoadFormat, open_bound
from onebox.spec.conversion import AS_STORED, LoadConversion
from onebox.spec.errors import UsageError
from onebox.spec.model import ModelSpec, read_config
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.traffic import predicted_weight_bytes

__all__ = ["Footprint", "expected_footprint", "footprint"]


class Footprint(NamedTuple):
    """A model's shape and its weights' bytes per class of modules on the device."""

    spec: ModelSpec
    weight_bytes: dict[ModuleClass, int]
    has_mtp: bool
    has_tower: bool
    draft_vocab: tuple[int, ...] | None = None
    """The tokens of the checkpoint's own draft vocabulary, where it has one."""


def footprint(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat,
    overrides: Mapping[str, Any] | None = None,
    conversion: LoadConversion = AS_STORED,
) -> Footprint:
    """Reads headers only. On a CPU weights are plain numbers (`cpu.py`); on a GPU they keep their stored size.

    `overrides` are those of `--hf-overrides`. Modules of a `conversion` are counted in their new formats.
    """
    if load_format is LoadFormat.DUMMY:
        if conversion:
            flag = next(iter(conversion.flags.values()))
            raise UsageError(f"{flag} has nothing to act on: dummy weights are drawn in the formats of a build.")
        spec = read_config(directory, overrides)
        sizes = (
            predicted_weight_bytes(spec, HYBRID)
            if uses_kernels(device)
            else _cpu_bytes(spec, torch.float32, torch.float32)
        )
        # Dummy weights have no vision tower.
        sizes.pop(ModuleClass.VISION, None)
        return Footprint(spec, sizes, spec.mtp_num_hidden_layers > 0, has_tower=False)
    checkpoint, as_stored = open_bound(directory, overrides)
    binding, _ = convert_binding(as_stored, conversion)
    stored = report_on(checkpoint, binding, is_deep=False).class_bytes
    if not uses_kernels(device):
        sizes = _cpu_bytes(checkpoint.spec, dtype, head_dtype(binding, dtype))
        stored = {kind: sizes[kind] for kind in stored}
    has_tower = ModuleClass.VISION in stored
    listed = as_stored.draft_vocab
    draft_vocab = read_draft_vocab(listed, checkpoint.spec.vocab_size) if listed else None
    return Footprint(checkpoint.spec, stored, "mtp.fc" in binding.modules, has_tower, draft_vocab)


def expected_footprint(
    spec: ModelSpec, class_bytes: Mapping[ModuleClass, int], device: torch.device, dtype: torch.dtype
) -> Footprint:
    """As `footprint`, of a checkpoint of which only the bytes per class are known. On a CPU it is an upper bound."""
    sizes = dict(class_bytes)
    if not uses_kernels(device):
        plain = _cpu_bytes(spec, dtype, torch.float32)
        sizes = {kind: plain[kind] for kind in class_bytes}
    return Footprint(spec, sizes, ModuleClass.MTP_FC in class_bytes, ModuleClass.VISION in class_bytes)


def _cpu_bytes(spec: ModelSpec, dtype: torch.dtype, wide: torch.dtype) -> dict[ModuleClass, int]:
    """Per class: matrices in the activations' dtype; the router and the head, tied or not, in `wide`; else float32."""
    sizes: dict[ModuleClass, int] = {}
    for module in modules(spec):
        if has_float32_output(module.name):
            width = wide.itemsize
        elif module.is_matrix or module.module_class is ModuleClass.VISION:
            width = dtype.itemsize
        else:
            width = 4
        sizes[module.module_class] = sizes.get(module.module_class, 0) + width * module.numel
    if spec.tie_word_embeddings:
        sizes[ModuleClass.LM_HEAD] = wide.itemsize * spec.vocab_size * spec.hidden_size
    return sizes
