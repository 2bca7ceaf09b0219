"""Decode on a GPU in few launches: sums are left to the next operation, norms leave out their division.

Computes what `plain.py` computes for the few rows of a decode or verify step, where the number of launches counts and
not the arithmetic: each linear leaves its partial sums to the operation that reads them, and no operation exists only
to add, to convert or to divide. A row's bits do not depend on the other rows, here as in `plain.py`; between the two
they differ in the last places, so a device always uses one of them. Prefill is the plain layer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.attention import kv_write_fused, paged_attention_fused
from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.delta_net import delta_net_step_fused, gated_norm_fused
from onebox.kernels.norm import add_rms_norm_fused, rms_norm
from onebox.kernels.router import add_rms_norm_router, route_fused
from onebox.model.batch import Batch
from onebox.model.experts import PartExperts
from onebox.model.layers import Layer, RotaryTable, Stream
from onebox.model.layers.plain import Attention, DeltaNet, Mixer, Mixture, PlainLayer, PlainStack
from onebox.model.linear import FloatLinear, PartLinear, PlainLinear
from onebox.model.memory import LayerMemory, require_pages, require_pool
from onebox.model.taps import Taps

__all__ = [
    "FusedAttention",
    "FusedLayer",
    "FusedStack",
    "FusedStream",
    "RowNorm",
    "add_up",
    "final_norm",
    "fuse_attention",
    "fuse_layer",
    "fuse_stack",
    "stream_from",
]

_GROUP = 128


class FusedStream(NamedTuple):
    """The residual stream between fused layers: residual + sum of parts + share * sum of shared, not added up yet."""

    residual: Tensor | None
    """[R, H], any float dtype; None for zeros."""
    parts: Tensor
    """float32 [P, R, H]."""
    shared: Tensor | None = None
    """float32 [S, R, H]: the shared expert's output."""
    share: Tensor | None = None
    """float32 [R]: its gate."""


class RowNorm(NamedTuple):
    """A norm of the stream, and the dtype of its rows."""

    weight: Tensor
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class FusedAttention:
    """Adds float32 parts [P, R, H], from normed rows."""

    plain: Attention
    qkv_proj: PartLinear
    o_proj: PartLinear

    def decode(self, rows: FixedRows, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor:
        pages = require_pages(memory)
        qkv, query = self.write_kv(rows, pages, batch, table)
        scale = self.plain.spec.head_dim**-0.5
        mixed = paged_attention_fused(
            query, pages, batch.page_table, batch.seen, batch.cu_rows, scale, qkv, batch.max_rows
        )
        return self.o_proj.parts(mixed)

    def write_kv(self, rows: FixedRows, pages: KVPages, batch: Batch, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """Writes the rows' keys and values into the pages; (the projection's parts, the queries [R, Q, D])."""
        plain, qkv = self.plain, self.qkv_proj.parts(rows)
        eps, dtype = plain.spec.rms_norm_eps, rows.x.dtype
        return qkv, kv_write_fused(qkv, plain.q_norm, plain.k_norm, *table, eps, dtype, pages, batch.slot_mapping)


@dataclass(frozen=True)
class FusedDeltaNet:
    """Adds float32 parts [P, R, H], from normed rows."""

    plain: DeltaNet
    qkvz_proj: PartLinear
    gates_proj: PartLinear | None
    out_proj: PartLinear

    def decode(self, rows: FixedRows, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Tensor:  # noqa: ARG002 - DeltaNet rotates nothing
        pool, plain, spec = require_pool(memory), self.plain, self.plain.spec
        joined = self.qkvz_proj.parts(rows)
        qkv, z, *rest = joined.tensor_split([spec.conv_dim, spec.conv_dim + spec.value_dim], dim=-1)
        gates = self.gates_proj.parts(rows) if self.gates_proj else rest[0]
        b, a = gates.chunk(2, dim=-1)
        mixed = delta_net_step_fused(qkv, a, b, plain.weights, pool, batch.cu_rows, batch.slots, batch.num_accepted)
        return self.out_proj.parts(gated_norm_fused(mixed, z, plain.norm, spec.rms_norm_eps, rows.x.dtype))


@dataclass(frozen=True)
class FusedMixture:
    """The norm goes with the router's product, its choice with the shared expert's gate_up, the planes with its down.

    That is, where the router is stored in BF16 and the shared expert's weights are floats; others are products of their
    own.
    """

    num_experts_per_tok: int
    router: PartLinear
    stored_router: Tensor | None
    """bfloat16 [E + 1, H], if it is stored so: its product then goes together with the norm before it."""
    experts: PartExperts
    shared_gate_up: PartLinear
    shared_down: PartLinear
    stored_gate_up: FloatWeight | None
    stored_down: FloatWeight | None

    def decode(self, before: Tensor, parts: Tensor, norm: RowNorm, batch: Batch) -> FusedStream:
        """The stream after the experts, from that before the mixer, the mixer's parts and the norm of their sum."""
        rows, residual, router_parts = self._router_parts(before, parts, norm)
        ids, weights, share, gate_up = route_fused(
            router_parts,
            self.num_experts_per_tok,
            rows,
            self.stored_gate_up,
            batch.num_rows,
            is_divided=self.stored_router is None,
        )
        if gate_up is None:
            gate_up = self.shared_gate_up.parts(rows)
        slots, inner, shared = self.experts.fused(rows, ids, weights, (gate_up, self.stored_down))
        if shared is None and inner is not None:
            shared = self.shared_down.parts(self.shared_down.rows_of(inner))
        return FusedStream(residual, slots.transpose(0, 1), shared, share)

    def _router_parts(self, before: Tensor, parts: Tensor, norm: RowNorm) -> tuple[FixedRows, Tensor, Tensor]:
        """(the experts' input, the stream before it, parts of the router's logits)."""
        if self.stored_router is not None:
            return add_rms_norm_router(before, parts, *norm, self.stored_router)
        rows, residual = add_up(FusedStream(before, parts), *norm)
        return rows, residual, self.router.parts(rows)


@dataclass(frozen=True)
class FusedLayer:
    """A plain layer whose decode is fused. `dtype` is that of activations."""

    plain: PlainLayer[Mixer]
    mixer: FusedAttention | FusedDeltaNet
    mixture: FusedMixture
    dtype: torch.dtype

    def decode(self, stream: FusedStream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> FusedStream:
        return self.decode_rows(*self.input_rows(stream), memory, batch, table)

    def decode_rows(
        self, rows: FixedRows, residual: Tensor, memory: LayerMemory, batch: Batch, table: RotaryTable
    ) -> FusedStream:
        """`decode` from what `input_rows` gives."""
        parts = self.mixer.decode(rows, memory, batch, table)
        norm = RowNorm(self.plain.post_norm, self.plain.eps, self.dtype)
        return self.mixture.decode(residual, parts, norm, batch)

    def prefill(self, stream: Stream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Stream:
        return self.plain.prefill(stream, memory, batch, table)

    def input_rows(self, stream: FusedStream) -> tuple[FixedRows, Tensor]:
        """(the mixer's input, the stream before it)."""
        return add_up(stream, self.plain.input_norm, self.plain.eps, self.dtype)


@dataclass(frozen=True)
class FusedStack:
    """Fused layers and the final norm; `plain` has the same layers for prefill."""

    plain: PlainStack
    layers: tuple[FusedLayer, ...]
    dtype: torch.dtype

    def decode(
        self,
        embedded: Tensor,
        memory: Sequence[LayerMemory],
        batch: Batch,
        table: RotaryTable,
        taps: Taps | None = None,
    ) -> Tensor:
        stream = FusedStream(embedded, embedded.new_empty(0, *embedded.shape, dtype=torch.float32))
        for place, (layer, own) in enumerate(zip(self.layers, memory, strict=True)):
            # A layer's first operation adds up the stream behind the layer before it.
            rows, residual = layer.input_rows(stream)
            if taps and taps.wants(place - 1):
                taps.put(place - 1, residual)
            stream = layer.decode_rows(rows, residual, own, batch, table)
        norm, eps = self.plain.norm, self.plain.spec.rms_norm_eps
        _, total = add_up(stream, norm, eps, self.dtype)
        if taps and taps.wants(len(self.layers) - 1):
            taps.put(len(self.layers) - 1, total)
        return rms_norm(total, norm, eps, self.dtype)

    def prefill(
        self,
        embedded: Tensor,
        memory: Sequence[LayerMemory],
        batch: Batch,
        table: RotaryTable,
        taps: Taps | None = None,
    ) -> Tensor:
        return self.plain.prefill(embedded, memory, batch, table, taps)


def add_up(stream: FusedStream, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[FixedRows, Tensor]:
    """(rows of `dtype`, normed but for the division; the stream added up)."""
    return add_rms_norm_fused(
        stream.residual, stream.parts, weight, eps, dtype, shared=stream.shared, share=stream.share
    )


def final_norm(stream: FusedStream, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[R, H] of `dtype`: the stream added up and normed, division included."""
    _, total = add_up(stream, weight, eps, dtype)
    return rms_norm(total, weight, eps, dtype)


def stream_from(linear: PartLinear, x: Tensor) -> FusedStream:
    """The stream of a linear's output of rows [R, K]."""
    return FusedStream(None, linear.parts(linear.rows_of(x)))


def fuse_stack(stack: PlainStack, dtype: torch.dtype) -> FusedStack | None:
    """The stack with decode fused, or None if one of its layers has a format or size without fused operations."""
    layers = [fuse_layer(layer, dtype) for layer in stack.layers]
    fused = tuple(layer for layer in layers if layer)
    return FusedStack(stack, fused, dtype) if len(fused) == len(layers) else None


def fuse_layer(layer: Layer[Stream], dtype: torch.dtype) -> FusedLayer | None:
    """The layer with its decode fused, if its linears have parts and its columns are whole groups of 128."""
    if not isinstance(layer, PlainLayer):
        return None
    mixer = fuse_attention(layer.mixer) if isinstance(layer.mixer, Attention) else _fuse_delta_net(layer.mixer)
    mixture = _fuse_mixture(layer.mixture)
    return FusedLayer(layer, mixer, mixture, dtype) if mixer and mixture else None


def fuse_attention(mixer: Attention) -> FusedAttention | None:
    qkv, out, width = mixer.qkv_proj, mixer.o_proj, mixer.spec.num_attention_heads * mixer.spec.head_dim
    if width % _GROUP == 0 and isinstance(qkv, PartLinear) and isinstance(out, PartLinear):
        return FusedAttention(mixer, qkv, out)
    return None


def _fuse_delta_net(mixer: DeltaNet) -> FusedDeltaNet | None:
    spec, qkvz, gates, out = mixer.spec, mixer.qkvz_proj, mixer.gates_proj, mixer.out_proj
    if _GROUP % spec.linear_value_head_dim or spec.value_dim % _GROUP:
        return None
    if isinstance(qkvz, PartLinear) and isinstance(gates, PartLinear | None) and isinstance(out, PartLinear):
        return FusedDeltaNet(mixer, qkvz, gates, out)
    return None


def _fuse_mixture(mixture: Mixture) -> FusedMixture | None:
    spec, experts, (router, gate_up, down) = mixture.spec, mixture.experts, mixture.linears
    if any(
        size % _GROUP for size in (spec.hidden_size, spec.moe_intermediate_size, spec.shared_expert_intermediate_size)
    ):
        return None
    if not (isinstance(router, PartLinear) and isinstance(gate_up, PartLinear) and isinstance(down, PartLinear)):
        return None
    if not isinstance(experts, PartExperts):
        return None
    stored = [linear.stored if isinstance(linear, FloatLinear) else None for linear in (gate_up, down)]
    stored_router = router.weight if isinstance(router, PlainLinear) else None
    return FusedMixture(spec.num_experts_per_tok, router, stored_router, experts, gate_up, down, *stored)
