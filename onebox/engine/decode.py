"""One decode step on the device: logits of all rows, the tokens sampled from them, what is accepted, the next drafts.

Sampling and verifying follow one rule. A row's token is a function of its logits and of (seed, position); a draft is
accepted if it is that token. So the answer is the one without drafts, token for token. Nothing here asks the device for
a value, so that each half can be captured into a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onebox.engine.batch import (
    StepInputs,
    chained_batch,
    following_batch,
    following_rows_of,
    last_rows,
    limits_of,
    start_chain,
)
from onebox.engine.contexts import LateContext
from onebox.engine.inputs import blocks_of
from onebox.engine.shapes import MAX_STEP_ROWS
from onebox.engine.step import DecodeRows, DraftDepths
from onebox.kernels.sampling import sample, sample_drafts
from onebox.kernels.step import block_anchors, block_rows, verify_drafts
from onebox.kernels.step.tensors import ANCHOR_WORDS, ChainRows, FollowingRows
from onebox.model.batch import Batch
from onebox.model.head import SampledRows
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35
from onebox.model.taps import Taps, features_of

__all__ = [
    "DecodeOutcome",
    "DecodeStep",
    "Decoder",
    "Forwarded",
    "OutcomeLayout",
    "OutcomeTensors",
    "PlainStep",
]


@dataclass(frozen=True)
class Forwarded:
    """The model's output for R rows."""

    hidden: Tensor
    """[R, H]."""
    logits: Tensor
    """float32 [R, V], as the model starts them; may be adjusted in place before tokens are sampled, once complete."""
    features: Tensor | None = None
    """[R, taps * H], for a block drafter; None without one, and where the rows' context is written already."""
    taps: Taps | None = None
    """What features are made of, in their place where the drafter's context is written late."""

    def copy_to(self, other: "Forwarded") -> None:
        other.hidden.copy_(self.hidden)
        other.logits.copy_(self.logits)
        if self.features is not None and other.features is not None:
            other.features.copy_(self.features)

    def first(self, num_rows: int) -> "Forwarded":
        """The first rows."""
        features = None if self.features is None else self.features[:num_rows]
        return Forwarded(self.hidden[:num_rows], self.logits[:num_rows], features)


class DecodeOutcome(NamedTuple):
    """What a step sampled, accepted and drafted, on the host."""

    token_ids: list[int]
    """[R]: the token after each row."""
    num_accepted: list[int]
    """[S]: rows of each sequence whose tokens are certain now."""
    drafts: list[list[int]]
    """[S][width]: of each sequence those of its own drafter, then anything."""
    is_finite: list[int]
    """[R]: 0 where the logits were not finite numbers, so that nothing could be sampled."""


class OutcomeTensors(NamedTuple):
    """The same on the device: views of one int64 buffer."""

    verified: Tensor
    """[2 R + S]: the next three fields, as `verify_drafts` writes them."""
    token_ids: Tensor
    num_accepted: Tensor
    is_finite: Tensor
    drafts: Tensor
    """[S, width]."""


class OutcomeLayout(NamedTuple):
    """Where the fields of an outcome lie in its buffer of int64 words: drafts, token_ids, num_accepted, is_finite.

    One buffer, so that a step's outcome comes back to the host in one copy. The drafts come first, so that those of a
    sequence are at one place whatever the number of rows and sequences.
    """

    num_rows: int
    num_sequences: int
    width: int
    """Drafts of a sequence, at most."""

    @property
    def size(self) -> int:
        return 2 * self.num_rows + self.num_sequences + self.num_sequences * self.width

    def split(self, words: Tensor) -> OutcomeTensors:
        """The fields in `words` [size]."""
        tokens, accepted, finite = self._starts()
        return OutcomeTensors(
            verified=words[tokens:],
            token_ids=words[tokens:accepted],
            num_accepted=words[accepted:finite],
            is_finite=words[finite:],
            drafts=words[:tokens].view(self.num_sequences, self.width),
        )

    def read(self, words: list[int]) -> DecodeOutcome:
        tokens, accepted, finite = self._starts()
        width = self.width
        return DecodeOutcome(
            token_ids=words[tokens:accepted],
            num_accepted=words[accepted:finite],
            is_finite=words[finite:],
            drafts=[words[i * width : (i + 1) * width] for i in range(self.num_sequences)],
        )

    def _starts(self) -> tuple[int, int, int]:
        """Of token_ids, num_accepted and is_finite."""
        tokens = self.num_sequences * self.width
        accepted = tokens + self.num_rows
        return tokens, accepted, accepted + self.num_sequences


class DecodeStep(Protocol):
    """A decode step under way: the device has the model's part of it."""

    @property
    def forwarded(self) -> Forwarded: ...

    def complete(self) -> None:
        """Queues what logits lack that are read or adjusted before tokens are sampled from them."""

    def sample(self) -> None:
        """Queues the rest: tokens are sampled, verified and drafted. Does not wait for the device."""

    def read(self) -> DecodeOutcome:
        """Waits for the device and returns the outcome."""


class Decoder:
    """The model and its memory, step by step."""

    def __init__(self, model: Qwen35, memory: Memory) -> None:
        self._model = model
        self._memory = memory
        self._is_complete = torch.zeros(1, dtype=torch.int32, device=model.device)
        """On the device: not 0 between `complete` and the end of the sampling that follows."""
        self._anchors = torch.zeros(MAX_STEP_ROWS, ANCHOR_WORDS, dtype=torch.int64, device=model.device)
        """Where the blocks begin that the block drafter makes behind the sampling, in the step's block order."""
        self._mtp_pages = pages = memory.mtp if model.mtp else None
        self._late_mtp = self._late_block = None
        if memory.kept_rows and pages:
            self._late_mtp = LateContext(self._write_mtp, memory.kept_rows, shift=1)
        if memory.kept_rows and self.drafts_blocks:
            self._late_block = LateContext(self._write_block, memory.kept_rows, shift=0)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self._model.dtype

    def forward(self, batch: Batch) -> Forwarded:
        hidden, taps = self._model.decode_tapped(batch, self._memory)
        logits = self._model.start_logits(hidden)
        if taps is None or self._late_block:
            return Forwarded(hidden, logits, taps=taps)
        return Forwarded(hidden, logits, taps.features(self._model.dtype))

    def new_forwarded(self, num_rows: int) -> Forwarded:
        """Uninitialised tensors for so many rows."""
        spec, device = self._model.spec, self._model.device
        hidden = torch.empty(num_rows, spec.hidden_size, dtype=self._model.dtype, device=device)
        logits = torch.empty(num_rows, spec.vocab_size, dtype=torch.float32, device=device)
        features = (
            hidden.new_empty(num_rows, len(self._model.tap_ids) * spec.hidden_size) if self.drafts_blocks else None
        )
        return Forwarded(hidden, logits, features)

    @property
    def drafts_blocks(self) -> bool:
        """Whether there is a block drafter, whose context is kept."""
        return self._model.drafter is not None and self._memory.drafts is not None

    def drop_context(self, slot: int) -> None:
        """Another sequence begins in this slot, or the same one anew."""
        for late in (self._late_mtp, self._late_block):
            if late:
                late.drop(slot)

    def logits_for(self, hidden: Tensor) -> Forwarded:
        """The logits of hidden states [R, H] that are computed already."""
        return Forwarded(hidden, self._model.start_logits(hidden))

    def complete(self, forwarded: Forwarded) -> None:
        """Completes logits that are not sampled from as they are; `end_complete` must follow their sampling."""
        self._model.complete_logits(forwarded.hidden, forwarded.logits)
        self._is_complete.fill_(1)

    def end_complete(self) -> None:
        self._is_complete.zero_()

    def sample(self, forwarded: Forwarded, inputs: StepInputs, depth: int, outcome: OutcomeTensors) -> None:
        """Samples, verifies and drafts with the MTP head, into `outcome`."""
        draw, batch = inputs.draw, inputs.batch
        rows = SampledRows(draw.temperature, draw.top_k, batch.num_rows, self._is_complete)
        self._model.complete_candidates(forwarded.hidden, forwarded.logits, rows)
        # Where the MTP head's context is written late, or there is none, only the places are needed.
        following = following_rows_of(inputs) if depth or (self._mtp_pages and not self._late_mtp) else None
        sampled = sample(
            forwarded.logits,
            draw.temperature,
            draw.top_k,
            draw.top_p,
            draw.min_p,
            draw.seeds,
            following.places if following else draw.positions + 1,
        )
        verify_drafts(outcome.verified, sampled, draw.next_ids, draw.checks, batch.cu_rows)
        if following:
            self._draft_or_write(forwarded.hidden, inputs, following, depth, outcome)
        if forwarded.features is not None and self._memory.drafts:
            self._model.write_context(batch, forwarded.features, self._memory.drafts)

    @property
    def writes_late(self) -> bool:
        """Whether rows are kept until a drafter needs its context of them: see the next two methods."""
        return self._late_mtp is not None or self._late_block is not None

    def write_kept(self, sequences: Sequence[DecodeRows]) -> None:
        """Before the MTP head drafts in `sample`: writes its context of all that comes before these rows."""
        if self._late_mtp:
            self._late_mtp.write_before(sequences)

    def keep(
        self, sequences: Sequence[DecodeRows], forwarded: Forwarded, token_ids: Tensor, *, has_drafted: bool
    ) -> None:
        """After `sample`: keeps the rows of the step, with the tokens [R] sampled after them.

        Where the MTP head `has_drafted`, its context of them is written.
        """
        if self._late_mtp and not has_drafted:
            self._late_mtp.add(sequences, (forwarded.hidden,), token_ids)
        if self._late_block and forwarded.taps:
            self._late_block.add(sequences, forwarded.taps.parts())

    def _write_mtp(self, batch: Batch, parts: Sequence[Tensor]) -> None:
        [hidden] = parts
        if self._mtp_pages:
            self._model.write_draft_kv(batch, hidden, self._mtp_pages)

    def _write_block(self, batch: Batch, parts: Sequence[Tensor]) -> None:
        if self._memory.drafts:
            features = features_of(parts, len(self._model.tap_ids), self._model.dtype)
            self._model.write_context(batch, features, self._memory.drafts)

    def _draft_or_write(
        self, hidden: Tensor, inputs: StepInputs, following: FollowingRows, depth: int, outcome: OutcomeTensors
    ) -> None:
        """Drafts with the MTP head, or only writes its context of the rows, which later drafts read."""
        pages = self._mtp_pages
        if pages is None:
            raise RuntimeError("Drafts were asked of a model without an MTP head.")
        batch = following_batch(inputs, following, outcome.token_ids)
        if not depth:
            self._model.write_draft_kv(batch, hidden, pages)
            return
        mixed = self._model.draft(batch, hidden, pages)
        chain = start_chain(inputs, following, mixed, outcome.num_accepted, depth)
        torch.stack(self._drafts(inputs, chain, depth), dim=1, out=outcome.drafts[:, :depth])

    def anchor_blocks(self, inputs: StepInputs, outcome: OutcomeTensors) -> None:
        """Leaves for `draft_blocks` where the blocks behind a step's outcome begin."""
        if self.drafts_blocks:
            own = self._anchors[: len(inputs.block_order)]
            last = last_rows(inputs, outcome.token_ids, outcome.num_accepted)
            block_anchors(own, last, limits_of(inputs.draw), inputs.block_order)

    def draft_blocks(self, count: int, depth: int, page_table: Tensor, drafts: Tensor) -> None:
        """Drafts blocks of `depth` tokens for the first `count` sequences of the last step's block order.

        page_table int32 [S, pages]; drafts int64 [S, width]: those of the sequences themselves are written.
        """
        model, memory = self._model, self._memory.drafts
        if model.drafter is None or memory is None:
            raise RuntimeError("Blocks were asked of a model without a block drafter.")
        for anchors in torch.split(self._anchors[:count], MAX_STEP_ROWS // (1 + depth)):
            rows = block_rows(anchors, depth, model.drafter.spec.mask_token_id)
            if self._late_block:
                self._late_block.write_up_to(rows.slots, rows.length)
            logits, token_ids = model.draft_logits(model.draft_blocks(rows, page_table, memory))
            sampled = sample_drafts(logits, *rows.limits, rows.places, token_ids)
            drafts[rows.sequences.to(torch.int64), :depth] = sampled.view(-1, depth)

    def _drafts(self, inputs: StepInputs, chain: ChainRows, depth: int) -> list[Tensor]:
        """int64 [S] each: tokens for the places after each sequence's last new one.

        They are sampled with the noise that the model's own tokens get there.
        """
        if self._memory.mtp is None:
            raise RuntimeError("Drafting needs the MTP head's pages.")
        hidden, drafts = chain.hidden, list[Tensor]()
        for place in range(depth):
            if place:
                batch = chained_batch(inputs, chain, place - 1, drafts[-1])
                hidden = self._model.draft(batch, hidden, self._memory.mtp)
            logits, token_ids = self._model.draft_logits(hidden)
            drafts.append(sample_drafts(logits, *chain.limits, chain.places[place], token_ids))
        return drafts


class PlainStep:
    """A step whose functions are called one by one, without graphs."""

    def __init__(
        self,
        decoder: Decoder,
        forwarded: Forwarded,
        inputs: StepInputs,
        depths: DraftDepths,
        parts: Sequence[DecodeRows],
    ) -> None:
        self.forwarded = forwarded
        self._decoder = decoder
        self._inputs = inputs
        self._depths = depths
        self._parts = parts
        self._layout = OutcomeLayout(len(inputs.batch.token_ids), len(inputs.batch.slots), depths.most)
        self._words: Tensor | None = None

    def complete(self) -> None:
        self._decoder.complete(self.forwarded)

    def sample(self) -> None:
        batch = self._inputs.batch
        self._words = torch.empty(self._layout.size, dtype=torch.int64, device=batch.token_ids.device)
        outcome, depths = self._layout.split(self._words), self._depths
        if depths.mtp:
            self._decoder.write_kept(self._parts)
        self._decoder.sample(self.forwarded, self._inputs, depths.mtp, outcome)
        if self._decoder.writes_late:
            self._decoder.keep(self._parts, self.forwarded, outcome.token_ids, has_drafted=depths.mtp > 0)
        if depths.block:
            self._decoder.anchor_blocks(self._inputs, outcome)
            num_blocks = len(blocks_of(self._parts))
            self._decoder.draft_blocks(num_blocks, depths.block, batch.page_table, outcome.drafts)
        self._decoder.end_complete()

    def read(self) -> DecodeOutcome:
        if self._words is None:
            raise RuntimeError("A step was read before anything was sampled.")
        return self._layout.read(self._words.tolist())
