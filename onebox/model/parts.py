"""Where a model's weights come from: linears, experts and small tensors by module name, in the kernels' layouts.

`CheckpointParts` reads them from a bound checkpoint for a GPU, `CpuParts` for a CPU; `dummy.DummyParts` draws random
ones. `DryRunParts` returns placeholder weights and records which tensors the others would read.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from onebox.checkpoint.bind import Binding, Bound
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import Checkpoint
from onebox.checkpoint.staging import Read
from onebox.checkpoint.weights import read_weight, weight_tensors
from onebox.model.cpu import cpu_experts, cpu_layer, cpu_linear, head_dtype
from onebox.model.experts import (
    EXPERT_PARTS,
    ExpertOf,
    Experts,
    PlainExperts,
    expert_batches,
    make_experts,
    plain_expert,
)
from onebox.model.layers import StreamLayer
from onebox.model.layers.plain import Mixer, PlainLayer
from onebox.model.linear import Linear, PlainLinear, can_join, make_linear
from onebox.spec.model import ModelSpec

__all__ = ["CheckpointParts", "CpuParts", "DryRunParts", "Parts"]


class Parts(Protocol):
    """The weights of one model, by module name. All tensors are on the model's device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def has_mtp(self) -> bool: ...

    def linear(self, *names: str, float32_output: bool = False) -> Linear:
        """One linear over the rows of all named matrices, in this order; `float32_output` if it is read in float32."""

    def can_join(self, *names: str) -> bool:
        """Whether all named matrices are stored alike, so that a linear over them is one matrix."""

    def tied_head(self, embedding: Tensor) -> Linear:
        """The embedding table as the language-model head."""

    def experts(self, name: str) -> Experts:
        """The routed experts under `name`."""

    def small(self, name: str) -> Tensor:
        """A norm, a convolution or another small tensor, float32."""

    def embedding(self, name: str) -> Tensor:
        """The embedding table [V, H]: bfloat16, or the activations' dtype on a CPU."""

    def choose_layer(self, layer: PlainLayer[Mixer]) -> StreamLayer:
        """The implementation of `layer` for this device: compiled on a CPU where that is possible, else `layer`."""


class BoundParts:
    """What all parts of a bound checkpoint have in common."""

    def __init__(self, spec: ModelSpec, binding: Binding, device: torch.device) -> None:
        self.device = device
        self.has_mtp = "mtp.fc" in binding.modules
        self._num_experts = spec.num_experts
        self._modules = binding.modules

    def can_join(self, *names: str) -> bool:
        return can_join(self._bounds(*names))

    def tied_head(self, embedding: Tensor) -> Linear:
        return PlainLinear(embedding)

    def choose_layer(self, layer: PlainLayer[Mixer]) -> StreamLayer:
        return layer

    def _bounds(self, *names: str) -> list[Bound]:
        return [self._modules[name] for name in names]

    def _experts_under(self, name: str) -> ExpertOf:
        return lambda index, part: self._modules[f"{name}.{index}.{part}"]


class CheckpointParts(BoundParts):
    """Weights of a bound checkpoint: `read` brings their tensors to the device, where they are repacked."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding, read: Read, device: torch.device) -> None:
        super().__init__(checkpoint.spec, binding, device)
        self._read = read
        self._zeros_offset = checkpoint.gptq_zeros_offset

    def linear(self, *names: str, float32_output: bool = False) -> Linear:  # noqa: ARG002 - kernels sum in float32
        return make_linear(self._bounds(*names), self._read, self._zeros_offset)

    def experts(self, name: str) -> Experts:
        return make_experts(self._experts_under(name), self._num_experts, self._read, self._zeros_offset)

    def small(self, name: str) -> Tensor:
        return read_weight(self._modules[name], read=self._read)

    def embedding(self, name: str) -> Tensor:
        return self._read(self._modules[name].tensors["weight"]).to(torch.bfloat16)


class CpuParts(CheckpointParts):
    """The same for a CPU: plain numbers in the activations' dtype, whatever they are stored as."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding, read: Read, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, binding, read, torch.device("cpu"))
        self._dtype = dtype
        self._head_dtype = head_dtype(binding, dtype)

    def linear(self, *names: str, float32_output: bool = False) -> Linear:
        bounds = self._bounds(*names)
        whole = torch.cat([read_weight(b, zeros_offset=self._zeros_offset, read=self._read) for b in bounds])
        return cpu_linear(whole, self._head_dtype if float32_output else self._dtype)

    def can_join(self, *names: str) -> bool:  # noqa: ARG002 - a CPU's layers take their matrices one by one
        return False

    def tied_head(self, embedding: Tensor) -> Linear:
        return cpu_linear(embedding, self._head_dtype)

    def experts(self, name: str) -> Experts:
        of_layer, count = self._experts_under(name), self._num_experts
        each = (plain_expert(of_layer, i, self._read, self._zeros_offset, self._dtype) for i in range(count))
        return cpu_experts(((gate_up.mT, down.mT) for gate_up, down in each), count)

    def embedding(self, name: str) -> Tensor:
        return self._read(self._modules[name].tensors["weight"]).to(self._dtype)

    def choose_layer(self, layer: PlainLayer[Mixer]) -> StreamLayer:
        return cpu_layer(layer)


class DryRunParts(BoundParts):
    """Placeholder weights; `groups` records the tensors that real ones are made of, in the order of loading."""

    def __init__(self, spec: ModelSpec, binding: Binding) -> None:
        super().__init__(spec, binding, torch.device("cpu"))
        self.groups: list[list[TensorEntry]] = []

    def linear(self, *names: str, float32_output: bool = False) -> Linear:  # noqa: ARG002 - the same tensors
        self._record(self._bounds(*names))
        return PlainLinear(_PLACEHOLDER)

    def experts(self, name: str) -> Experts:
        of_layer = self._experts_under(name)
        for batch in expert_batches(of_layer, self._num_experts):
            # In the order of `make_experts`, so that a conversion has few stored matrices in memory.
            self._record(of_layer(index, part) for part in EXPERT_PARTS for index in batch)
        return PlainExperts(_PLACEHOLDER, _PLACEHOLDER)

    def small(self, name: str) -> Tensor:
        self._record(self._bounds(name))
        return _PLACEHOLDER

    def embedding(self, name: str) -> Tensor:
        return self.small(name)

    def _record(self, bounds: Iterable[Bound]) -> None:
        self.groups.append([entry for bound in bounds for entry in weight_tensors(bound).values()])


_PLACEHOLDER = torch.empty(0, 0)
