"""A layer on a CPU whose decode steps are compiled; of a prompt, its experts and its products are.

Attention over pages of other formats than bfloat16 is left to the kernels' twins, and so are a prompt's mixers.
"""

from dataclasses import fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onebox.formats.kv_pages import PLAIN_BITS, KVPages
from onebox.kernels.arrays import Array, Stored, array, stored
from onebox.kernels.delta_net.memory import DeltaPool
from onebox.kernels.kv_write import kv_write
from onebox.kernels.norm import add_rms_norm
from onebox.kernels.paged_attention import paged_attention
from onebox.model.batch import Batch
from onebox.model.compiled import ahead
from onebox.model.compiled.arithmetic import add_norm, product
from onebox.model.compiled.attention import Projected, attend, gate_heads, rotate
from onebox.model.compiled.delta_net import DeltaArrays, PoolArrays, delta_step
from onebox.model.compiled.linear import CompiledExperts, CompiledLinear
from onebox.model.compiled.mixture import ExpertArrays, mixture_step
from onebox.model.compiled.threads import by_rows
from onebox.model.layers import Attention, DeltaNet, Layer
from onebox.model.linear import Phase, Rows
from onebox.spec.model import ModelSpec

__all__ = ["CompiledLayer"]


class CompiledLayer(Layer):
    """The same weights, read by compiled code."""

    @classmethod
    def of(cls, layer: Layer) -> Layer:
        """The layer compiled, if compiled code can read all of its matrices; else as it is."""
        parts = [*vars(layer.mixer).items(), *vars(layer.mixture).items()]
        matrices = [part for name, part in parts if name.endswith("_proj") or not isinstance(part, Tensor | tuple)]
        if not all(isinstance(part, CompiledLinear | CompiledExperts) for part in matrices):
            return layer
        made = cls(**{field.name: getattr(layer, field.name) for field in fields(layer)})
        ahead.start(is_narrow=made._is_narrow)
        return made

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
        eps = spec.rms_norm_eps
        if phase is Phase.PREFILL:
            mixed, stream = self._prefill_mixer(spec, added, residual, memory, batch, table)
        else:
            ahead.finish(is_narrow=self._is_narrow)
            if isinstance(memory, DeltaPool):
                mixed, stream = self._step(stored(added), array(residual), memory, batch, eps)
            else:
                mixed, stream = self._attend(spec, stored(added), array(residual), memory, batch, table)

        def through_experts(rows: slice) -> tuple[Stored, Array]:
            some, before = mixed[rows], stream[rows]
            out = np.empty(some.shape, dtype=np.uint16 if added.dtype is torch.bfloat16 else np.float32)
            return out, mixture_step(some, before, self._experts, spec.num_experts_per_tok, eps, out)

        out, total = by_rows(through_experts, len(mixed))
        return torch.from_numpy(out).view(added.dtype), torch.from_numpy(total)

    def _prefill_mixer(
        self,
        spec: ModelSpec,
        added: Tensor,
        residual: Tensor,
        memory: KVPages | DeltaPool,
        batch: Batch,
        table: tuple[Tensor, Tensor],
    ) -> tuple[Array, Array]:
        """(what the mixer adds, the stream before that), as `Layer` computes them."""
        normed, stream = add_rms_norm(added, residual, self.input_norm, spec.rms_norm_eps)
        rows = Rows(normed, Phase.PREFILL)
        if isinstance(self.mixer, Attention) and isinstance(memory, KVPages):
            normed = self.mixer(spec, rows, memory, batch, table)
        elif isinstance(self.mixer, DeltaNet) and isinstance(memory, DeltaPool):
            normed = self.mixer(spec, rows, memory, batch)
        return array(normed), array(stream)

    def _step(self, added: Stored, residual: Array, pool: DeltaPool, batch: Batch, eps: float) -> tuple[Array, Array]:
        """(what the mixer adds, the stream before that)."""
        edges = batch.cu_rows.numpy(), batch.slots.numpy(), batch.num_accepted.numpy()
        return delta_step(added, residual, self._delta_arrays, self._pool_arrays(pool), *edges, eps)

    def _pool_arrays(self, pool: DeltaPool) -> PoolArrays:
        """Made once, because a layer's pool is the same in every step."""
        if not self._latest or self._latest[0][0] is not pool:
            matrices, conv_rows, pending_rows, pending_gates = pool
            arrays = PoolArrays(matrices.numpy(), stored(conv_rows), stored(pending_rows), pending_gates.numpy())
            self._latest[:] = [(pool, arrays)]
        return self._latest[0][1]

    def _attend(
        self,
        spec: ModelSpec,
        added: Stored,
        residual: Array,
        pages: KVPages,
        batch: Batch,
        table: tuple[Tensor, Tensor],
    ) -> tuple[Array, Array]:
        """(what the mixer adds, the stream before that)."""
        mixer = self.mixer
        if not isinstance(mixer, Attention):
            raise TypeError("Pages of keys and values were given to a layer of DeltaNet.")
        normed, stream = add_norm(added, residual, array(self.input_norm), spec.rms_norm_eps)
        cos, sin = (np.ascontiguousarray(part.numpy()) for part in table)
        norms, scale = (array(mixer.q_norm), array(mixer.k_norm)), spec.head_dim**-0.5
        qkv = product(normed, _numbers(mixer.qkv_proj))
        brought = rotate(qkv, *norms, cos, sin, pages.kv_heads, spec.rms_norm_eps)
        if pages.format.key_bits == pages.format.value_bits == PLAIN_BITS:
            places = batch.slot_mapping.numpy(), batch.page_table.numpy(), batch.seen.numpy(), batch.cu_rows.numpy()
            mixed = attend(brought, stored(pages.key_codes), stored(pages.value_codes), *places, scale)
        else:
            mixed = _attend_coded(brought, pages, batch, scale)
        return product(gate_heads(mixed, brought.gate), _numbers(mixer.o_proj)), stream

    @cached_property
    def _is_narrow(self) -> bool:
        """Whether matrices are bfloat16, as states then are."""
        return _numbers(self.mixture.shared_down).dtype == np.uint16

    @cached_property
    def _delta_arrays(self) -> DeltaArrays:
        if not isinstance(self.mixer, DeltaNet):
            raise TypeError("A pool of states was given to a layer of attention.")
        mixer, (conv, a_log, dt_bias) = self.mixer, self.mixer.weights
        return DeltaArrays(
            input_norm=array(self.input_norm),
            qkvz=_numbers(mixer.qkvz_proj),
            gates=_numbers(mixer.gates_proj),
            out=_numbers(mixer.out_proj),
            conv=array(conv.T.contiguous()),
            rate=-a_log.to(torch.float64).exp().numpy(),
            dt_bias=array(dt_bias),
            norm=array(mixer.norm),
        )

    @cached_property
    def _latest(self) -> list[tuple[DeltaPool, PoolArrays]]:
        """The pool of the latest step, if there was one."""
        return []

    @cached_property
    def _experts(self) -> ExpertArrays:
        experts, mixture = self.mixture.experts, self.mixture
        if not isinstance(experts, CompiledExperts):
            raise TypeError(f"Compiled code cannot read {type(experts).__name__}.")
        shared = _numbers(mixture.shared_gate_up), _numbers(mixture.shared_down)
        return ExpertArrays(array(self.post_norm), _numbers(mixture.router), *experts.stored, *shared)


def _attend_coded(brought: Projected, pages: KVPages, batch: Batch, scale: float) -> Array:
    """Mixed values [R, Q * D]; the pages then hold the rows' own keys and values."""
    query, key, value = (torch.from_numpy(part) for part in (brought.query, brought.key, brought.value))
    kv_write(pages, key, value, batch.slot_mapping)
    mixed = paged_attention(query, pages, batch.page_table, batch.seen, batch.cu_rows, scale)
    return array(mixed.flatten(1))


def _numbers(linear: object) -> Stored:
    if not isinstance(linear, CompiledLinear):
        raise TypeError(f"Compiled code cannot read a {type(linear).__name__}.")
    return linear.stored
