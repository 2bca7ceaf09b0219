"""A block on the stream of some sequences, float32 [sequences, tokens, hidden] in host memory: its mixer, its experts.

What is computed is computed on the weights' device, a sequence or an expert at a time.
"""

import torch
from torch import Tensor

from onebox.model.reference import DeltaState, KVRows, WeightScope, add_mixer, rotary, text_positions
from onebox.quantize.blocks import BlockWeights
from onebox.quantize.branches import ExpertInput
from onebox.spec.model import FULL, ModelSpec

__all__ = ["add_source_experts", "mix", "mixed"]


def mixed(spec: ModelSpec, weights: BlockWeights, dense: dict[str, Tensor], x: Tensor) -> Tensor:
    """One sequence [tokens, hidden] after the block's mixer of the weights `dense`, on their device."""
    with weights.device:
        memory = (KVRows if weights.block.kind == FULL else DeltaState).empty(spec)
        rotation = rotary(spec, text_positions(0, len(x)))
        return add_mixer(spec, WeightScope(dense, weights.block.name), x.to(weights.device), memory, rotation)


def mix(spec: ModelSpec, weights: BlockWeights, dense: dict[str, Tensor], stream: Tensor) -> None:
    """Takes the stream through the mixer, in place."""
    with torch.no_grad():
        for sequence in stream:
            sequence.copy_(mixed(spec, weights, dense, sequence))


def add_source_experts(spec: ModelSpec, weights: BlockWeights, dense: dict[str, Tensor], stream: Tensor) -> None:
    """Adds the output of all of the source's experts to the stream, in place."""
    with torch.no_grad():
        rows = stream.flatten(0, 1)
        inputs = ExpertInput(spec, WeightScope(dense, weights.block.name), rows.clone())
        for branch in inputs.branches(weights.block.name):
            gate, up, down = (weights.source(module) for module in branch.modules)
            inputs.add(rows, branch, (gate, up, down))
