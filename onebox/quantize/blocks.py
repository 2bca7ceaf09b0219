"""The model's blocks: the decoder layers and the MTP head's layer, and their weights in the source and in the build."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.recipe import Action, ModuleChoice, rounded_tensors
from onebox.checkpoint.rounding import SharedScale, round_matrix
from onebox.checkpoint.tensors import tensor_of
from onebox.checkpoint.weights import read_weight
from onebox.quantize.sign_round import TunedIntegers, TunedMatrix
from onebox.quantize.tuned_float import TunedFp8
from onebox.spec.model import FULL, ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.weights import INTEGER_BITS, Layout, WeightFormat, tensor_bytes

__all__ = ["Block", "BlockWeights", "blocks_of", "built_weight", "is_tuned", "tuned_matrix", "weights_of"]

_EXPERTS = (ModuleClass.EXPERTS, ModuleClass.MTP_EXPERTS)
_MAX_TUNED_BITS = 4
"""Of integers: with more bits there is nothing to gain by tuning."""


@dataclass(frozen=True)
class Block:
    """A decoder layer: its name, the kind of its mixer, and what the build does with each of its modules, by name."""

    name: str
    kind: str
    choices: dict[str, ModuleChoice]

    @property
    def in_mtp(self) -> bool:
        return self.name.startswith("mtp.")

    @property
    def mixer_tuned(self) -> list[ModuleChoice]:
        """The matrices of attention or DeltaNet whose rounding is tuned."""
        return [choice for name, choice in self.choices.items() if ".mlp." not in name and is_tuned(choice)]

    @property
    def branches_tuned(self) -> list[str]:
        """The shared expert and the routed experts of which a matrix is tuned, by name."""
        names = (name.rpartition(".")[0] for name, choice in self.choices.items() if is_tuned(choice))
        return list(dict.fromkeys(name for name in names if ".mlp." in name))


def blocks_of(spec: ModelSpec, choices: Sequence[ModuleChoice]) -> list[Block]:
    """All blocks in the order of a forward pass; the MTP head's layer is the last, if the build has one."""
    names = {f"{spec.text_prefix}layers.{index}": kind for index, kind in enumerate(spec.layer_types)}
    names |= {f"mtp.layers.{index}": FULL for index in range(1)}
    found: dict[str, dict[str, ModuleChoice]] = {name: {} for name in names}
    for choice in choices:
        parts = choice.module.name.split(".layers.")
        name = f"{parts[0]}.layers.{parts[1].split('.')[0]}" if len(parts) == 2 else ""
        if name in found:
            found[name][choice.module.name] = choice
    return [Block(name, kind, found[name]) for name, kind in names.items() if found[name]]


def is_tuned(choice: ModuleChoice) -> bool:
    """Whether the rounding of a matrix is tuned; it is not for one that is kept or rounded otherwise."""
    target = choice.target
    is_grouped = target.layout is Layout.PACKED and target.group_size > 0
    is_narrow = INTEGER_BITS.get(target.format, _MAX_TUNED_BITS + 1) <= _MAX_TUNED_BITS
    return choice.action is Action.QUANTIZE and (target.format is WeightFormat.FP8 or (is_narrow and is_grouped))


def tuned_matrix(choice: ModuleChoice, weight: Tensor, importance: Tensor | None = None) -> TunedMatrix:
    """The weight, float32 [out, in], of a module that is tuned, rounded to nearest so far.

    `importance` [in] is the sum of squares of each column's inputs.
    """
    if choice.target.format is WeightFormat.FP8:
        return TunedFp8(weight)
    return TunedIntegers(weight, INTEGER_BITS[choice.target.format], choice.target.group_size, importance)


@dataclass(frozen=True)
class BlockWeights:
    """Reads the weights of one block to `device`, float32, each at the moment it is asked for."""

    block: Block
    shared_scales: dict[str, SharedScale]
    device: torch.device

    def source(self, name: str) -> Tensor:
        """A module's weight as the source has it."""
        return _source_weight(self.block.choices[name]).to(self.device)

    def built(self, name: str) -> Tensor:
        """A module's weight as the build has it without calibration."""
        return built_weight(self.block.choices[name], self.shared_scales.get(name), self.device)

    def before_tuning(self, name: str) -> Tensor:
        """The source's weight of a module that is tuned, the build's of any other."""
        return self.source(name) if is_tuned(self.block.choices[name]) else self.built(name)

    def dense(self, *, built: bool) -> dict[str, Tensor]:
        """All weights but the routed experts', by tensor name; those that are tuned are the source's."""
        read = self.before_tuning if built else self.source
        kept = (choice.module for choice in self.block.choices.values() if choice.module.module_class not in _EXPERTS)
        return {module.plain_tensor: read(module.name) for module in kept}


def weights_of(choices: Sequence[ModuleChoice], device: torch.device) -> dict[str, Tensor]:
    """The source's weights of some modules, float32, by tensor name."""
    return {choice.module.plain_tensor: _source_weight(choice).to(device) for choice in choices}


def built_weight(choice: ModuleChoice, shared: SharedScale | None, device: torch.device) -> Tensor:
    """A module's weight, float32, as the build has it without calibration."""
    weight = _rounded_weight(choice, shared) if choice.action is Action.QUANTIZE else _source_weight(choice)
    return weight.to(device)


def _source_weight(choice: ModuleChoice) -> Tensor:
    return read_weight(choice.bound, zeros_offset=choice.source.checkpoint.gptq_zeros_offset)


def _rounded_weight(choice: ModuleChoice, shared: SharedScale | None) -> Tensor:
    """What is read back of the tensors that a build writes for this module."""
    declared = rounded_tensors(choice.target, *choice.module.shape)
    parts = [bytearray() for _ in declared]
    for index, piece in round_matrix(choice, shared):
        parts[index] += piece
    made = {
        suffix: tensor_of(part, stored.dtype).reshape(stored.shape)
        for (suffix, stored), part in zip(declared.items(), parts, strict=True)
    }
    path = next(iter(choice.bound.tensors.values())).path
    entries = {
        suffix: TensorEntry(suffix, *stored, path, 0, tensor_bytes(stored)) for suffix, stored in declared.items()
    }
    stored_as = replace(choice.bound, stored=choice.target, tensors=entries, fused=None)
    return read_weight(stored_as, read=lambda entry: made[entry.name])
