"""Checks that two checkpoints are the same model: sizes from their configs, then norms, which both store unquantised.

Different models of one shape exist (Qwen3.5 and Qwen3.6 35B-A3B), so equal shapes are not enough; equal norms are.
"""

from dataclasses import fields

import torch

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.recipe import BuildSource
from onebox.checkpoint.tensors import load
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["check_same_model"]

# Fields that may differ between two quantisations of one model: a text-only config, a missing MTP head.
_MAY_DIFFER = {"vision", "mtp_num_hidden_layers", "eos_token_id", "image_token_id", "video_token_id"}
_MAX_SAMPLES = 24
# A norm cast to FP16 and back changes by at most one part in 2^8, BF16's step.
_CAST_TOLERANCE = 2.0**-8


def check_same_model(base: BuildSource, other: BuildSource) -> None:
    """Raises `MismatchError` with the first difference between the two, if any."""
    one, two = base.checkpoint, other.checkpoint
    where = f"the base {one.directory} and the {other.role} checkpoint {two.directory}"
    for field in fields(ModelSpec):
        values = getattr(one.spec, field.name), getattr(two.spec, field.name)
        if field.name not in _MAY_DIFFER and values[0] != values[1]:
            raise MismatchError(
                f"Not the same model: {where} have {field.name} {values[0]} and {values[1]}; use one model."
            )
    for name in _common_norms(base, other):
        if not _same_numbers(base.binding.modules[name], other.binding.modules[name]):
            raise MismatchError(
                f"Not the same model: {name} differs between {where}, though their shapes agree; "
                "use two checkpoints of one model and one revision."
            )


def _common_norms(base: BuildSource, other: BuildSource) -> list[str]:
    """Up to a few dozen norms that both contain, spread over the model's depth."""
    small = (ModuleClass.SMALL, ModuleClass.MTP_SMALL)
    names = [
        bound.module.name
        for bound in base.binding.of_class(*small)
        if bound.module.name in other.binding.modules and len(bound.module.shape) == 1
    ]
    step = max(1, len(names) // _MAX_SAMPLES)
    return names[::step]


def _same_numbers(one: Bound, two: Bound) -> bool:
    a, b = load(one.tensors["weight"]), load(two.tensors["weight"])
    if a.dtype == b.dtype:
        return torch.equal(a, b)
    a, b = a.to(torch.float32), b.to(torch.float32)
    return bool(((a - b).abs() <= _CAST_TOLERANCE * torch.maximum(a.abs(), b.abs()) + 1e-6).all())
