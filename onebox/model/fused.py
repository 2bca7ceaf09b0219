"""A decode step's layers in few launches: sums left to the next operation, norms without their division.

Computes what the layers of `layers.py` compute, for the few rows of a decode or verify step on a GPU, where launches
would decide and not arithmetic: each linear leaves its parts to be added by whoever reads them, and no operation exists
only to add, to convert or to divide. A `Stream` flows between them. A row's bits are its own here as there; between the
two ways they differ in the last places, so one device always takes one of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.add_norm import add_norm
from onebox.kernels.delta_net.memory import DeltaPool
from onebox.kernels.delta_step import delta_step
from onebox.kernels.experts import expert_slots
from onebox.kernels.int_linear import fixed_point
from onebox.kernels.mixer_rows import delta_rows
from onebox.kernels.norm import rms_norm
from onebox.kernels.paged_attention import paged_attention_rows
from onebox.kernels.route_shared import route_shared
from onebox.kernels.rows import FixedRows
from onebox.kernels.split_heads import write_heads
from onebox.model.batch import Batch
from onebox.model.experts import Int4Experts
from onebox.model.layers import Attention, DeltaNet, Layer, Mixture
from onebox.model.linear import FloatLinear, Linear, PartLinear
from onebox.spec.errors import UnsupportedError
from onebox.spec.model import ModelSpec

__all__ = ["Stream", "can_fuse", "fused_layer", "fused_norm", "fused_start", "fused_write_kv", "start_stream"]

_GROUP = 128


class Stream(NamedTuple):
    """What goes from layer to layer: residual + sum of parts + share * sum of shared, not added up yet."""

    residual: Tensor | None
    """[R, H], any float dtype; None for zeros."""
    parts: Tensor
    """float32 [P, R, H]."""
    shared: Tensor | None = None
    """float32 [S, R, H]: the shared expert's output."""
    share: Tensor | None = None
    """float32 [R]: its gate."""


def can_fuse(spec: ModelSpec, layer: Layer) -> bool:
    """Whether a layer's formats and sizes have the fused operations: INT4 experts, groups of 128 columns."""
    mixer, mixture = layer.mixer, layer.mixture
    linears = [mixture.router, mixture.shared_gate_up, mixture.shared_down]
    if isinstance(mixer, Attention):
        linears += [mixer.qkv_proj, mixer.o_proj]
        fits = spec.num_attention_heads * spec.head_dim % _GROUP == 0
    else:
        linears += [mixer.qkvz_proj, mixer.out_proj, *([mixer.gates_proj] if mixer.gates_proj else [])]
        fits = _GROUP % spec.linear_value_head_dim == 0 and spec.value_dim % _GROUP == 0
    sizes = (spec.hidden_size, spec.shared_expert_intermediate_size)
    return (
        fits
        and all(size % _GROUP == 0 for size in sizes)
        and isinstance(mixture.experts, Int4Experts)
        and all(isinstance(linear, PartLinear) for linear in linears)
    )


def start_stream(embedded: Tensor) -> Stream:
    """The stream of embeddings [R, H]: nothing is added to them yet."""
    return Stream(embedded, embedded.new_empty(0, *embedded.shape, dtype=torch.float32))


def fused_layer(
    spec: ModelSpec,
    layer: Layer,
    stream: Stream,
    memory: KVPages | DeltaPool,
    batch: Batch,
    table: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Stream:
    """The stream behind a layer; the memory then holds the rows' tokens, in DeltaNet as pending."""
    rows, residual = _normed(spec, stream, layer.input_norm, dtype)
    if isinstance(layer.mixer, Attention) and isinstance(memory, KVPages):
        mixed = _attend(spec, layer.mixer, rows, memory, batch, table)
    elif isinstance(layer.mixer, DeltaNet) and isinstance(memory, DeltaPool):
        mixed = _recur(spec, layer.mixer, rows, memory, batch)
    rows, residual = _normed(spec, Stream(residual, mixed), layer.post_norm, dtype)
    return _mix(spec, layer.mixture, rows, residual)


def fused_norm(spec: ModelSpec, stream: Stream, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, H] of `dtype`: the stream added up and normed, division and all."""
    _, total = _normed(spec, stream, weight, dtype)
    return rms_norm(total, weight, spec.rms_norm_eps, dtype)


def fused_start(rows: Tensor, linear: Linear) -> Stream:
    """The stream of what a linear makes of rows [R, K]."""
    return Stream(None, _parts(linear, _rows_for(linear, rows)))


def fused_write_kv(
    spec: ModelSpec,
    layer: Layer,
    stream: Stream,
    pages: KVPages,
    batch: Batch,
    table: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> None:
    """Writes the attention layer's KV entries of the rows and computes nothing else of it."""
    rows, _ = _normed(spec, stream, layer.input_norm, dtype)
    if isinstance(layer.mixer, Attention):
        _write_heads(spec, layer.mixer, rows, pages, batch, table)


def _normed(spec: ModelSpec, stream: Stream, weight: Tensor, dtype: torch.dtype) -> tuple[FixedRows, Tensor]:
    return add_norm(
        stream.residual, stream.parts, weight, spec.rms_norm_eps, dtype, shared=stream.shared, share=stream.share
    )


def _attend(
    spec: ModelSpec,
    mixer: Attention,
    rows: FixedRows,
    pages: KVPages,
    batch: Batch,
    table: tuple[Tensor, Tensor],
) -> Tensor:
    """float32 [P, R, H]: what attention adds."""
    qkv, query = _write_heads(spec, mixer, rows, pages, batch, table)
    scale = spec.head_dim**-0.5
    rows = paged_attention_rows(query, pages, batch.page_table, batch.seen, batch.cu_rows, scale, qkv)
    return _parts(mixer.o_proj, rows)


def _write_heads(
    spec: ModelSpec,
    mixer: Attention,
    rows: FixedRows,
    pages: KVPages,
    batch: Batch,
    table: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Writes the rows' keys and values into the pages; (the projection's parts, the queries [R, Q, D])."""
    qkv = _parts(mixer.qkv_proj, rows)
    weights = mixer.q_norm, mixer.k_norm
    query = write_heads(qkv, *weights, *table, spec.rms_norm_eps, rows.x.dtype, pages, batch.slot_mapping)
    return qkv, query


def _recur(spec: ModelSpec, mixer: DeltaNet, rows: FixedRows, pool: DeltaPool, batch: Batch) -> Tensor:
    """float32 [P, R, H]: what DeltaNet adds."""
    joined = _parts(mixer.qkvz_proj, rows)
    qkv, z, *rest = joined.tensor_split([spec.conv_dim, spec.conv_dim + spec.value_dim], dim=-1)
    gates = rest[0] if mixer.gates_proj is None else _parts(mixer.gates_proj, rows)
    b, a = gates.chunk(2, dim=-1)
    mixed = delta_step(qkv, a, b, mixer.weights, pool, batch.cu_rows, batch.slots, batch.num_accepted)
    out = delta_rows(mixed, z, mixer.norm, spec.rms_norm_eps, rows.x.dtype)
    return _parts(mixer.out_proj, out)


def _mix(spec: ModelSpec, mixture: Mixture, rows: FixedRows, residual: Tensor) -> Stream:
    """The stream behind the experts, from the rows into them."""
    experts, gate_up, down = mixture.experts, mixture.shared_gate_up, mixture.shared_down
    if not isinstance(experts, Int4Experts):
        raise UnsupportedError("Fused layers have INT4 experts.")
    beside = gate_up.stored if isinstance(gate_up, FloatLinear) else None
    router_parts = _parts(mixture.router, rows)
    ids, weights, share, gate_up_parts = route_shared(router_parts, spec.num_experts_per_tok, rows, beside)
    if gate_up_parts is None:
        gate_up_parts = _parts(gate_up, rows)
    tensors = (experts.gate_up, experts.gate_up_scale, experts.down, experts.down_scale)
    given = gate_up_parts, down.stored if isinstance(down, FloatLinear) else None
    slots, inner, shared = expert_slots(rows, ids, weights, *tensors, shared=given)
    if shared is None and inner is not None:
        shared = _parts(down, _rows_for(down, inner))
    return Stream(residual, slots.transpose(0, 1), shared, share)


def _parts(linear: Linear, rows: FixedRows) -> Tensor:
    if not isinstance(linear, PartLinear):
        raise UnsupportedError(f"{type(linear).__name__} has no parts.")
    return linear.parts(rows)


def _rows_for(linear: Linear, x: Tensor) -> FixedRows:
    """Rows as they are, in the form that a linear reads; float linears leave the fixed-point form alone."""
    if isinstance(linear, FloatLinear):
        return FixedRows(x, x, x, None)
    return FixedRows(x, *fixed_point(x), None)
