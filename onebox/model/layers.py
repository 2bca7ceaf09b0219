"""The parts of the model on the kernels: the mixers, experts and layers over packed weights.

Layers compute what `reference.py` defines, for several sequences at once, in bfloat16 or float32 activations with a
float32 residual stream. On a CPU the kernels' plain twins run. `fused.py` has the same layers for a GPU's decode steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.delta_net import delta_net_prefill, delta_net_step, gated_norm
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.gate import add_shared, attention_gate, swiglu
from onebox.kernels.kv_write import kv_write
from onebox.kernels.norm import add_rms_norm
from onebox.kernels.paged_attention import paged_attention, paged_attention_prefill
from onebox.kernels.rope import qk_norm_rope
from onebox.kernels.router import route
from onebox.model.batch import Batch, Stage
from onebox.model.experts import Experts
from onebox.model.linear import Linear, Phase, Rows
from onebox.spec.model import ModelSpec

__all__ = ["Attention", "DeltaNet", "Layer", "Mixture", "MtpHead"]


@dataclass(frozen=True)
class Attention:
    """Gated attention: one projection for queries, gates, keys and values."""

    qkv_proj: Linear
    o_proj: Linear
    q_norm: Tensor
    k_norm: Tensor

    def __call__(
        self, spec: ModelSpec, rows: Rows, pages: KVPages, batch: Batch, table: tuple[Tensor, Tensor]
    ) -> Tensor:
        query, gate = self.write_kv(spec, rows, pages, batch, table)
        scale = spec.head_dim**-0.5
        if rows.phase is Phase.DECODE:
            mixed = paged_attention(query, pages, batch.page_table, batch.seen, batch.cu_rows, scale)
        else:
            start = batch.seen - batch.cu_rows.diff()
            mixed = paged_attention_prefill(query, pages, batch.page_table, start, batch.cu_rows, scale)
        return self.o_proj(Rows(attention_gate(mixed, gate), rows.phase))

    def write_kv(
        self, spec: ModelSpec, rows: Rows, pages: KVPages, batch: Batch, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Writes the rows' keys and values into the pages; their queries and gates, [R, heads, D] each."""
        heads, kv_heads, head_dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        widths = [2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q_gate, k, v = torch.split(self.qkv_proj(rows), widths, dim=-1)
        query, gate, key = qk_norm_rope(q_gate, k, self.q_norm, self.k_norm, *table, spec.rms_norm_eps)
        kv_write(pages, key, v.reshape(-1, kv_heads, head_dim), batch.slot_mapping)
        return query, gate


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta rule: one projection for qkv and z, one for the two gates, or one for all of them."""

    qkvz_proj: Linear
    gates_proj: Linear | None
    """None where the gates' rows are the last of `qkvz_proj`."""
    out_proj: Linear
    weights: DeltaWeights
    norm: Tensor

    def __call__(self, spec: ModelSpec, rows: Rows, pool: DeltaPool, batch: Batch) -> Tensor:
        edges = [spec.conv_dim, spec.conv_dim + spec.value_dim]
        qkv, z, gates = self.qkvz_proj(rows).tensor_split(edges, dim=-1)
        b, a = (self.gates_proj(rows) if self.gates_proj else gates).chunk(2, dim=-1)
        if rows.phase is Phase.DECODE:
            mixed = delta_net_step(qkv, a, b, self.weights, pool, batch.cu_rows, batch.slots, batch.num_accepted)
        else:
            mixed = torch.cat([self._prefill(qkv, a, b, pool, stage) for stage in batch.stages])
        return self.out_proj(Rows(gated_norm(mixed, z, self.norm, spec.rms_norm_eps), rows.phase))

    def _prefill(self, qkv: Tensor, a: Tensor, b: Tensor, pool: DeltaPool, stage: Stage) -> Tensor:
        rows = slice(stage.first_row, stage.end_row)
        mixed = delta_net_prefill(qkv[rows], a[rows], b[rows], self.weights, pool, stage.cu_rows, stage.slots)
        if len(stage.copy_to):
            pool.matrices[stage.copy_to] = pool.matrices[stage.copy_from]
            pool.conv_rows[stage.copy_to] = pool.conv_rows[stage.copy_from]
        return mixed


@dataclass(frozen=True)
class Mixture:
    """Router, routed experts and the shared expert. The shared expert's gate is the router's last row."""

    router: Linear
    experts: Experts
    shared_gate_up: Linear
    shared_down: Linear

    def __call__(self, spec: ModelSpec, rows: Rows) -> Tensor:
        logits = self.router(rows, torch.float32)
        ids, weights = route(logits[:, : spec.num_experts].contiguous(), spec.num_experts_per_tok)
        routed = self.experts(rows, ids, weights)
        shared = self.shared_down(Rows(swiglu(self.shared_gate_up(rows)), rows.phase))
        return add_shared(routed, shared, logits[:, spec.num_experts])


@dataclass(frozen=True)
class Layer:
    """A mixer and its experts, each behind a norm."""

    input_norm: Tensor
    mixer: Attention | DeltaNet
    post_norm: Tensor
    mixture: Mixture

    def __call__(
        self,
        spec: ModelSpec,
        added: Tensor,
        residual: Tensor,
        memory: KVPages | DeltaPool,
        batch: Batch,
        table: tuple[Tensor, Tensor],
        phase: Phase,
    ) -> tuple[Tensor, Tensor]:
        """(what its experts add [R, H], the float32 stream before that [R, H]), from the same of the layer before."""
        normed, residual = add_rms_norm(added, residual, self.input_norm, spec.rms_norm_eps)
        rows = Rows(normed, phase)
        if isinstance(self.mixer, Attention) and isinstance(memory, KVPages):
            added = self.mixer(spec, rows, memory, batch, table)
        elif isinstance(self.mixer, DeltaNet) and isinstance(memory, DeltaPool):
            added = self.mixer(spec, rows, memory, batch)
        normed, residual = add_rms_norm(added, residual, self.post_norm, spec.rms_norm_eps)
        return self.mixture(spec, Rows(normed, phase)).to(normed.dtype), residual


@dataclass(frozen=True)
class MtpHead:
    """The head that drafts one token further: two norms, a projection, one attention layer, a norm."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: Linear
    layer: Layer
    norm: Tensor
