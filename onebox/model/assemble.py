"""Puts the model together: every module into its layer, straight into the kernels' layouts, from files or made up.

A `Parts` gives linears, experts and small tensors by module name; `CheckpointParts` reads them from a bound checkpoint,
`dummy.DummyParts` draws them. The layers are put together in one place for both.
"""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onebox.checkpoint.bind import Binding, Bound, bind
from onebox.checkpoint.source import open_checkpoint
from onebox.checkpoint.tensors import load
from onebox.checkpoint.weights import read_weight
from onebox.kernels.delta_net.memory import DeltaWeights
from onebox.kernels.rope.frequencies import rotary_frequencies
from onebox.model.experts import Experts, make_experts
from onebox.model.linear import Linear, PlainLinear, make_linear
from onebox.model.load import refuse_problems
from onebox.model.qwen3_5 import Attention, DeltaNet, Layer, Mixture, MtpHead, Qwen35
from onebox.spec.model import ModelSpec

__all__ = ["CheckpointParts", "Parts", "assemble", "put_together"]


class Parts(Protocol):
    """Where a model's parts come from. All tensors are on the model's device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def has_mtp(self) -> bool: ...

    def linear(self, *names: str) -> Linear:
        """One linear over the rows of all named matrices, in this order."""

    def experts(self, name: str) -> Experts:
        """The routed experts under `name`."""

    def small(self, name: str) -> Tensor:
        """A norm, a convolution or another small tensor, float32."""

    def embedding(self, name: str) -> Tensor:
        """The table of embeddings [V, H]: bfloat16, or float32 on a CPU."""


class CheckpointParts:
    """Parts out of a checkpoint, each brought over by itself: one module at a time is in host memory."""

    def __init__(self, spec: ModelSpec, binding: Binding, device: torch.device, zeros_offset: int) -> None:
        self.device = device
        self.has_mtp = "mtp.fc" in binding.modules
        self._num_experts = spec.num_experts
        self._modules = binding.modules
        self._zeros_offset = zeros_offset

    def linear(self, *names: str) -> Linear:
        return make_linear([self._modules[name] for name in names], self.device, self._zeros_offset)

    def experts(self, name: str) -> Experts:
        def expert(index: int, part: str) -> Bound:
            return self._modules[f"{name}.{index}.{part}"]

        return make_experts(expert, self._num_experts, self.device, self._zeros_offset)

    def small(self, name: str) -> Tensor:
        return read_weight(self._modules[name]).to(self.device)

    def embedding(self, name: str) -> Tensor:
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return load(self._modules[name].tensors["weight"]).to(dtype).to(self.device)


def assemble(directory: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Qwen35:
    """The model in `directory` on `device`. Its headers are checked first; the vision tower stays on disk."""
    checkpoint = open_checkpoint(directory)
    binding = bind(checkpoint)
    refuse_problems(directory, binding)
    parts = CheckpointParts(checkpoint.spec, binding, device, checkpoint.gptq_zeros_offset)
    return put_together(checkpoint.spec, parts, dtype)


def put_together(spec: ModelSpec, parts: Parts, dtype: torch.dtype) -> Qwen35:
    """The model made of `parts`; `dtype` is that of activations."""
    prefix, full = spec.text_prefix, set(spec.full_layers)
    embedding = parts.embedding(f"{prefix}embed_tokens")
    return Qwen35(
        spec=spec,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(
            _layer(parts, f"{prefix}layers.{index}", is_full=index in full) for index in range(spec.num_hidden_layers)
        ),
        norm=parts.small(f"{prefix}norm"),
        lm_head=PlainLinear(embedding) if spec.tie_word_embeddings else parts.linear("lm_head"),
        mtp=_mtp_head(parts) if parts.has_mtp else None,
        frequencies=rotary_frequencies(spec.rope_theta, spec.rotary_dim).to(parts.device),
    )


def _layer(parts: Parts, name: str, *, is_full: bool) -> Layer:
    return Layer(
        input_norm=parts.small(f"{name}.input_layernorm"),
        mixer=_attention(parts, f"{name}.self_attn") if is_full else _delta_net(parts, f"{name}.linear_attn"),
        post_norm=parts.small(f"{name}.post_attention_layernorm"),
        mixture=_mixture(parts, f"{name}.mlp"),
    )


def _attention(parts: Parts, name: str) -> Attention:
    return Attention(
        qkv_proj=parts.linear(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
        o_proj=parts.linear(f"{name}.o_proj"),
        q_norm=parts.small(f"{name}.q_norm"),
        k_norm=parts.small(f"{name}.k_norm"),
    )


def _delta_net(parts: Parts, name: str) -> DeltaNet:
    conv = parts.small(f"{name}.conv1d").squeeze(1)
    return DeltaNet(
        qkvz_proj=parts.linear(f"{name}.in_proj_qkv", f"{name}.in_proj_z"),
        gates_proj=parts.linear(f"{name}.in_proj_b", f"{name}.in_proj_a"),
        out_proj=parts.linear(f"{name}.out_proj"),
        weights=DeltaWeights(conv, parts.small(f"{name}.A_log"), parts.small(f"{name}.dt_bias")),
        norm=parts.small(f"{name}.norm"),
    )


def _mixture(parts: Parts, name: str) -> Mixture:
    shared = f"{name}.shared_expert"
    return Mixture(
        router=parts.linear(f"{name}.gate", f"{name}.shared_expert_gate"),
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
