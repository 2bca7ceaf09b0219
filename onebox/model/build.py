"""Builds the model from its weights (`parts.py`): every module into its layer, and the layers' implementation chosen.

On a CPU each layer is compiled where that is possible. On a GPU decode is fused if all layers have the formats for it,
and the MTP head's if its layer has. Nothing asks again in a step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from onebox.kernels.attention.frequencies import rotary_frequencies
from onebox.kernels.common.dispatch import uses_kernels
from onebox.kernels.delta_net.memory import DeltaWeights
from onebox.model.head import PlaneHead
from onebox.model.layers.fused import fuse_stack
from onebox.model.layers.plain import Attention, DeltaNet, Mixer, Mixture, PlainLayer, PlainStack
from onebox.model.linear import IntLinear, Linear
from onebox.model.mtp import MtpHead, fuse_head
from onebox.model.parts import Parts
from onebox.model.qwen3_5 import Qwen35
from onebox.model.trimmed_head import TrimmedHead
from onebox.spec.head_planes import planes_pay
from onebox.spec.model import ModelSpec

__all__ = ["build_model", "fuse_model", "trim_model"]

M = TypeVar("M", bound=Mixer)


def build_model(spec: ModelSpec, parts: Parts, dtype: torch.dtype, *, with_mtp: bool = True) -> Qwen35:
    """The model made of `parts`; `dtype` is that of activations."""
    prefix, full = spec.text_prefix, set(spec.full_layers)
    embedding = parts.embedding(f"{prefix}embed_tokens")
    layers = tuple(
        parts.choose_layer(_layer(spec, parts, f"{prefix}layers.{index}", _attention if index in full else _delta_net))
        for index in range(spec.num_hidden_layers)
    )
    model = Qwen35(
        spec=spec,
        dtype=dtype,
        embedding=embedding,
        stack=PlainStack(spec, layers, norm=parts.small(f"{prefix}norm")),
        lm_head=_lm_head(spec, parts, embedding),
        mtp=_mtp_head(spec, parts) if with_mtp and parts.has_mtp else None,
        frequencies=rotary_frequencies(spec.rope_theta, spec.rotary_dim, spec.yarn).to(parts.device),
    )
    return fuse_model(model) if uses_kernels(parts.device) else model


def fuse_model(model: Qwen35) -> Qwen35:
    """The same model with decode in few launches, its stack and its MTP head each if their formats allow it."""
    stack, head = model.stack, model.mtp
    if isinstance(stack, PlainStack):
        stack = fuse_stack(stack, model.dtype) or stack
    if isinstance(head, MtpHead):
        head = fuse_head(head, model.dtype) or head
    return replace(model, stack=stack, mtp=head)


def trim_model(model: Qwen35, token_ids: torch.Tensor) -> Qwen35:
    """The same model with a head of its own for drafts, over these tokens, int64 [D]."""
    with torch.inference_mode():
        return replace(model, draft_head=TrimmedHead.of(model.lm_head, token_ids.to(model.device)))


def _layer(spec: ModelSpec, parts: Parts, name: str, make_mixer: Callable[[ModelSpec, Parts, str], M]) -> PlainLayer[M]:
    return PlainLayer(
        input_norm=parts.small(f"{name}.input_layernorm"),
        mixer=make_mixer(spec, parts, name),
        post_norm=parts.small(f"{name}.post_attention_layernorm"),
        mixture=_mixture(spec, parts, f"{name}.mlp"),
    )


def _attention(spec: ModelSpec, parts: Parts, layer: str) -> Attention:
    name = f"{layer}.self_attn"
    return Attention(
        spec,
        qkv_proj=parts.linear(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
        o_proj=parts.linear(f"{name}.o_proj"),
        q_norm=parts.small(f"{name}.q_norm"),
        k_norm=parts.small(f"{name}.k_norm"),
    )


def _delta_net(spec: ModelSpec, parts: Parts, layer: str) -> DeltaNet:
    name = f"{layer}.linear_attn"
    conv = parts.small(f"{name}.conv1d").squeeze(1)
    inputs = (f"{name}.in_proj_qkv", f"{name}.in_proj_z")
    gates = (f"{name}.in_proj_b", f"{name}.in_proj_a")
    is_joined = parts.can_join(*inputs, *gates)
    return DeltaNet(
        spec,
        qkvz_proj=parts.linear(*inputs, *gates) if is_joined else parts.linear(*inputs),
        gates_proj=None if is_joined else parts.linear(*gates),
        out_proj=parts.linear(f"{name}.out_proj"),
        weights=DeltaWeights(conv, parts.small(f"{name}.A_log"), parts.small(f"{name}.dt_bias")),
        norm=parts.small(f"{name}.norm"),
    )


def _mixture(spec: ModelSpec, parts: Parts, name: str) -> Mixture:
    shared = f"{name}.shared_expert"
    return Mixture(
        spec,
        router=parts.linear(f"{name}.gate", f"{name}.shared_expert_gate", float32_output=True),
        experts=parts.experts(f"{name}.experts"),
        shared_gate_up=parts.linear(f"{shared}.gate_proj", f"{shared}.up_proj"),
        shared_down=parts.linear(f"{shared}.down_proj"),
    )


def _lm_head(spec: ModelSpec, parts: Parts, embedding: torch.Tensor) -> Linear:
    if spec.tie_word_embeddings:
        return parts.tied_head(embedding)
    head = parts.linear("lm_head", float32_output=True)
    if isinstance(head, IntLinear) and head.bits == 8 and planes_pay(head.tiles.nbytes, _memory_speed()):
        return PlaneHead.of(head)
    return head


def _memory_speed() -> float | None:
    """Bytes per second of the GPU's memory, by its clock and width; None without a GPU, or where it does not say.

    Not of the model's device: a model without weights is compiled for the GPU that will have them.
    """
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties()
    return 2e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8 or None


def _mtp_head(spec: ModelSpec, parts: Parts) -> MtpHead:
    norms = parts.small("mtp.pre_fc_norm_embedding"), parts.small("mtp.pre_fc_norm_hidden")
    fc, layer = parts.linear("mtp.fc"), _layer(spec, parts, "mtp.layers.0", _attention)
    return MtpHead(*norms, fc, layer, parts.choose_layer(layer), norm=parts.small("mtp.norm"))
