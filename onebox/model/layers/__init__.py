"""The model's layers behind one interface, in three implementations, one of which is chosen at load.

    plain.py     an operation at a time, on the kernels or on a CPU on their twins; prefill everywhere
    fused.py     decode on a GPU in few launches; prefill is the plain layer's
    compiled.py  decode on a CPU as machine code; prefill is the plain mixer and compiled experts

A layer has a kind of mixer (attention or DeltaNet), and a mixer has one kind of memory: another kind is an error.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.model.batch import Batch
from onebox.model.memory import LayerMemory
from onebox.model.taps import Taps

__all__ = ["DraftHead", "Layer", "LayerStack", "RotaryTable", "Stream", "StreamLayer"]

RotaryTable = tuple[Tensor, Tensor]
"""(cos, sin) of the batch's positions."""


class Stream(NamedTuple):
    """The residual stream between plain or compiled layers: `residual + added`, not added up yet."""

    added: Tensor
    """[R, H], in the activations' dtype."""
    residual: Tensor
    """float32 [R, H]."""


S = TypeVar("S")


class Layer(Protocol[S]):
    """A mixer and its experts, each behind a norm. S is the form of the residual stream in decode steps."""

    def decode(self, stream: S, memory: LayerMemory, batch: Batch, table: RotaryTable) -> S:
        """The stream after this layer; the memory then holds the rows' tokens, in DeltaNet as pending."""

    def prefill(self, stream: Stream, memory: LayerMemory, batch: Batch, table: RotaryTable) -> Stream:
        """The stream after this layer; the memory then holds the rows' tokens."""


class StreamLayer(Layer[Stream], Protocol):
    """A plain or compiled layer."""

    def write_kv(self, stream: Stream, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        """Writes the keys and values that `decode` of an attention layer would, and computes nothing else."""


class LayerStack(Protocol):
    """All layers of the model and its final norm: hidden states [R, H] from embeddings [R, H].

    `memory` has one entry per layer; `taps` collects the stream behind those layers that it wants.
    """

    def decode(
        self,
        embedded: Tensor,
        memory: Sequence[LayerMemory],
        batch: Batch,
        table: RotaryTable,
        taps: Taps | None = None,
    ) -> Tensor: ...

    def prefill(
        self,
        embedded: Tensor,
        memory: Sequence[LayerMemory],
        batch: Batch,
        table: RotaryTable,
        taps: Taps | None = None,
    ) -> Tensor: ...


class DraftHead(Protocol):
    """The MTP head, which drafts: hidden states of tokens and of the embeddings of the tokens after them, [R, H] each.

    Its one layer has attention, and `pages` are its own.
    """

    def decode(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> Tensor:
        """The head's hidden states [R, H]; the pages then hold the rows' KV entries."""

    def write_kv(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        """Writes the KV entries of a decode step's rows and computes nothing else."""

    def prefill_kv(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        """Writes the KV entries of a prefill batch's rows and computes nothing else."""
