"""The model on the kernels, top down: from token ids and memory to hidden states, logits and drafts.

Knows tensors and slots, not requests: a `Batch` says which rows belong to which sequence and where its memory lies, and
the caller owns that memory (`memory.py`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.attention import rotary_table
from onebox.kernels.norm import add_rms_norm, concat_rms_norm
from onebox.model.fused import fused_layer, fused_norm, fused_remember, fused_start, start_stream
from onebox.model.layers import Attention, Batch, DeltaNet, Layer, Mixture, MtpHead, Shown, Stage
from onebox.model.linear import Linear, Phase, Rows
from onebox.model.memory import Memory
from onebox.spec.model import ModelSpec

__all__ = ["Attention", "Batch", "DeltaNet", "Layer", "Mixture", "MtpHead", "Qwen35", "Shown", "Stage"]


@dataclass(frozen=True)
class Qwen35:
    """The loaded model. `dtype` is that of activations between operations."""

    spec: ModelSpec
    dtype: torch.dtype
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Linear
    mtp: MtpHead | None
    frequencies: Tensor
    is_fused: bool = False
    """Whether decode steps go through `fused.py`; so does the head's layer if `is_mtp_fused`."""
    is_mtp_fused: bool = False

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, batch: Batch, memory: Memory) -> Tensor:
        """Hidden states [R, H] after the final norm; the memory then holds the rows' tokens, in decode as pending."""
        table = self._rotation(batch)
        if self.is_fused and batch.phase is Phase.DECODE:
            stream = start_stream(self._embed(batch))
            for layer, place in zip(self.layers, memory.layers, strict=True):
                stream = fused_layer(self.spec, layer, stream, place, batch, table, self.dtype)
            return fused_norm(self.spec, stream, self.norm, self.dtype)
        added = self._embed(batch)
        residual = torch.zeros(added.shape, dtype=torch.float32, device=self.device)
        for layer, place in zip(self.layers, memory.layers, strict=True):
            added, residual = layer(self.spec, added, residual, place, batch, table)
        return add_rms_norm(added, residual, self.norm, self.spec.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden states [R, H], at most 64 rows: only rows that draw a token need them."""
        return self.lm_head(Rows(hidden, Phase.DECODE), torch.float32)

    def draft(self, head: MtpHead, batch: Batch, hidden: Tensor, pages: KVPages) -> Tensor:
        """Hidden states [R, H] from which `logits` drafts. Row r has the token at p + 1 and the hidden state of p.

        The batch's positions and KV slots are those of p + 1: the entry depends on that token.
        """
        table, joined = self._rotation(batch), self._head_input(head, batch, hidden)
        if self.is_mtp_fused and batch.phase is Phase.DECODE:
            stream = fused_start(joined, head.fc)
            stream = fused_layer(self.spec, head.layer, stream, pages, batch, table, self.dtype)
            return fused_norm(self.spec, stream, head.norm, self.dtype)
        added, residual = self._joined(head, batch, joined)
        added, residual = head.layer(self.spec, added, residual, pages, batch, table)
        return add_rms_norm(added, residual, head.norm, self.spec.rms_norm_eps)[0]

    def remember(self, head: MtpHead, batch: Batch, hidden: Tensor, pages: KVPages) -> None:
        """Writes the head's KV entries of the rows that `draft` would take, and computes nothing else of it."""
        table, joined = self._rotation(batch), self._head_input(head, batch, hidden)
        if self.is_mtp_fused and batch.phase is Phase.DECODE:
            fused_remember(self.spec, head.layer, fused_start(joined, head.fc), pages, batch, table, self.dtype)
            return
        added, residual = self._joined(head, batch, joined)
        normed, _ = add_rms_norm(added, residual, head.layer.input_norm, self.spec.rms_norm_eps)
        if isinstance(head.layer.mixer, Attention):
            head.layer.mixer.remember(self.spec, Rows(normed, batch.phase), pages, batch, table)

    def _head_input(self, head: MtpHead, batch: Batch, hidden: Tensor) -> Tensor:
        """[R, 2H]: the token's embedding and the hidden state, each normed, side by side."""
        norms = head.embedding_norm, head.hidden_norm
        return concat_rms_norm(self._embed(batch), hidden, *norms, self.spec.rms_norm_eps)

    def _joined(self, head: MtpHead, batch: Batch, joined: Tensor) -> tuple[Tensor, Tensor]:
        """What the head's layer takes: (what is added, a float32 stream of zeros), both [R, H]."""
        added = head.fc(Rows(joined, batch.phase))
        return added, torch.zeros(added.shape, dtype=torch.float32, device=self.device)

    def _embed(self, batch: Batch) -> Tensor:
        """[R, H]."""
        embedded = F.embedding(batch.token_ids, self.embedding).to(self.dtype)
        if batch.shown:
            embedded[batch.shown.rows] = batch.shown.embeddings.to(self.dtype)
        return embedded

    def _rotation(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return rotary_table(batch.positions, self.frequencies, self.spec.mrope_section)
