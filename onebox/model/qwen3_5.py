"""The model on the kernels, top down: from token ids and memory to hidden states, logits and drafts.

Knows tensors and slots, not requests: a `Batch` says which rows belong to which sequence and where its memory lies, and
the caller owns that memory (`memory.py`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.norm import add_rms_norm, concat_rms_norm
from onebox.kernels.rope import rotary_table
from onebox.model.batch import Batch
from onebox.model.fused import fused_layer, fused_norm, fused_start, fused_write_kv, start_stream
from onebox.model.layers import Attention, Layer, MtpHead
from onebox.model.linear import Linear, Phase, Rows
from onebox.model.memory import Memory
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec

__all__ = ["Qwen35"]


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

    def decode(self, batch: Batch, memory: Memory) -> Tensor:
        """Hidden states [R, H] after the final norm. The memory then holds the rows' tokens, in DeltaNet as pending."""
        if not self.is_fused:
            return self._run(batch, memory, Phase.DECODE)
        table, stream = self._rotation(batch), start_stream(self._embed(batch))
        for layer, place in zip(self.layers, memory.layers, strict=True):
            stream = fused_layer(self.spec, layer, stream, place, batch, table, self.dtype)
        return fused_norm(self.spec, stream, self.norm, self.dtype)

    def prefill(self, batch: Batch, memory: Memory) -> Tensor:
        """Hidden states [R, H] after the final norm. The memory then holds the rows' tokens."""
        return self._run(batch, memory, Phase.PREFILL)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden states [R, H], at most 64 rows: only rows that draw a token need them."""
        return self.lm_head(Rows(hidden, Phase.DECODE), torch.float32)

    def draft(self, batch: Batch, hidden: Tensor, pages: KVPages) -> Tensor:
        """The MTP head's hidden states [R, H] of a decode step; `logits` of them give draft tokens.

        Row r has the token at p + 1 and the model's hidden state [H] at p. The batch's positions and slot mapping are
        those of p + 1, because the head's KV entry depends on that token.
        """
        head = self._mtp_head()
        table, joined = self._rotation(batch), self._head_input(head, batch, hidden)
        if self.is_mtp_fused:
            stream = fused_start(joined, head.fc)
            stream = fused_layer(self.spec, head.layer, stream, pages, batch, table, self.dtype)
            return fused_norm(self.spec, stream, head.norm, self.dtype)
        added, residual = self._joined(head, joined, Phase.DECODE)
        added, residual = head.layer(self.spec, added, residual, pages, batch, table, Phase.DECODE)
        return add_rms_norm(added, residual, head.norm, self.spec.rms_norm_eps)[0]

    def write_draft_kv(self, batch: Batch, hidden: Tensor, pages: KVPages) -> None:
        """Writes the MTP head's KV entries of a decode step's rows, as `draft` takes them, without computing drafts."""
        if not self.is_mtp_fused:
            self._write_draft_kv(batch, hidden, pages, Phase.DECODE)
            return
        head = self._mtp_head()
        table, joined = self._rotation(batch), self._head_input(head, batch, hidden)
        fused_write_kv(self.spec, head.layer, fused_start(joined, head.fc), pages, batch, table, self.dtype)

    def prefill_draft_kv(self, batch: Batch, hidden: Tensor, pages: KVPages) -> None:
        """The same for the rows of a prefill batch."""
        self._write_draft_kv(batch, hidden, pages, Phase.PREFILL)

    def _run(self, batch: Batch, memory: Memory, phase: Phase) -> Tensor:
        table, added = self._rotation(batch), self._embed(batch)
        residual = torch.zeros(added.shape, dtype=torch.float32, device=self.device)
        for layer, place in zip(self.layers, memory.layers, strict=True):
            added, residual = layer(self.spec, added, residual, place, batch, table, phase)
        return add_rms_norm(added, residual, self.norm, self.spec.rms_norm_eps)[0]

    def _write_draft_kv(self, batch: Batch, hidden: Tensor, pages: KVPages, phase: Phase) -> None:
        head = self._mtp_head()
        table, joined = self._rotation(batch), self._head_input(head, batch, hidden)
        added, residual = self._joined(head, joined, phase)
        normed, _ = add_rms_norm(added, residual, head.layer.input_norm, self.spec.rms_norm_eps)
        if not isinstance(head.layer.mixer, Attention):
            raise MismatchError("The MTP head's layer has no attention.")
        head.layer.mixer.write_kv(self.spec, Rows(normed, phase), pages, batch, table)

    def _mtp_head(self) -> MtpHead:
        if self.mtp is None:
            raise MismatchError("This model has no MTP head.")
        return self.mtp

    def _head_input(self, head: MtpHead, batch: Batch, hidden: Tensor) -> Tensor:
        """[R, 2H]: the token's embedding and the hidden state, each normed, side by side."""
        norms = head.embedding_norm, head.hidden_norm
        return concat_rms_norm(self._embed(batch), hidden, *norms, self.spec.rms_norm_eps)

    def _joined(self, head: MtpHead, joined: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """What the head's layer takes: (what is added, a float32 stream of zeros), both [R, H]."""
        added = head.fc(Rows(joined, phase))
        return added, torch.zeros(added.shape, dtype=torch.float32, device=self.device)

    def _embed(self, batch: Batch) -> Tensor:
        """[R, H]."""
        embedded = F.embedding(batch.token_ids, self.embedding).to(self.dtype)
        if batch.image_rows:
            embedded[batch.image_rows.rows] = batch.image_rows.embeddings.to(self.dtype)
        return embedded

    def _rotation(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return rotary_table(batch.positions, self.frequencies, self.spec.mrope_section)
