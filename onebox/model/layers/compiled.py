"""Decode on a CPU as machine code: a layer is two calls. Importing this needs Numba.

Of prefill, the experts and all products are compiled; its mixers are the plain ones on the kernels' twins, and so is
attention over pages in other formats than bfloat16.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onebox.formats.kv_pages import PLAIN_BITS, KVPages
from onebox.kernels.attention import kv_write, paged_attention
from onebox.kernels.common.arrays import Array, Stored, array, stored, stored_state
from onebox.kernels.delta_net.memory import DeltaPool
from onebox.model.batch import Batch
from onebox.model.compiled import ahead
from onebox.model.compiled.arithmetic import add_norm, product
from onebox.model.compiled.attention import Projected, attend, gate_heads, rotate, write_kv
from onebox.model.compiled.delta_net import DeltaArrays, PoolArrays, delta_step
from onebox.model.compiled.linear import CompiledExperts, CompiledLinear
from onebox.model.compiled.mixture import ExpertArrays, mixture_step
from onebox.model.compiled.threads import by_rows
from onebox.model.layers import RotaryTable, Stream
from onebox.model.layers.plain import Attention, DeltaNet, Mixer, PlainLayer
from onebox.model.memory import LayerMemory, require_pages, require_pool

__all__ = ["CompiledLayer", "compile_layer"]


@dataclass(frozen=True)
class CompiledAttention:
    """(what attention adds, the float32 stream before it), [R, H] each, from the stream before the layer's norm."""

    plain: Attention
    input_norm: Array
    qkv: Stored
    out: Stored

    def decode(
        self, added: Stored, residual: Array, memory: LayerMemory, batch: Batch, table: RotaryTable
    ) -> tuple[Array, Array]:
        pages, scale = require_pages(memory), self.plain.spec.head_dim**-0.5
        projected, stream = self._project(added, residual, pages, table)
        if _is_plain(pages):
            places = batch.slot_mapping.numpy(), batch.page_table.numpy(), batch.seen.numpy(), batch.cu_rows.numpy()
            mixed = attend(projected, stored(pages.key_codes), stored(pages.value_codes), *places, scale)
        else:
            mixed = _attend_quantized(projected, pages, batch, scale)
        return product(gate_heads(mixed, projected.gate), self.out), stream

    def write_kv(self, added: Stored, residual: Array, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        """Writes the keys and values that `decode` would."""
        projected, _ = self._project(added, residual, pages, table)
        if _is_plain(pages):
            write_kv(projected, stored(pages.key_codes), stored(pages.value_codes), batch.slot_mapping.numpy())
        else:
            key, value = torch.from_numpy(projected.key), torch.from_numpy(projected.value)
            kv_write(pages, key, value, batch.slot_mapping)

    def _project(self, added: Stored, residual: Array, pages: KVPages, table: RotaryTable) -> tuple[Projected, Array]:
        plain, eps = self.plain, self.plain.spec.rms_norm_eps
        normed, stream = add_norm(added, residual, self.input_norm, eps)
        cos, sin = (np.ascontiguousarray(part.numpy()) for part in table)
        norms = array(plain.q_norm), array(plain.k_norm)
        return rotate(product(normed, self.qkv), *norms, cos, sin, pages.kv_heads, eps), stream


@dataclass(frozen=True)
class CompiledDeltaNet:
    """(what DeltaNet adds, the float32 stream before it), [R, H] each, from the stream before the layer's norm."""

    arrays: DeltaArrays
    eps: float
    _latest: list[tuple[DeltaPool, PoolArrays]] = field(default_factory=list)
    """The pool of the latest step, if there was one: a layer's pool is the same in every step."""

    def decode(
        self,
        added: Stored,
        residual: Array,
        memory: LayerMemory,
        batch: Batch,
        table: RotaryTable,  # noqa: ARG002 - DeltaNet rotates nothing
    ) -> tuple[Array, Array]:
        pool = self._pool_arrays(require_pool(memory))
        edges = batch.cu_rows.numpy(), batch.slots.numpy(), batch.num_accepted.numpy()
        return delta_step(added, residual, self.arrays, pool, *edges, self.eps)

    def _pool_arrays(self, pool: DeltaPool) -> PoolArrays:
        if not self._latest or self._latest[0][0] is not pool:
            matrices, conv_rows, pending_rows, pending_gates = pool
            arrays = PoolArrays(stored_state(matrices), stored(conv_rows), stored(pending_rows), pending_gates.numpy())
            self._latest[:] = [(pool, arrays)]
        return self._latest[0][1]


@dataclass(frozen=True)
class CompiledLayer:
    """A plain layer whose weights are read by compiled code."""

    plain: PlainLayer[Mixer]
    mixer: CompiledAttention | CompiledDeltaNet
    experts: ExpertArrays

    def decode(self, stream: Stream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Stream:
        ahead.finish(is_bfloat16=_is_bfloat16(self.experts))
        mixed, residual = self.mixer.decode(stored(stream.added), array(stream.residual), memory, batch, table)
        return self._through_experts(mixed, residual, stream.added.dtype)

    def write_kv(self, stream: Stream, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        """Writes the keys and values that `decode` would; the layer's mixer is attention."""
        if not isinstance(self.mixer, CompiledAttention):
            raise TypeError("Only attention has keys and values to write.")
        self.mixer.write_kv(stored(stream.added), array(stream.residual), pages, batch, table)

    def prefill(self, stream: Stream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Stream:
        mixed, residual = self.plain.prefill_mixer(stream, memory, batch, table)
        return self._through_experts(array(mixed), array(residual), stream.added.dtype)

    def _through_experts(self, mixed: Array, residual: Array, dtype: torch.dtype) -> Stream:
        k, eps = self.plain.mixture.spec.num_experts_per_tok, self.plain.eps

        def through_experts(rows: slice) -> tuple[Stored, Array]:
            some, before = mixed[rows], residual[rows]
            out = np.empty(some.shape, dtype=np.uint16 if dtype is torch.bfloat16 else np.float32)
            return out, mixture_step(some, before, self.experts, k, eps, out)

        out, total = by_rows(through_experts, len(mixed))
        return Stream(torch.from_numpy(out).view(dtype), torch.from_numpy(total))


def compile_layer(layer: PlainLayer[Mixer]) -> CompiledLayer | None:
    """The layer compiled, or None if compiled code cannot read one of its matrices.

    The first call also starts to compile the largest functions in a second process.
    """
    mixer, experts = _compile_mixer(layer), _expert_arrays(layer)
    if mixer is None or experts is None:
        return None
    ahead.start(is_bfloat16=_is_bfloat16(experts))
    return CompiledLayer(layer, mixer, experts)


def _compile_mixer(layer: PlainLayer[Mixer]) -> CompiledAttention | CompiledDeltaNet | None:
    mixer, input_norm, numbers = layer.mixer, array(layer.input_norm), _numbers(*layer.mixer.linears)
    if isinstance(mixer, Attention) and len(numbers) == 2:
        return CompiledAttention(mixer, input_norm, *numbers)
    if isinstance(mixer, DeltaNet) and len(numbers) == 3:
        (qkvz, gates, out), (conv, a_log, dt_bias) = numbers, mixer.weights
        rate = -a_log.to(torch.float64).exp().numpy()
        small = array(conv.T.contiguous()), rate, array(dt_bias), array(mixer.norm)
        return CompiledDeltaNet(DeltaArrays(input_norm, qkvz, gates, out, *small), layer.eps)
    return None


def _expert_arrays(layer: PlainLayer[Mixer]) -> ExpertArrays | None:
    mixture, numbers = layer.mixture, _numbers(*layer.mixture.linears)
    if len(numbers) != len(mixture.linears) or not isinstance(mixture.experts, CompiledExperts):
        return None
    router, *shared = numbers
    return ExpertArrays(array(layer.post_norm), router, *mixture.experts.stored, *shared)


def _numbers(*linears: object) -> list[Stored]:
    """The matrices of those linears that compiled code can read."""
    return [linear.stored for linear in linears if isinstance(linear, CompiledLinear)]


def _is_bfloat16(experts: ExpertArrays) -> bool:
    """Whether matrices are bfloat16, as states then are."""
    return experts.shared_down.dtype == np.uint16


def _is_plain(pages: KVPages) -> bool:
    """Whether the pages are bfloat16."""
    return pages.format.key_bits == pages.format.value_bits == PLAIN_BITS


def _attend_quantized(projected: Projected, pages: KVPages, batch: Batch, scale: float) -> Array:
    """Mixed values [R, Q * D]; the pages then hold the rows' own keys and values."""
    query, key, value = (torch.from_numpy(part) for part in (projected.query, projected.key, projected.value))
    kv_write(pages, key, value, batch.slot_mapping)
    mixed: Tensor = paged_attention(query, pages, batch.page_table, batch.seen, batch.cu_rows, scale)
    return array(mixed.flatten(1))
