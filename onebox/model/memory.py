"""The memory of all sequences: KV pages, DeltaNet states, the last hidden vectors, and a block drafter's context.

Rows of the state pools are slots of running sequences first, then checkpoints of prefixes: no step computes on a
checkpoint. The states of all layers are one tensor, so that a state is copied in one operation. A block drafter's ring
is part of the state; its full layers have pages under the numbers of the model's own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages, allocate
from onebox.kernels.delta_net.memory import DeltaPool
from onebox.spec.dflash import DFlashSpec
from onebox.spec.dflash_memory import num_full_layers
from onebox.spec.errors import MismatchError
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.states import StateDtype

__all__ = ["DraftMemory", "LayerMemory", "Memory", "MemoryShape", "require_pages", "require_pool"]

LayerMemory = KVPages | DeltaPool
"""The memory of one layer: KV pages of attention, or the states of DeltaNet."""


def require_pages(memory: LayerMemory) -> KVPages:
    if not isinstance(memory, KVPages):
        raise MismatchError(f"An attention layer was given a {type(memory).__name__}: it needs KVPages.")
    return memory


def require_pool(memory: LayerMemory) -> DeltaPool:
    if not isinstance(memory, DeltaPool):
        raise MismatchError(f"A DeltaNet layer was given {type(memory).__name__}: it needs a DeltaPool.")
    return memory


@dataclass(frozen=True)
class MemoryShape:
    """How much memory, in counts."""

    kv: KVFormat
    num_pages: int
    num_slots: int
    num_checkpoints: int
    max_pending: int
    """Rows of one sequence in a step."""
    with_mtp: bool
    """Whether the MTP head has pages of its own."""
    state_dtype: StateDtype = StateDtype.FLOAT32
    drafter: DFlashSpec | None = None
    """A block drafter, which has rings and pages of its own."""
    ring_tokens: int = 0
    """Positions of its rings."""
    kept_rows: int = 0
    """Rows of a slot that may wait to be written into the context of a drafter that is not used; 0: none waits."""


@dataclass(frozen=True)
class DraftMemory:
    """A block drafter's context, keys and values of committed tokens, in the dtype of activations."""

    rings: Tensor
    """[slots + checkpoints, sliding layers, 2, KV, ring, D]: token p is at p % ring, keys at 0 and values at 1."""
    pages: Tensor
    """[pages, full layers, 2, KV, P, D]."""
    window: int
    """Positions that sliding layers see."""

    @classmethod
    def allocate(cls, spec: DFlashSpec, shape: MemoryShape, dtype: torch.dtype, device: torch.device) -> "DraftMemory":
        """Zeroed."""
        kv_heads, dim = spec.num_key_value_heads, spec.head_dim
        rows = shape.num_slots + shape.num_checkpoints
        rings = rows, len(spec.sliding_layers), 2, kv_heads, shape.ring_tokens, dim
        pages = shape.num_pages, num_full_layers(spec), 2, kv_heads, PAGE_TOKENS, dim
        return cls(
            torch.zeros(rings, dtype=dtype, device=device),
            torch.zeros(pages, dtype=dtype, device=device),
            spec.sliding_window or 0,
        )

    @property
    def ring_tokens(self) -> int:
        return self.rings.shape[4]

    def copy_tokens(self, source: int, target: int, first: int, end: int) -> None:
        """Copies the tokens from `first` to `end`, at most a ring, from one ring to the same places of another."""
        size = self.ring_tokens
        while first < end and size:
            count = min(end - first, size - first % size)
            place = slice(first % size, first % size + count)
            self.rings[target, :, :, :, place] = self.rings[source, :, :, :, place]
            first += count


@dataclass(frozen=True)
class Memory:
    """One entry per layer, KV pages for attention or a pool of states for DeltaNet, and the MTP head's own pages."""

    layers: tuple[LayerMemory, ...]
    mtp: KVPages | None
    matrices: Tensor
    """Of the state's dtype, [DeltaNet layers, slots + checkpoints, heads, Dk, Dv]; the pools hold its layers."""
    conv_rows: Tensor
    """[DeltaNet layers, slots + checkpoints, taps - 1, conv_dim]."""
    hidden: Tensor
    """[slots + checkpoints, H]: each sequence's hidden vector after its last prefilled token, for the MTP head."""
    drafts: DraftMemory | None = None
    kept_rows: int = 0
    """As in its shape; each decode step allocates its own."""

    @classmethod
    def allocate(cls, spec: ModelSpec, shape: MemoryShape, dtype: torch.dtype, device: torch.device) -> "Memory":
        """Zeroed memory; `dtype` is that of activations and convolution rows."""
        rows, num_layers = shape.num_slots + shape.num_checkpoints, len(spec.linear_layers)
        heads, taps = spec.linear_num_value_heads, spec.linear_conv_kernel_dim - 1
        head = (spec.linear_key_head_dim, spec.linear_value_head_dim)
        state_dtype = getattr(torch, shape.state_dtype.value)
        matrices = torch.zeros(num_layers, rows, heads, *head, dtype=state_dtype, device=device)
        conv_rows = torch.zeros(num_layers, rows, taps, spec.conv_dim, dtype=dtype, device=device)

        def pages() -> KVPages:
            return allocate(shape.kv, shape.num_pages, PAGE_TOKENS, spec.num_key_value_heads, spec.head_dim, device)

        def pool(index: int) -> DeltaPool:
            pending = (shape.num_slots, shape.max_pending)
            return DeltaPool(
                matrices[index],
                conv_rows[index],
                torch.zeros(*pending, spec.conv_dim, dtype=dtype, device=device),
                torch.zeros(*pending, 2, heads, dtype=torch.float32, device=device),
            )

        linear = {layer: index for index, layer in enumerate(spec.linear_layers)}
        return cls(
            tuple(pool(linear[i]) if i in linear else pages() for i in range(spec.num_hidden_layers)),
            pages() if shape.with_mtp else None,
            matrices,
            conv_rows,
            torch.zeros(rows, spec.hidden_size, dtype=dtype, device=device),
            DraftMemory.allocate(shape.drafter, shape, dtype, device) if shape.drafter else None,
            shape.kept_rows,
        )

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        """Codes and scales of all KV pages, [pages, ...] each: layer by layer, the MTP head's, a block drafter's."""
        pools = [layer for layer in (*self.layers, self.mtp) if isinstance(layer, KVPages)]
        parts = [(pool.key_codes, pool.key_scale, pool.value_codes, pool.value_scale) for pool in pools]
        own = [self.drafts.pages] if self.drafts and self.drafts.pages.numel() else []
        return (*(tensor for tensors in parts for tensor in tensors if tensor is not None), *own)

    @property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """What a state is made of, [slots + checkpoints, ...] each."""
        rings = [self.drafts.rings] if self.drafts and self.drafts.rings.numel() else []
        return (*self.matrices, *self.conv_rows, self.hidden, *rings)

    @property
    def page_pool_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.page_tensors)

    @property
    def state_bytes(self) -> int:
        """Slots and checkpoints together."""
        pending = [t for pool in self.layers if isinstance(pool, DeltaPool) for t in pool[2:]]
        return sum(t.numel() * t.element_size() for t in (*self.state_tensors, *pending))

    def clear(self, slot: int) -> None:
        """Resets a slot to before its first token."""
        for part in (self.matrices[:, slot], self.conv_rows[:, slot], self.hidden[slot]):
            part.zero_()

    def copy(self, source: int, target: int) -> None:
        """Copies one row's state, hidden vector and ring to another; pending tokens are not copied."""
        self.matrices[:, target] = self.matrices[:, source]
        self.conv_rows[:, target] = self.conv_rows[:, source]
        self.hidden[target] = self.hidden[source]
        if self.drafts:
            self.drafts.rings[target] = self.drafts.rings[source]
