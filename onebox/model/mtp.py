"""The MTP head, which drafts one token further: two norms, a projection, one attention layer, a norm.

Row r has the embedding of the token at p + 1 and the model's hidden state at p.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.norm import add_rms_norm, concat_rms_norm
from onebox.model.batch import Batch
from onebox.model.layers import RotaryTable, StreamLayer
from onebox.model.layers.fused import (
    FusedAttention,
    FusedLayer,
    FusedStream,
    final_norm,
    fuse_attention,
    fuse_layer,
    stream_from,
)
from onebox.model.layers.plain import Attention, PlainLayer, start_stream
from onebox.model.linear import DecodeActivations, Linear, PartLinear

__all__ = ["FusedMtpHead", "MtpHead", "fuse_head"]


@dataclass(frozen=True)
class MtpHead:
    """On a plain or compiled layer."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: Linear
    attention: PlainLayer[Attention]
    layer: StreamLayer
    """`attention`, or its compiled form."""
    norm: Tensor

    def decode(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> Tensor:
        stream = start_stream(self.fc.decode(DecodeActivations(self.join(embedded, hidden))))
        stream = self.layer.decode(stream, pages, batch, table)
        return add_rms_norm(*stream, self.norm, self.attention.eps)[0]

    def write_kv(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        stream = start_stream(self.fc.decode(DecodeActivations(self.join(embedded, hidden))))
        self.layer.write_kv(stream, pages, batch, table)

    def prefill_kv(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        normed, _ = self.attention.input_rows(start_stream(self.fc.prefill(self.join(embedded, hidden))))
        mixer = self.attention.mixer
        mixer.write_kv(mixer.qkv_proj.prefill(normed), pages, batch, table)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[R, 2H]: the embedding and the hidden state, each normed, side by side."""
        return concat_rms_norm(embedded, hidden, self.embedding_norm, self.hidden_norm, self.attention.eps)


@dataclass(frozen=True)
class FusedMtpHead:
    """With its decode steps on a fused layer. `dtype` is that of activations."""

    plain: MtpHead
    fc: PartLinear
    attention: FusedAttention
    layer: FusedLayer
    dtype: torch.dtype

    def decode(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> Tensor:
        stream = self.layer.decode(self._start(embedded, hidden), pages, batch, table)
        return final_norm(stream, self.plain.norm, self.plain.attention.eps, self.dtype)

    def write_kv(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        rows, _ = self.layer.input_rows(self._start(embedded, hidden))
        self.attention.write_kv(rows, pages, batch, table)

    def prefill_kv(self, embedded: Tensor, hidden: Tensor, pages: KVPages, batch: Batch, table: RotaryTable) -> None:
        self.plain.prefill_kv(embedded, hidden, pages, batch, table)

    def _start(self, embedded: Tensor, hidden: Tensor) -> FusedStream:
        return stream_from(self.fc, self.plain.join(embedded, hidden))


def fuse_head(head: MtpHead, dtype: torch.dtype) -> FusedMtpHead | None:
    """The head with its decode fused, if its layer can be."""
    layer, attention, fc = fuse_layer(head.layer, dtype), fuse_attention(head.attention.mixer), head.fc
    if layer and attention and isinstance(fc, PartLinear):
        return FusedMtpHead(head, fc, attention, layer, dtype)
    return None
