"""Checks that checkpoints are the same model: sizes from their configs, then norms, which all store unquantised.

Different models of one shape exist (Qwen3.5 and Qwen3.6 35B-A3B), so equal shapes are not enough; equal norms are.
"""

from dataclasses import fields
from itertools import combinations

import torch

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.recipe import BuildSource
from onebox.checkpoint.tensors import load
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["check_same_model", "shares_norms"]

# Fields that may differ between two quantisations of one model: a text-only config, a missing MTP head.
_MAY_DIFFER = {"vision", "mtp_num_hidden_layers", "eos_token_id", "image_token_id", "video_token_id"}
_MAX_SAMPLES = 24
# A norm cast to FP16 and back changes by at most one part in 2^8, BF16's step.
_CAST_TOLERANCE = 2.0**-8


def check_same_model(sources: list[BuildSource]) -> None:
    """Raises `MismatchError` with the first difference between any two of `sources`, if any."""
    for one, two in combinations(sources, 2):
        _check_pair(one, two)


def shares_norms(one: BuildSource, two: BuildSource) -> bool:
    """Whether two sources have a norm in common to be compared by; of parts of checkpoints they may have none."""
    return bool(_common_norms(one, two))


def _check_pair(one: BuildSource, two: BuildSource) -> None:
    where = " and ".join(f"the {source.role} checkpoint {source.checkpoint.directory}" for source in (one, two))
    for field in fields(ModelSpec):
        values = getattr(one.checkpoint.spec, field.name), getattr(two.checkpoint.spec, field.name)
        if field.name not in _MAY_DIFFER and values[0] != values[1]:
            raise MismatchError(
                f"Not the same model: {where} have {field.name} {values[0]} and {values[1]}; use one model."
            )
    for name in _common_norms(one, two):
        if not _same_numbers(one.binding.modules[name], two.binding.modules[name]):
            raise MismatchError(
                f"Not the same model: {name} differs between {where}, though their shapes agree; "
                "use checkpoints of one model and one revision."
            )


def _common_norms(one: BuildSource, two: BuildSource) -> list[str]:
    """A few dozen norms that both contain, spread over the model's depth, and all those of the MTP head."""
    common = {
        kind: [
            bound.module.name
            for bound in one.binding.of_class(kind)
            if bound.module.name in two.binding.modules and len(bound.module.shape) == 1
        ]
        for kind in (ModuleClass.SMALL, ModuleClass.MTP_SMALL)
    }
    step = max(1, len(common[ModuleClass.SMALL]) // _MAX_SAMPLES)
    return common[ModuleClass.SMALL][::step] + common[ModuleClass.MTP_SMALL]


def _same_numbers(one: Bound, two: Bound) -> bool:
    a, b = load(one.tensors["weight"]), load(two.tensors["weight"])
    if a.dtype == b.dtype:
        return torch.equal(a, b)
    a, b = a.to(torch.float32), b.to(torch.float32)
    return bool(((a - b).abs() <= _CAST_TOLERANCE * torch.maximum(a.abs(), b.abs()) + 1e-6).all())
