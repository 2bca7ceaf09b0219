"""The DFlash block drafter on the kernels: features of committed tokens into its context, blocks of drafts out of it.

Computes what `dflash_reference.py` defines, for several sequences at once. It has no embedding and no head: rows come
in embedded by the model, and its hidden states go to the model's head. Norm weights are stored as factors; here they
are offsets from one, as the kernels take them.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onebox.kernels.attention import rotary_table
from onebox.kernels.attention.frequencies import rotary_frequencies
from onebox.kernels.common.dispatch import uses_kernels
from onebox.kernels.common.rows import GROUP_COLUMNS
from onebox.kernels.draft import (
    block_attention,
    block_attention_fused,
    block_heads,
    swiglu_fused,
    write_context,
)
from onebox.kernels.draft.tensors import BlockContext, BlockMask, ContextRows
from onebox.kernels.experts import swiglu
from onebox.kernels.norm import add_rms_norm, rms_norm
from onebox.model.layers.fused import FusedStream, add_up, final_norm
from onebox.model.layers.plain import start_stream
from onebox.model.linear import DecodeActivations, Linear, PartLinear
from onebox.model.memory import DraftMemory
from onebox.spec.dflash import DFlashSpec

__all__ = ["DFlash", "DFlashLayer", "DrafterWeights", "build_dflash"]

_NO_SECTIONS = (0, 0, 0)
"""Positions have one axis."""


class DrafterWeights(Protocol):
    """A drafter's weights by module name, on its device."""

    @property
    def device(self) -> torch.device: ...

    def linear(self, *names: str) -> Linear:
        """One linear over the rows of all named matrices, in this order."""

    def small(self, name: str) -> Tensor:
        """A norm's weight, float32: the factor itself."""


class DFlashLayer(NamedTuple):
    """One layer; norm weights are offsets from one."""

    input_norm: Tensor
    qkv_proj: Linear
    q_norm: Tensor
    k_norm: Tensor
    o_proj: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    mask: BlockMask
    place: int
    """i for the i-th layer of the rings, -1 - i for the i-th of the pages."""

    def cached(self, memory: DraftMemory) -> Tensor:
        """Its context in memory."""
        return memory.rings[:, self.place] if self.place >= 0 else memory.pages[:, -1 - self.place]


@dataclass(frozen=True)
class DFlash:
    """The loaded drafter. `dtype` is that of activations."""

    spec: DFlashSpec
    dtype: torch.dtype
    fc: Linear
    hidden_norm: Tensor
    context_kv: Linear
    """Keys, then values, of one layer after the other."""
    key_norms: Tensor
    """float32 [L, D]."""
    places: Tensor
    """int32 [L]: the layers' places."""
    layers: tuple[DFlashLayer, ...]
    norm: Tensor
    frequencies: Tensor
    is_fused: bool
    """Whether a decode step leaves sums to the next operation, as `layers/fused.py` does."""

    def decode_context(self, features: Tensor, positions: Tensor, rows: ContextRows, memory: DraftMemory) -> None:
        """Writes the context of a decode step's rows: features [R, taps * H] at positions int64 [R]."""
        if not self.is_fused:
            fused = self._normed(self.fc.decode(DecodeActivations(features)))
            self._write(self.context_kv.decode(DecodeActivations(fused)).unsqueeze(0), positions, rows, memory)
            return
        fc, context_kv = _part(self.fc), _part(self.context_kv)
        stream = FusedStream(None, fc.parts(fc.rows_of(features)))
        fixed, _ = add_up(stream, self.hidden_norm, self.spec.rms_norm_eps, self.dtype)
        self._write(context_kv.parts(fixed), positions, rows, memory)

    def prefill_context(self, features: Tensor, positions: Tensor, rows: ContextRows, memory: DraftMemory) -> None:
        """The same for the many rows of a prefill."""
        fused = self._normed(self.fc.prefill(features))
        self._write(self.context_kv.prefill(fused).unsqueeze(0), positions, rows, memory)

    def draft(self, embedded: Tensor, positions: Tensor, context: BlockContext, memory: DraftMemory) -> Tensor:
        """Hidden states [B * n, H] of the masks of B blocks of 1 + n rows, for the model's head.

        embedded [B * (1 + n), H], rotated by positions int64 [B * (1 + n)]. Nothing is written.
        """
        rotation = self._rotation(positions)
        hidden = (self._fused if self.is_fused else self._plain)(embedded, rotation, context, memory)
        return hidden.view(len(context.length), -1, hidden.shape[1])[:, 1:].flatten(0, 1)

    def _plain(
        self, embedded: Tensor, rotation: tuple[Tensor, Tensor], context: BlockContext, memory: DraftMemory
    ) -> Tensor:
        eps, scale = self.spec.rms_norm_eps, self.spec.head_dim**-0.5
        added, residual = start_stream(embedded)
        for layer in self.layers:
            normed, residual = add_rms_norm(added, residual, layer.input_norm, eps)
            qkv = layer.qkv_proj.decode(DecodeActivations(normed)).unsqueeze(0)
            heads = block_heads(qkv, layer.q_norm, layer.k_norm, rotation, eps, self._kv_heads, self.dtype)
            mixed = block_attention(*heads, layer.cached(memory), context, layer.mask, scale)
            added = layer.o_proj.decode(DecodeActivations(mixed))
            normed, residual = add_rms_norm(added, residual, layer.post_norm, eps)
            inner = swiglu(layer.gate_up.decode(DecodeActivations(normed)))
            added = layer.down.decode(DecodeActivations(inner))
        return add_rms_norm(added, residual, self.norm, eps)[0]

    def _fused(
        self, embedded: Tensor, rotation: tuple[Tensor, Tensor], context: BlockContext, memory: DraftMemory
    ) -> Tensor:
        eps, dtype, scale = self.spec.rms_norm_eps, self.dtype, self.spec.head_dim**-0.5
        stream = FusedStream(embedded, embedded.new_empty(0, *embedded.shape, dtype=torch.float32))
        for layer in self.layers:
            rows, residual = add_up(stream, layer.input_norm, eps, dtype)
            qkv = _part(layer.qkv_proj).parts(rows)
            heads = block_heads(qkv, layer.q_norm, layer.k_norm, rotation, eps, self._kv_heads, dtype)
            mixed = block_attention_fused(*heads, layer.cached(memory), context, layer.mask, scale)
            added = _part(layer.o_proj).parts(mixed)
            rows, residual = add_up(FusedStream(residual, added), layer.post_norm, eps, dtype)
            inner = swiglu_fused(_part(layer.gate_up).parts(rows), dtype)
            stream = FusedStream(residual, _part(layer.down).parts(inner))
        return final_norm(stream, self.norm, eps, dtype)

    @property
    def _kv_heads(self) -> int:
        return self.spec.num_key_value_heads

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.hidden_norm, self.spec.rms_norm_eps)

    def _write(self, kv_parts: Tensor, positions: Tensor, rows: ContextRows, memory: DraftMemory) -> None:
        rotation, eps = self._rotation(positions), self.spec.rms_norm_eps
        write_context(kv_parts, self.key_norms, rotation, memory.rings, memory.pages, self.places, rows, eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(positions.expand(3, -1), self.frequencies, _NO_SECTIONS, 1.0)


def build_dflash(spec: DFlashSpec, parts: DrafterWeights, dtype: torch.dtype) -> DFlash:
    """The drafter made of `parts`; `dtype` is that of activations."""
    layers = tuple(_layer(spec, parts, index) for index in range(spec.num_hidden_layers))
    names = [f"layers.{index}.self_attn.{kind}_proj" for index in range(len(layers)) for kind in ("k", "v")]
    fc, context_kv = parts.linear("fc"), parts.linear(*names)
    return DFlash(
        spec,
        dtype,
        fc,
        _offset(parts, "hidden_norm"),
        context_kv,
        key_norms=torch.stack([layer.k_norm for layer in layers]),
        places=torch.tensor([layer.place for layer in layers], dtype=torch.int32, device=parts.device),
        layers=layers,
        norm=_offset(parts, "norm"),
        frequencies=rotary_frequencies(spec.rope_theta, spec.head_dim).to(parts.device),
        is_fused=uses_kernels(parts.device) and _can_fuse(spec, (fc, context_kv), layers),
    )


def _layer(spec: DFlashSpec, parts: DrafterWeights, index: int) -> DFlashLayer:
    name, sliding = f"layers.{index}", spec.sliding_layers
    attention = f"{name}.self_attn"
    return DFlashLayer(
        input_norm=_offset(parts, f"{name}.input_layernorm"),
        qkv_proj=parts.linear(*(f"{attention}.{kind}_proj" for kind in "qkv")),
        q_norm=_offset(parts, f"{attention}.q_norm"),
        k_norm=_offset(parts, f"{attention}.k_norm"),
        o_proj=parts.linear(f"{attention}.o_proj"),
        post_norm=_offset(parts, f"{name}.post_attention_layernorm"),
        gate_up=parts.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
        down=parts.linear(f"{name}.mlp.down_proj"),
        mask=BlockMask(spec.causal(index), spec.window(index)),
        place=sliding.index(index) if index in sliding else -1 - (index - sum(other < index for other in sliding)),
    )


def _offset(parts: DrafterWeights, name: str) -> Tensor:
    return parts.small(name).to(torch.float32) - 1


def _can_fuse(spec: DFlashSpec, linears: tuple[Linear, ...], layers: tuple[DFlashLayer, ...]) -> bool:
    own = [linear for layer in layers for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up, layer.down)]
    widths = spec.hidden_size, spec.intermediate_size, spec.num_attention_heads * spec.head_dim
    fits = all(width % GROUP_COLUMNS == 0 for width in widths) and GROUP_COLUMNS % spec.head_dim == 0
    return fits and all(isinstance(linear, PartLinear) for linear in (*linears, *own))


def _part(linear: Linear) -> PartLinear:
    if not isinstance(linear, PartLinear):
        raise TypeError(f"A {type(linear).__name__} has no parts; the drafter should not be fused.")
    return linear
