"""Layers over packed weights, one operation after the other: decode and prefill on any device.

They compute what `reference.py` defines, for several sequences at once, in bfloat16 or float32 activations with a
float32 residual stream. On a CPU the kernels' plain twins run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.attention import attention_gate, kv_write, paged_attention, paged_attention_prefill, qk_norm_rope
from onebox.kernels.delta_net import delta_net_prefill, delta_net_step, gated_norm
from onebox.kernels.delta_net.memory import DeltaWeights
from onebox.kernels.experts import add_shared, swiglu
from onebox.kernels.norm import add_rms_norm
from onebox.kernels.router import route
from onebox.model.batch import Batch
from onebox.model.experts import Experts
from onebox.model.layers import Layer, RotaryTable, Stream
from onebox.model.linear import DecodeActivations, Linear
from onebox.model.memory import LayerMemory, require_pages, require_pool
from onebox.model.taps import Taps
from onebox.spec.model import ModelSpec

__all__ = ["Attention", "DeltaNet", "Mixer", "Mixture", "PlainLayer", "PlainStack", "start_stream"]


class Mixer(Protocol):
    """What mixes a sequence's tokens: [R, H] from normed rows [R, H]. Memory of the wrong kind is a MismatchError."""

    @property
    def linears(self) -> tuple[Linear, ...]: ...

    def decode(self, rows: DecodeActivations, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor: ...

    def prefill(self, x: Tensor, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor: ...


@dataclass(frozen=True)
class Attention:
    """Gated attention over KV pages: one projection for queries, gates, keys and values."""

    spec: ModelSpec
    qkv_proj: Linear
    o_proj: Linear
    q_norm: Tensor
    k_norm: Tensor

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv_proj, self.o_proj

    def decode(self, rows: DecodeActivations, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor:
        pages = require_pages(memory)
        query, gate = self.write_kv(self.qkv_proj.decode(rows), pages, batch, table)
        scale = self.spec.head_dim**-0.5
        mixed = paged_attention(query, pages, batch.page_table, batch.seen, batch.cu_rows, scale, batch.max_rows)
        return self.o_proj.decode(DecodeActivations(attention_gate(mixed, gate)))

    def prefill(self, x: Tensor, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor:
        pages = require_pages(memory)
        query, gate = self.write_kv(self.qkv_proj.prefill(x), pages, batch, table)
        start = batch.seen - batch.cu_rows.diff()
        mixed = paged_attention_prefill(query, pages, batch.page_table, start, batch.cu_rows, self.spec.head_dim**-0.5)
        return self.o_proj.prefill(attention_gate(mixed, gate))

    def write_kv(self, qkv: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """Writes the projected rows' keys and values into the pages; their queries and gates, [R, heads, D] each."""
        spec, kv_heads = self.spec, self.spec.num_key_value_heads
        widths = [2 * spec.num_attention_heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.head_dim]
        q_gate, k, v = torch.split(qkv, widths, dim=-1)
        query, gate, key = qk_norm_rope(q_gate, k, self.q_norm, self.k_norm, *table, spec.rms_norm_eps)
        kv_write(pages, key, v.reshape(-1, kv_heads, spec.head_dim), batch.slot_mapping)
        return query, gate


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta rule over a pool of states: one projection for qkv and z, one for the two gates, or one for all.

    It rotates nothing, so it leaves the rotary table alone.
    """

    spec: ModelSpec
    qkvz_proj: Linear
    gates_proj: Linear | None
    """None where the gates' rows are the last of `qkvz_proj`."""
    out_proj: Linear
    weights: DeltaWeights
    norm: Tensor

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkvz_proj, *((self.gates_proj,) if self.gates_proj else ()), self.out_proj

    def decode(self, rows: DecodeActivations, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor:  # noqa: ARG002
        pool = require_pool(memory)
        joined = self.qkvz_proj.decode(rows)
        qkv, z, a, b = self._split(joined, self.gates_proj.decode(rows) if self.gates_proj else None)
        mixed = delta_net_step(qkv, a, b, self.weights, pool, batch.cu_rows, batch.slots, batch.num_accepted)
        return self.out_proj.decode(DecodeActivations(gated_norm(mixed, z, self.norm, self.spec.rms_norm_eps)))

    def prefill(self, x: Tensor, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor:  # noqa: ARG002
        pool = require_pool(memory)
        joined = self.qkvz_proj.prefill(x)
        qkv, z, a, b = self._split(joined, self.gates_proj.prefill(x) if self.gates_proj else None)
        mixed = delta_net_prefill(qkv, a, b, self.weights, pool, batch.cu_rows, batch.slots, batch.required_saves)
        return self.out_proj.prefill(gated_norm(mixed, z, self.norm, self.spec.rms_norm_eps))

    def _split(self, joined: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(qkv, z, a, b) of the projected rows; `gates` is None where they are the last columns of `joined`."""
        edges = [self.spec.conv_dim, self.spec.conv_dim + self.spec.value_dim]
        qkv, z, rest = joined.tensor_split(edges, dim=-1)
        b, a = (rest if gates is None else gates).chunk(2, dim=-1)
        return qkv, z, a, b


@dataclass(frozen=True)
class Mixture:
    """Router, routed experts and the shared expert: [R, H] from normed rows.

    The shared expert's gate is the router's last row.
    """

    spec: ModelSpec
    router: Linear
    experts: Experts
    shared_gate_up: Linear
    shared_down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.router, self.shared_gate_up, self.shared_down

    def decode(self, rows: DecodeActivations, num_rows: Tensor | None = None) -> Tensor:
        """Rows from num_rows (int32 [1]) on belong to no sequence: no expert is read for them."""
        logits = self.router.decode(rows, torch.float32)
        routed = self.experts.decode(rows, *self._route(logits, num_rows))
        shared = self.shared_down.decode(DecodeActivations(swiglu(self.shared_gate_up.decode(rows))))
        return add_shared(routed, shared, logits[:, self.spec.num_experts])

    def prefill(self, x: Tensor, num_rows: Tensor | None = None) -> Tensor:
        """`num_rows` as for `decode`."""
        logits = self.router.prefill(x, torch.float32)
        routed = self.experts.prefill(x, *self._route(logits, num_rows))
        shared = self.shared_down.prefill(swiglu(self.shared_gate_up.prefill(x)))
        return add_shared(routed, shared, logits[:, self.spec.num_experts])

    def _route(self, logits: Tensor, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(expert ids, weights) [R, k]."""
        return route(logits[:, : self.spec.num_experts].contiguous(), self.spec.num_experts_per_tok, num_rows)


M = TypeVar("M", bound=Mixer, covariant=True)  # a layer is frozen


@dataclass(frozen=True)
class PlainLayer(Generic[M]):
    """A mixer and its experts, each behind a norm."""

    input_norm: Tensor
    mixer: M
    post_norm: Tensor
    mixture: Mixture

    @property
    def eps(self) -> float:
        return self.mixture.spec.rms_norm_eps

    def decode(self, stream: Stream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Stream:
        normed, residual = self.input_rows(stream)
        added = self.mixer.decode(DecodeActivations(normed), memory, batch, table)
        normed, residual = add_rms_norm(added, residual, self.post_norm, self.eps)
        mixed = self.mixture.decode(DecodeActivations(normed), batch.num_rows)
        return Stream(mixed.to(normed.dtype), residual)

    def prefill(self, stream: Stream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Stream:
        added, residual = self.prefill_mixer(stream, memory, batch, table)
        normed, residual = add_rms_norm(added, residual, self.post_norm, self.eps)
        return Stream(self.mixture.prefill(normed, batch.num_rows).to(normed.dtype), residual)

    def prefill_mixer(self, stream: Stream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Stream:
        """The stream after the mixer: what the experts read."""
        normed, residual = self.input_rows(stream)
        return Stream(self.mixer.prefill(normed, memory, batch, table), residual)

    def write_kv(self, stream: Stream, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        """Writes the keys and values that `decode` would; the layer's mixer is attention."""
        if not isinstance(self.mixer, Attention):
            raise TypeError("Only attention has keys and values to write.")
        normed, _ = self.input_rows(stream)
        self.mixer.write_kv(self.mixer.qkv_proj.decode(DecodeActivations(normed)), pages, batch, table)

    def input_rows(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """(the mixer's input, the float32 stream before it), [R, H] each."""
        return add_rms_norm(*stream, self.input_norm, self.eps)


@dataclass(frozen=True)
class PlainStack:
    """Plain or compiled layers and the final norm."""

    spec: ModelSpec
    layers: tuple[Layer[Stream], ...]
    norm: Tensor

    def decode(
        self,
        embedded: Tensor,
        memory: Sequence[LayerMemory],
        batch: Batch,
        table: RotaryTable,
        taps: Taps | None = None,
    ) -> Tensor:
        stream = start_stream(embedded)
        for place, (layer, own) in enumerate(zip(self.layers, memory, strict=True)):
            stream = layer.decode(stream, own, batch, table)
            if taps and taps.wants(place):
                taps.put(place, stream.residual, stream.added)
        return self._hidden(stream)

    def prefill(
        self,
        embedded: Tensor,
        memory: Sequence[LayerMemory],
        batch: Batch,
        table: RotaryTable,
        taps: Taps | None = None,
    ) -> Tensor:
        stream = start_stream(embedded)
        for place, (layer, own) in enumerate(zip(self.layers, memory, strict=True)):
            stream = layer.prefill(stream, own, batch, table)
            if taps and taps.wants(place):
                # Many rows: added up and rounded at once, they take a third of the memory.
                taps.put(place, (stream.residual + stream.added).to(stream.added.dtype))
        return self._hidden(stream)

    def _hidden(self, stream: Stream) -> Tensor:
        return add_rms_norm(*stream, self.norm, self.spec.rms_norm_eps)[0]


def start_stream(added: Tensor) -> Stream:
    """The stream of rows [R, H] before the first layer."""
    return Stream(added, torch.zeros(added.shape, dtype=torch.float32, device=added.device))
