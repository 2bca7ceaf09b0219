"""Linears and experts on a CPU, where small models run: plain numbers, ready for its matrix products.

Every stored format becomes numbers in the activations' dtype once, at load: unpacking at each call would cost more than
the bytes it saves. The head and the router, whose results are wanted in float32 whatever the activations are, hold
float32 numbers. A row's bits are its own: `packed.py` and `kernels/invariant.py` say how.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.kernels.arrays import Array, array, quietly, silu, tensor
from onebox.kernels.invariant import FEW, any_multiple_is_alike, filled, product
from onebox.model.experts import Experts
from onebox.model.linear import Rows
from onebox.model.packed import Packed

__all__ = ["CpuExperts", "CpuLinear", "JoinedExperts", "cpu_experts"]


@dataclass(frozen=True)
class CpuLinear:
    """float32 numbers, or bfloat16 ones beside bfloat16 activations."""

    weight: Packed
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> "CpuLinear":
        return cls(Packed.of(weight.to(dtype)), dtype)

    def __call__(self, rows: Rows, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.weight(rows.x.to(self.dtype)).to(out_dtype or rows.x.dtype)


def cpu_experts(gate_up: Tensor, down: Tensor) -> Experts:
    """The experts of gate_up [E, H, 2I], the gate's columns first, and down [E, I, H], float32 or bfloat16.

    Small bfloat16 ones are joined: two products over all of them cost less than two calls for each that was chosen.
    float32 ones have twice the bytes, so only the chosen are read where they are few.
    """
    num_bytes = (gate_up.numel() + down.numel()) * down.element_size()
    if down.dtype is torch.bfloat16 and num_bytes <= _JOINED_BYTES:
        return JoinedExperts.of(gate_up, down)
    return CpuExperts(gate_up, down)


@dataclass(frozen=True)
class CpuExperts:
    """gate_up [E, H, 2I], the gate's columns first, and down [E, I, H]; float32 or bfloat16."""

    gate_up: Tensor
    down: Tensor

    @quietly
    def __call__(self, rows: Rows, ids: Tensor, weights: Tensor) -> Tensor:
        own = self._chosen(rows.x.to(self.gate_up.dtype), ids) * array(weights)[:, :, None]
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
            if len(counts) * capacity <= _MOST_VAIN * ids.numel() and any_multiple_is_alike():
                return self._through_all(x, ids, counts, capacity)
        return self._through_each(x, ids)

    @cached_property
    def _each(self) -> list[tuple[Tensor, Tensor]]:
        """(gate_up [H, 2I], down [I, H]) of every expert."""
        return list(zip(self.gate_up.unbind(0), self.down.unbind(0), strict=True))

    def _through_few(self, x: Tensor, ids: Tensor) -> Array:
        """All of at most FEW rows through each expert that one of them chose."""
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
        """The rows of each expert side by side, all experts at once, each with room for `capacity` rows."""
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


_JOINED_BYTES = 8 << 20
"""Experts of a layer that are joined: they come through a CPU's caches in the time of a few calls."""
_MOST_VAIN = 4
"""Rows that all experts together have room for, for each that is there, beyond which each expert is called alone."""


@dataclass(frozen=True)
class JoinedExperts:
    """All experts side by side, bfloat16: every row meets each, with the weight zero where it was not chosen."""

    num_experts: int
    inner: int
    gate_up: Packed
    """[2 E I, H]: the gates of all experts, then what they gate."""
    down: Packed
    """[H, E I]."""

    @classmethod
    def of(cls, gate_up: Tensor, down: Tensor) -> "JoinedExperts":
        num_experts, hidden, columns = gate_up.shape
        halves = gate_up.view(num_experts, hidden, 2, columns // 2).permute(2, 0, 3, 1)
        return cls(
            num_experts,
            columns // 2,
            Packed.of(halves.reshape(-1, hidden)),
            Packed.of(down.flatten(0, 1).T.contiguous()),
        )

    @quietly
    def __call__(self, rows: Rows, ids: Tensor, weights: Tensor) -> Tensor:
        x = rows.x.to(torch.bfloat16)
        shares = np.zeros((len(x), self.num_experts, 1), dtype=np.float32)
        shares[np.arange(len(x))[:, None], ids.numpy(), 0] = array(weights)
        both = array(self.gate_up(x)).reshape(len(x), 2, self.num_experts, self.inner)
        mixed = silu(both[:, 0])
        mixed *= both[:, 1]
        mixed *= shares
        return self.down(tensor(mixed.reshape(len(x), self.num_experts * self.inner), torch.bfloat16)).to(torch.float32)


def _inner(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up of [..., 2I], in its dtype."""
    both, half = array(gate_up), gate_up.shape[-1] // 2
    inner = silu(both[..., :half])
    inner *= both[..., half:]
    return tensor(inner, gate_up.dtype)
