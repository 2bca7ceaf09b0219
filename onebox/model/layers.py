"""The parts of the model on the kernels: what a batch is, and the mixers, experts and layers over packed weights.

Layers compute what `reference.py` defines, for several sequences at once, in bfloat16 or float32 activations with a
float32 residual stream. On a CPU the kernels' plain twins run. `fused.py` has the same layers for a GPU's decode steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.attention import attention_gate, kv_write, paged_attention, paged_attention_prefill, qk_norm_rope
from onebox.kernels.delta_net import delta_net_prefill, delta_net_step, gated_norm
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.experts import add_shared, swiglu
from onebox.kernels.norm import add_rms_norm
from onebox.kernels.router import route
from onebox.model.experts import Experts
from onebox.model.linear import Linear, Phase, Rows
from onebox.spec.model import ModelSpec

__all__ = ["Attention", "Batch", "DeltaNet", "Layer", "Mixture", "MtpHead", "Shown", "Stage"]


@dataclass(frozen=True)
class Stage:
    """Neighbouring stretches of a prefill batch whose states are computed together, before those of the next stage.

    A prompt whose state is wanted at several of its positions comes as several stretches, one a stage. After the stage
    the states in the slots `copy_from` are copied into the slots `copy_to`.
    """

    first_row: int
    end_row: int
    cu_rows: Tensor
    """int32 [n + 1], from 0: the rows of the stage's n stretches."""
    slots: Tensor
    """int32 [n]."""
    copy_from: Tensor
    """int64 [m]."""
    copy_to: Tensor
    """int64 [m]."""


@dataclass(frozen=True)
class Shown:
    """Rows whose embedding comes from the vision tower in place of their token's."""

    rows: Tensor
    """int64 [m]."""
    embeddings: Tensor
    """[m, H]."""


@dataclass(frozen=True)
class Batch:
    """Rows of S stretches of sequences in one phase; complete when built. Integers live on the model's device.

    Stretch s has the rows cu_rows[s] .. cu_rows[s + 1] - 1. `seen` counts, for each stretch, the tokens its last row
    sees, that row included. `keep` says how many pending tokens of the last step each sequence accepted (decode only,
    where every sequence has one stretch). Prefill takes its DeltaNet slots from `stages`.
    """

    phase: Phase
    token_ids: Tensor
    """int64 [R]."""
    positions: Tensor
    """int64 [3, R]: time, height, width."""
    cu_rows: Tensor
    """int32 [S + 1]."""
    slots: Tensor
    """int32 [S]: each sequence's place in the DeltaNet pools."""
    keep: Tensor
    """int32 [S]."""
    seen: Tensor
    """int32 [S]."""
    page_table: Tensor
    """int32 [S, pages]."""
    kv_slots: Tensor
    """int64 [R]: where each row's keys and values go."""
    stages: tuple[Stage, ...] = ()
    shown: Shown | None = None


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
        query, gate = self.remember(spec, rows, pages, batch, table)
        scale = spec.head_dim**-0.5
        if batch.phase is Phase.DECODE:
            mixed = paged_attention(query, pages, batch.page_table, batch.seen, batch.cu_rows, scale)
        else:
            start = batch.seen - batch.cu_rows.diff()
            mixed = paged_attention_prefill(query, pages, batch.page_table, start, batch.cu_rows, scale)
        return self.o_proj(Rows(attention_gate(mixed, gate), rows.phase))

    def remember(
        self, spec: ModelSpec, rows: Rows, pages: KVPages, batch: Batch, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Writes the rows' keys and values into the pages; their queries and gates, [R, heads, D] each."""
        heads, kv_heads, head_dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        widths = [2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q_gate, k, v = torch.split(self.qkv_proj(rows), widths, dim=-1)
        query, gate, key = qk_norm_rope(q_gate, k, self.q_norm, self.k_norm, *table, spec.rms_norm_eps)
        kv_write(pages, key, v.reshape(-1, kv_heads, head_dim), batch.kv_slots)
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
        if batch.phase is Phase.DECODE:
            mixed = delta_net_step(qkv, a, b, self.weights, pool, batch.cu_rows, batch.slots, batch.keep)
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
    ) -> tuple[Tensor, Tensor]:
        """(what its experts add [R, H], the float32 stream before that [R, H]), from the same of the layer before."""
        normed, residual = add_rms_norm(added, residual, self.input_norm, spec.rms_norm_eps)
        rows = Rows(normed, batch.phase)
        if isinstance(self.mixer, Attention) and isinstance(memory, KVPages):
            added = self.mixer(spec, rows, memory, batch, table)
        elif isinstance(self.mixer, DeltaNet) and isinstance(memory, DeltaPool):
            added = self.mixer(spec, rows, memory, batch)
        normed, residual = add_rms_norm(added, residual, self.post_norm, spec.rms_norm_eps)
        return self.mixture(spec, Rows(normed, batch.phase)).to(normed.dtype), residual


@dataclass(frozen=True)
class MtpHead:
    """The head that drafts one token further: two norms, a projection, one attention layer, a norm."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: Linear
    layer: Layer
    norm: Tensor
