"""The model on the kernels, top down: from token ids and memory to hidden states, logits and drafts.

Knows tensors and slots, not requests: a `Batch` says which rows belong to which sequence and where its memory lies, and
the caller owns that memory (`memory.py`). How its layers run is chosen at load (`layers/`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.attention import rotary_table
from onebox.kernels.draft.tensors import BlockContext, ContextRows
from onebox.kernels.step import embed
from onebox.kernels.step.tensors import BlockRows
from onebox.model.batch import Batch
from onebox.model.dflash import DFlash
from onebox.model.head import PlaneHead, SampledRows
from onebox.model.layers import DraftHead, LayerStack, RotaryTable
from onebox.model.linear import DecodeActivations, Linear, RowLinear
from onebox.model.memory import DraftMemory, Memory
from onebox.model.taps import Taps
from onebox.model.trimmed_head import TrimmedHead
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec

__all__ = ["Qwen35"]


@dataclass(frozen=True)
class Qwen35:
    """The loaded model. `dtype` is that of activations between operations."""

    spec: ModelSpec
    dtype: torch.dtype
    embedding: Tensor
    """[V, H]."""
    stack: LayerStack
    """The layers and the final norm."""
    lm_head: Linear
    mtp: DraftHead | None
    frequencies: Tensor
    """float32 [rotary_dim / 2]: angle per position."""
    draft_head: TrimmedHead | None = None
    """What draft tokens are read from; None: the LM head."""
    drafter: DFlash | None = None
    """A block drafter beside the model."""
    tap_ids: tuple[int, ...] = ()
    """The layers behind which the drafter's features are taken."""

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def decode(self, batch: Batch, memory: Memory) -> Tensor:
        """Hidden states [R, H] after the final norm. The memory then holds the rows' tokens, in DeltaNet as pending."""
        table = self._rotation(batch)
        return self.stack.decode(self._embed(batch), memory.layers, batch, table)

    def prefill(self, batch: Batch, memory: Memory) -> Tensor:
        """Hidden states [R, H] after the final norm. The memory then holds the rows' tokens."""
        table = self._rotation(batch)
        return self.stack.prefill(self._embed(batch), memory.layers, batch, table)

    def decode_tapped(self, batch: Batch, memory: Memory) -> tuple[Tensor, Taps | None]:
        """`decode`, and what the drafter's features are made of, if there is one."""
        taps = Taps(self.tap_ids) if self.drafter else None
        return self.stack.decode(self._embed(batch), memory.layers, batch, self._rotation(batch), taps), taps

    def prefill_tapped(self, batch: Batch, memory: Memory) -> tuple[Tensor, Taps | None]:
        """The same of `prefill`."""
        taps = Taps(self.tap_ids) if self.drafter else None
        return self.stack.prefill(self._embed(batch), memory.layers, batch, self._rotation(batch), taps), taps

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden states [R, H], at most 128 rows: only rows that draw a token need them."""
        return self.lm_head.decode(DecodeActivations(hidden), torch.float32)

    def start_logits(self, hidden: Tensor) -> Tensor:
        """The same, incomplete if the head has two planes (`head.py`): one of the next two methods completes them."""
        head = self.lm_head
        return head.start(DecodeActivations(hidden)) if isinstance(head, PlaneHead) else self.logits(hidden)

    def complete_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Makes `start_logits` of these hidden states `logits`, in place."""
        if isinstance(self.lm_head, PlaneHead):
            self.lm_head.complete(DecodeActivations(hidden), logits)

    def complete_candidates(self, hidden: Tensor, logits: Tensor, sampled: SampledRows) -> None:
        """Makes `start_logits` complete where `sampled` may sample from, in place: the token is that of `logits`."""
        if isinstance(self.lm_head, PlaneHead):
            self.lm_head.complete_candidates(DecodeActivations(hidden), logits, sampled)

    def draft_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """(float32 [R, D] of the MTP head's hidden states [R, H], the tokens int64 [D]); None: all tokens, D is V."""
        head = self.draft_head
        return (head.logits(hidden), head.token_ids) if head else (self.start_logits(hidden), None)

    def put_draft_rows(self, places: Tensor, token_ids: Tensor) -> None:
        """Has the head for drafts hold the rows of `token_ids` at `places`, both int64 [n]; its memory stays."""
        if self.draft_head is None or not isinstance(self.lm_head, RowLinear):
            raise MismatchError("This model drafts over its whole vocabulary: there are no rows to replace.")
        self.draft_head.put(self.lm_head, places, token_ids)

    def draft(self, batch: Batch, hidden: Tensor, pages: KVPages) -> Tensor:
        """The MTP head's hidden states [R, H] of a decode step; `draft_logits` of them give draft tokens.

        Row r has the token at p + 1 and the model's hidden state [H] at p. The batch's positions and slot mapping are
        those of p + 1, because the head's KV entry depends on that token.
        """
        table = self._rotation(batch)
        return self._head().decode(self._embed(batch), hidden, pages, batch, table)

    def write_draft_kv(self, batch: Batch, hidden: Tensor, pages: KVPages) -> None:
        """Writes the MTP head's KV entries of a decode step's rows, as `draft` takes them, without computing drafts."""
        table = self._rotation(batch)
        self._head().write_kv(self._embed(batch), hidden, pages, batch, table)

    def prefill_draft_kv(self, batch: Batch, hidden: Tensor, pages: KVPages) -> None:
        """The same for the rows of a prefill batch."""
        table = self._rotation(batch)
        self._head().prefill_kv(self._embed(batch), hidden, pages, batch, table)

    def write_context(self, batch: Batch, features: Tensor, drafts: DraftMemory) -> None:
        """Writes the block drafter's context of a decode step's rows, from their features [R, taps * H].

        A row without a place in the pages is not written.
        """
        self._drafter().decode_context(features, batch.positions[0], _context_rows(batch), drafts)

    def prefill_context(self, batch: Batch, features: Tensor, drafts: DraftMemory) -> None:
        """The same for the rows of a prefill batch."""
        self._drafter().prefill_context(features, batch.positions[0], _context_rows(batch), drafts)

    def draft_blocks(self, rows: BlockRows, page_table: Tensor, drafts: DraftMemory) -> Tensor:
        """The block drafter's hidden states [B * n, H] of the masks in `rows`; `draft_logits` give draft tokens.

        page_table int32 [S, pages] has the rows of all sequences that `rows` name.
        """
        embedded = embed(rows.token_ids, self.embedding, self.dtype)
        context = BlockContext(rows.length, rows.slots, rows.sequences, page_table)
        return self._drafter().draft(embedded, rows.positions, context, drafts)

    def _drafter(self) -> DFlash:
        if self.drafter is None:
            raise MismatchError("This model has no block drafter to draft with.")
        return self.drafter

    def _head(self) -> DraftHead:
        if self.mtp is None:
            raise MismatchError("This model has no MTP head to draft with.")
        return self.mtp

    def _embed(self, batch: Batch) -> Tensor:
        """[R, H]."""
        embedded = embed(batch.token_ids, self.embedding, self.dtype)
        if batch.image_rows:
            embedded[batch.image_rows.rows] = batch.image_rows.embeddings.to(self.dtype)
        return embedded

    def _rotation(self, batch: Batch) -> RotaryTable:
        scale = self.spec.yarn.attention_factor if self.spec.yarn else 1.0
        return rotary_table(batch.positions, self.frequencies, self.spec.mrope_section, scale)


def _context_rows(batch: Batch) -> ContextRows:
    return ContextRows(batch.cu_rows, batch.slots, batch.seen, batch.slot_mapping)
