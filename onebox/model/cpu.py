"""Linears, experts and layers on a CPU, where small models run: compiled if Numba is installed, else plain torch.

Every stored format is converted to the activations' dtype once, at load: unpacking at each call would cost more than
the bytes it saves. The head's and the router's results are read in float32 whatever the activations are, so their
weights are not rounded (`head_dtype`). A row's bits do not depend on the other rows: `compiled/` and
`kernels/common/invariant.py` explain how.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.checkpoint.bind import Binding
from onebox.kernels.common.arrays import Array, array, quietly, silu, tensor
from onebox.kernels.common.invariant import FEW, any_multiple_is_alike, filled, product
from onebox.model import compiled
from onebox.model.experts import Experts, stack
from onebox.model.layers import StreamLayer
from onebox.model.layers.plain import Mixer, PlainLayer
from onebox.model.linear import DecodeActivations, Linear, RowLinear, same_kind

__all__ = ["CpuExperts", "CpuLinear", "cpu_experts", "cpu_layer", "cpu_linear", "has_float32_output", "head_dtype"]

# Compiled forms are imported where they are used: their modules need Numba.


def has_float32_output(name: str) -> bool:
    """Whether the results of the module of this name are read in float32."""
    return name.endswith(("lm_head", ".mlp.gate", ".mlp.shared_expert_gate"))


def head_dtype(binding: Binding, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the weights of such modules, with activations of `dtype`.

    float32; or bfloat16, half the bytes, if all are stored so: compiled products widen them and sum in float32, so the
    results have the same bits.
    """
    stored = [bound for name, bound in binding.modules.items() if has_float32_output(name)]
    are_bfloat16 = all(bound.is_plain and bound.tensors["weight"].dtype == "BF16" for bound in stored)
    return dtype if compiled.is_available() and are_bfloat16 else torch.float32


def cpu_linear(weight: Tensor, dtype: torch.dtype) -> Linear:
    """The linear of weight [N, K] stored in `dtype`: float32, or bfloat16 with bfloat16 activations."""
    if not compiled.is_available():
        return CpuLinear(weight.to(dtype).T.contiguous().T)
    from onebox.model.compiled.linear import CompiledLinear

    return CompiledLinear.of(weight.to(dtype))


def cpu_experts(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Experts:
    """`count` experts from batches of gate_up [B, H, 2I], the gate's columns first, and down [B, I, H].

    float32 or bfloat16; only one batch at a time is in memory twice.
    """
    if not compiled.is_available():
        return CpuExperts(*stack(iter(batches), count))
    from onebox.model.compiled.blocks import to_blocks
    from onebox.model.compiled.linear import CompiledExperts

    return CompiledExperts(*stack(((to_blocks(gate_up), to_blocks(down)) for gate_up, down in batches), count))


def cpu_layer(layer: PlainLayer[Mixer]) -> StreamLayer:
    """The layer compiled, if Numba is installed and compiled code can read its matrices; else the layer itself."""
    if not compiled.is_available():
        return layer
    from onebox.model.layers.compiled import compile_layer

    return compile_layer(layer) or layer


@dataclass(frozen=True)
class CpuLinear:
    """Through torch's products."""

    weight: Tensor
    """[N, K], its transpose contiguous."""

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.prefill(rows.x, out_dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return product(x.to(self.weight.dtype), self.weight).to(out_dtype or x.dtype)

    def blank(self, num_rows: int) -> "CpuLinear":
        return CpuLinear(self.weight.new_empty(self.weight.shape[1], num_rows).T)

    def copy_rows(self, source: RowLinear, rows: Tensor, places: Tensor) -> None:
        self.weight[places] = same_kind(self, source).weight[rows]


@dataclass(frozen=True)
class CpuExperts:
    """gate_up [E, H, 2I], the gate's columns first, and down [E, I, H]; float32 or bfloat16."""

    gate_up: Tensor
    down: Tensor

    def decode(self, rows: DecodeActivations, ids: Tensor, weights: Tensor) -> Tensor:
        return self.prefill(rows.x, ids, weights)

    @quietly
    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = self._chosen(x.to(self.gate_up.dtype), ids) * array(weights)[:, :, None]
        total = own[:, 0]
        for slot in range(1, own.shape[1]):
            total += own[:, slot]
        return torch.from_numpy(np.ascontiguousarray(total))

    def _chosen(self, x: Tensor, ids: Tensor) -> Array:
        """[R, k, H]: each row through its experts; the three ways give the same bits."""
        if x.dtype is torch.float32 and ids.numel():
            if len(x) <= FEW and 2 * ids.numel() <= len(self.gate_up):
                return self._through_few(x, ids)
            counts = np.bincount(ids.numpy().ravel(), minlength=len(self.gate_up))
            capacity = -(-int(counts.max()) // FEW) * FEW
            if len(counts) * capacity <= _MAX_PADDING * ids.numel() and any_multiple_is_alike():
                return self._through_all(x, ids, counts, capacity)
        return self._through_each(x, ids)

    @cached_property
    def _each(self) -> list[tuple[Tensor, Tensor]]:
        """(gate_up [H, 2I], down [I, H]) of every expert."""
        return list(zip(self.gate_up.unbind(0), self.down.unbind(0), strict=True))

    def _through_few(self, x: Tensor, ids: Tensor) -> Array:
        """At most FEW rows, all of them through each expert that any of them chose."""
        chosen = ids.tolist()
        places = {expert: place for place, expert in enumerate(dict.fromkeys(ids.flatten().tolist()))}
        padded, (_, inner, hidden) = filled(x), self.down.shape
        both = x.new_empty(len(places), FEW, 2 * inner)
        for expert, place in places.items():
            torch.mm(padded, self._each[expert][0], out=both[place])
        mixed = _inner(both)
        out = x.new_empty(len(places), FEW, hidden)
        for expert, place in places.items():
            torch.mm(mixed[place], self._each[expert][1], out=out[place])
        return array(out)[[[places[expert] for expert in row] for row in chosen], np.arange(len(x))[:, None]]

    def _through_all(self, x: Tensor, ids: Tensor, counts: NDArray[np.int64], capacity: int) -> Array:
        """All experts in one batched product, each over its own rows padded to `capacity`."""
        flat = ids.numpy().ravel()
        order = flat.argsort(kind="stable")
        firsts = np.arange(len(counts)) * capacity - (np.cumsum(counts) - counts)
        places = np.empty_like(order)
        places[order] = np.arange(len(flat)) + np.repeat(firsts, counts)
        source = np.zeros(len(counts) * capacity, dtype=np.int64)
        source[places] = np.arange(len(flat)) // ids.shape[1]
        taken = x.index_select(0, torch.from_numpy(source)).view(len(counts), capacity, -1)
        out = torch.bmm(_inner(torch.bmm(taken, self.gate_up)), self.down)
        return array(out).reshape(len(source), -1).take(places.reshape(ids.shape), axis=0)

    def _through_each(self, x: Tensor, ids: Tensor) -> Array:
        """The rows of each expert through it alone."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.gate_up)).tolist()
        sorted_rows = x[order // ids.shape[1]]
        parts = []
        for expert, some in enumerate(torch.split(sorted_rows, counts)):
            if len(some):
                gate_up, down = self._each[expert]
                parts.append(product(_inner(product(some, gate_up.T)), down.T))
        own = torch.empty(len(flat), self.down.shape[2], dtype=x.dtype)
        own[order] = torch.cat(parts) if parts else own
        return array(own.view(*ids.shape, -1))


_MAX_PADDING = 4
"""Padded rows per real row, over all experts, beyond which each expert is called alone."""


def _inner(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up of [..., 2I], in its dtype."""
    both, half = array(gate_up), gate_up.shape[-1] // 2
    inner = silu(both[..., :half])
    inner *= both[..., half:]
    return tensor(inner, gate_up.dtype)
