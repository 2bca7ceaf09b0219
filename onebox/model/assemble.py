"""Puts the model together: every module into its layer, straight into the kernels' layouts, from files or made up.

A `Parts` gives linears, experts and small tensors by module name; `CheckpointParts` reads them from a bound checkpoint,
`dummy.DummyParts` draws them. The layers are put together in one place for both. The same place, run once over parts of
nothing, tells the order in which tensors will be asked for, so that they can be read ahead.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onebox.checkpoint.bind import Binding, Bound, bind
from onebox.checkpoint.fast import FastReader
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import Checkpoint, open_checkpoint
from onebox.checkpoint.staging import Read, StagedReader, TensorReader
from onebox.checkpoint.weights import read_weight, weight_tensors
from onebox.kernels.delta_net.memory import DeltaWeights
from onebox.kernels.rope.frequencies import rotary_frequencies
from onebox.model.cpu import cpu_experts, cpu_layer, cpu_linear, wide_dtype
from onebox.model.experts import (
    EXPERT_PARTS,
    ExpertOf,
    Experts,
    PlainExperts,
    expert_batches,
    make_experts,
    plain_expert,
)
from onebox.model.fused import can_fuse
from onebox.model.layers import Attention, DeltaNet, Layer, Mixture, MtpHead
from onebox.model.linear import Linear, PlainLinear, are_one, make_linear
from onebox.model.load import refuse_problems
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.errors import MismatchError, UsageError
from onebox.spec.model import ModelSpec, read_json, spec_from_config
from onebox.spec.modules import ModuleClass

__all__ = ["CheckpointParts", "LoadFormat", "Parts", "fused", "load_model", "loading_order", "put_together"]


class LoadFormat(StrEnum):
    """How weights come off the disk, by vLLM's names."""

    AUTO = "auto"
    """The one below."""
    SAFETENSORS = "safetensors"
    """Direct reads through one bounded staging buffer."""
    FASTSAFETENSORS = "fastsafetensors"
    """The fastsafetensors package, a whole shard at a time."""
    DUMMY = "dummy"
    """Nothing is read but config.json: weights are random."""

    @classmethod
    def parse(cls, text: str) -> "LoadFormat":
        """The format of this name, or a sentence that lists them."""
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"The load format {text} is not known: use {', '.join(cls)}.") from None


class Parts(Protocol):
    """Where a model's parts come from. All tensors are on the model's device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def has_mtp(self) -> bool: ...

    def linear(self, *names: str, is_wide: bool = False) -> Linear:
        """One linear over the rows of all named matrices, in this order; `is_wide` if float32 results are wanted."""

    def are_alike(self, *names: str) -> bool:
        """Whether one linear over all named matrices is one matrix: they are stored alike."""

    def tied_head(self, embedding: Tensor) -> Linear:
        """The embedding's table as the language-model head."""

    def experts(self, name: str) -> Experts:
        """The routed experts under `name`."""

    def small(self, name: str) -> Tensor:
        """A norm, a convolution or another small tensor, float32."""

    def embedding(self, name: str) -> Tensor:
        """The table of embeddings [V, H]: bfloat16, or the activations' dtype on a CPU."""


class CheckpointParts:
    """Parts out of a bound checkpoint: `read` brings their tensors to the device, where they are repacked."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding, read: Read, device: torch.device) -> None:
        self.device = device
        self.has_mtp = "mtp.fc" in binding.modules
        self._num_experts = checkpoint.spec.num_experts
        self._modules = binding.modules
        self._read = read
        self._zeros_offset = checkpoint.gptq_zeros_offset

    def linear(self, *names: str, is_wide: bool = False) -> Linear:  # noqa: ARG002 - kernels sum in float32 anyway
        return make_linear([self._modules[name] for name in names], self._read, self._zeros_offset)

    def are_alike(self, *names: str) -> bool:
        return are_one([self._modules[name] for name in names])

    def tied_head(self, embedding: Tensor) -> Linear:
        return PlainLinear(embedding)

    def experts(self, name: str) -> Experts:
        of_layer = _experts_under(name, self._modules)
        return make_experts(of_layer, self._num_experts, self._read, self._zeros_offset)

    def small(self, name: str) -> Tensor:
        return read_weight(self._modules[name], read=self._read)

    def embedding(self, name: str) -> Tensor:
        return self._read(self._modules[name].tensors["weight"]).to(torch.bfloat16)


class CpuParts(CheckpointParts):
    """The same for a CPU: plain numbers in the activations' dtype, whatever they are stored as."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding, read: Read, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, binding, read, torch.device("cpu"))
        self._dtype = dtype
        self._wide_dtype = wide_dtype(binding, dtype)

    def linear(self, *names: str, is_wide: bool = False) -> Linear:
        bounds = [self._modules[name] for name in names]
        whole = torch.cat([read_weight(b, zeros_offset=self._zeros_offset, read=self._read) for b in bounds])
        return cpu_linear(whole, self._wide_dtype if is_wide else self._dtype)

    def are_alike(self, *names: str) -> bool:  # noqa: ARG002 - a CPU's layers take their matrices one by one
        return False

    def tied_head(self, embedding: Tensor) -> Linear:
        return cpu_linear(embedding, self._wide_dtype)

    def experts(self, name: str) -> Experts:
        of_layer, count = _experts_under(name, self._modules), self._num_experts
        each = (plain_expert(of_layer, i, self._read, self._zeros_offset, self._dtype) for i in range(count))
        return cpu_experts(((gate_up.mT, down.mT) for gate_up, down in each), count)

    def embedding(self, name: str) -> Tensor:
        return self._read(self._modules[name].tensors["weight"]).to(self._dtype)


class NotedParts:
    """Parts of nothing, which note the tensors that real ones are made of: `groups` in the order of loading."""

    device = torch.device("cpu")

    def __init__(self, spec: ModelSpec, binding: Binding) -> None:
        self.has_mtp = "mtp.fc" in binding.modules
        self.groups: list[list[TensorEntry]] = []
        self._num_experts = spec.num_experts
        self._modules = binding.modules

    def linear(self, *names: str, is_wide: bool = False) -> Linear:  # noqa: ARG002 - the same tensors
        self._note(self._modules[name] for name in names)
        return PlainLinear(_NOTHING)

    def are_alike(self, *names: str) -> bool:
        return are_one([self._modules[name] for name in names])

    def tied_head(self, embedding: Tensor) -> Linear:
        return PlainLinear(embedding)

    def experts(self, name: str) -> Experts:
        of_layer = _experts_under(name, self._modules)
        for batch in expert_batches(of_layer, self._num_experts):
            self._note(of_layer(index, part) for index in batch for part in EXPERT_PARTS)
        return PlainExperts(_NOTHING, _NOTHING)

    def small(self, name: str) -> Tensor:
        self._note([self._modules[name]])
        return _NOTHING

    def embedding(self, name: str) -> Tensor:
        self._note([self._modules[name]])
        return _NOTHING

    def _note(self, bounds: Iterable[Bound]) -> None:
        self.groups.append([entry for bound in bounds for entry in weight_tensors(bound).values()])


_NOTHING = torch.empty(0, 0)


def _experts_under(name: str, modules: Mapping[str, Bound]) -> ExpertOf:
    return lambda index, part: modules[f"{name}.{index}.{part}"]


def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    load_format: LoadFormat = LoadFormat.AUTO,
    *,
    with_mtp: bool = True,
) -> Qwen35:
    """The model in `directory` on `device`, with activations in `dtype`; the vision tower stays on disk.

    So does the MTP head, unless it is wanted and there.

    Strict: its headers are checked first, each tensor is bound once, leftovers and absences are errors. Beyond the
    model itself there are at most the reader's staging buffer and the stored tensors of the module that is repacked.
    """
    if load_format is LoadFormat.DUMMY:
        # Here because dummy.py stands on this file.
        from onebox.model.dummy import HYBRID, dummy_model

        spec = spec_from_config(read_json(directory / "config.json"))
        return dummy_model(spec, {} if device.type == "cpu" else HYBRID, device, dtype, with_mtp=with_mtp)
    with _collector_paused():
        checkpoint = open_checkpoint(directory)
        binding = bind(checkpoint)
        refuse_problems(directory, binding)
        order = loading_order(checkpoint.spec, binding, with_mtp=with_mtp)
        with _reader(checkpoint, order, device, load_format) as reader:
            parts: Parts = (
                CpuParts(checkpoint, binding, reader.read, dtype)
                if device.type == "cpu"
                else CheckpointParts(checkpoint, binding, reader.read, device)
            )
            model = put_together(checkpoint.spec, parts, dtype, with_mtp=with_mtp)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for reference cycles meanwhile: among the entries of 100,000 tensors it doubles the time to plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def loading_order(spec: ModelSpec, binding: Binding, *, with_mtp: bool = True) -> list[list[TensorEntry]]:
    """The tensors of the model, in groups that are asked for together, in the order in which they are."""
    parts = NotedParts(spec, binding)
    put_together(spec, parts, torch.float32, with_mtp=with_mtp)
    noted = {entry.name for group in parts.groups for entry in group}
    for bound in binding.modules.values():
        left = [entry.name for entry in weight_tensors(bound).values() if entry.name not in noted]
        kind = bound.module.module_class
        if left and kind is not ModuleClass.VISION and (with_mtp or not kind.in_mtp):
            raise MismatchError(f"{left[0]} belongs to no layer that the model is put together from.")
    return parts.groups


def _reader(
    checkpoint: Checkpoint, order: list[list[TensorEntry]], device: torch.device, load_format: LoadFormat
) -> TensorReader:
    if load_format is LoadFormat.FASTSAFETENSORS:
        return FastReader(checkpoint, order, device)
    return StagedReader(order, device)


def put_together(spec: ModelSpec, parts: Parts, dtype: torch.dtype, *, with_mtp: bool = True) -> Qwen35:
    """The model made of `parts`; `dtype` is that of activations."""
    prefix, full = spec.text_prefix, set(spec.full_layers)
    embedding = parts.embedding(f"{prefix}embed_tokens")
    layers = tuple(
        _layer(parts, f"{prefix}layers.{index}", is_full=index in full) for index in range(spec.num_hidden_layers)
    )
    model = Qwen35(
        spec=spec,
        dtype=dtype,
        embedding=embedding,
        layers=layers,
        norm=parts.small(f"{prefix}norm"),
        lm_head=parts.tied_head(embedding) if spec.tie_word_embeddings else parts.linear("lm_head", is_wide=True),
        mtp=_mtp_head(parts) if with_mtp and parts.has_mtp else None,
        frequencies=rotary_frequencies(spec.rope_theta, spec.rotary_dim).to(parts.device),
    )
    return fused(model) if parts.device.type == "cuda" else model


def fused(model: Qwen35) -> Qwen35:
    """The same model, its decode steps in few launches as far as the layers' formats have them."""
    return replace(
        model,
        is_fused=all(can_fuse(model.spec, layer) for layer in model.layers),
        is_mtp_fused=model.mtp is not None and can_fuse(model.spec, model.mtp.layer),
    )


def _layer(parts: Parts, name: str, *, is_full: bool) -> Layer:
    layer = Layer(
        input_norm=parts.small(f"{name}.input_layernorm"),
        mixer=_attention(parts, f"{name}.self_attn") if is_full else _delta_net(parts, f"{name}.linear_attn"),
        post_norm=parts.small(f"{name}.post_attention_layernorm"),
        mixture=_mixture(parts, f"{name}.mlp"),
    )
    return cpu_layer(layer)


def _attention(parts: Parts, name: str) -> Attention:
    return Attention(
        qkv_proj=parts.linear(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
        o_proj=parts.linear(f"{name}.o_proj"),
        q_norm=parts.small(f"{name}.q_norm"),
        k_norm=parts.small(f"{name}.k_norm"),
    )


def _delta_net(parts: Parts, name: str) -> DeltaNet:
    conv = parts.small(f"{name}.conv1d").squeeze(1)
    inputs = (f"{name}.in_proj_qkv", f"{name}.in_proj_z")
    gates = (f"{name}.in_proj_b", f"{name}.in_proj_a")
    is_joined = parts.are_alike(*inputs, *gates)
    return DeltaNet(
        qkvz_proj=parts.linear(*inputs, *gates) if is_joined else parts.linear(*inputs),
        gates_proj=None if is_joined else parts.linear(*gates),
        out_proj=parts.linear(f"{name}.out_proj"),
        weights=DeltaWeights(conv, parts.small(f"{name}.A_log"), parts.small(f"{name}.dt_bias")),
        norm=parts.small(f"{name}.norm"),
    )


def _mixture(parts: Parts, name: str) -> Mixture:
    shared = f"{name}.shared_expert"
    return Mixture(
        router=parts.linear(f"{name}.gate", f"{name}.shared_expert_gate", is_wide=True),
        experts=parts.experts(f"{name}.experts"),
        shared_gate_up=parts.linear(f"{shared}.gate_proj", f"{shared}.up_proj"),
        shared_down=parts.linear(f"{shared}.down_proj"),
    )


def _mtp_head(parts: Parts) -> MtpHead:
    return MtpHead(
        embedding_norm=parts.small("mtp.pre_fc_norm_embedding"),
        hidden_norm=parts.small("mtp.pre_fc_norm_hidden"),
        fc=parts.linear("mtp.fc"),
        layer=_layer(parts, "mtp.layers.0", is_full=True),
        norm=parts.small("mtp.norm"),
    )
