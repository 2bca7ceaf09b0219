"""What converting weights while loading changes: the bound modules and their tensors, as a build would write them.

Reads headers only, without torch; `converting.py` makes the tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from onebox.checkpoint.bind import Binding, Bound
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.recipe import TargetFormat, rounded_form, rounded_tensors
from onebox.spec.conversion import LoadConversion
from onebox.spec.errors import UnsupportedError, UsageError
from onebox.spec.weights import Stored, WeightFormat, tensor_bytes

__all__ = ["ConvertedModule", "ConvertedTensors", "convert_binding"]


class ConvertedModule(NamedTuple):
    """A module as it is stored, and as it is after loading."""

    source: Bound
    target: Stored

    @property
    def name(self) -> str:
        return self.source.module.name


ConvertedTensors = Mapping[str, ConvertedModule]
"""The modules that are converted, by the name of each of their new tensors."""


def convert_binding(binding: Binding, conversion: LoadConversion) -> tuple[Binding, ConvertedTensors]:
    """The binding with the modules that `conversion` names in their new formats, and these modules.

    A module that has the format already is left alone. Raises an error where one is quantised otherwise, or where there
    is none.
    """
    if not conversion:
        return binding, {}
    converted: dict[str, ConvertedModule] = {}
    modules = dict(binding.modules)
    for name, bound in binding.modules.items():
        wanted = conversion.formats.get(bound.module.module_class)
        if wanted is None or bound.stored.format is wanted:
            continue
        target = _target(bound, wanted, conversion.flags[bound.module.module_class])
        modules[name] = replace(bound, stored=target, tensors=_new_tensors(bound, target), fused=None)
        converted |= {entry.name: ConvertedModule(bound, target) for entry in modules[name].tensors.values()}
    _refuse_idle(binding.modules.values(), conversion)
    return Binding(modules, binding.problems, binding.draft_vocab), converted


def _target(bound: Bound, wanted: WeightFormat, flag: str) -> Stored:
    if not bound.is_plain:
        raise UnsupportedError(
            f"{flag} was asked for, but {bound.module.name} is stored as {bound.stored}: weights are converted while "
            "loading only where they are stored in BF16; leave the flag out."
        )
    return rounded_form(TargetFormat(wanted.value), bound)


def _new_tensors(bound: Bound, target: Stored) -> dict[str, TensorEntry]:
    source, name = bound.tensors["weight"], bound.module.name
    return {
        suffix: TensorEntry(f"{name}.{suffix}", *stored, source.path, source.begin, tensor_bytes(stored))
        for suffix, stored in rounded_tensors(target, *bound.module.shape).items()
    }


def _refuse_idle(bounds: Iterable[Bound], conversion: LoadConversion) -> None:
    present = {bound.module.module_class for bound in bounds}
    for kind, flag in conversion.flags.items():
        if kind not in present:
            raise UsageError(
                f"{flag} has nothing to act on: the checkpoint has no {kind.value} of its own; leave it out."
            )
