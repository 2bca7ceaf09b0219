"""One decode step on the device: logits of all rows, the tokens sampled from them, what is accepted, the next drafts.

Sampling and verifying follow one rule. A row's token is a function of its logits and of (seed, position); a draft is
accepted if it is that token. So the answer is the one without drafts, token for token. Nothing here asks the device for
a value, so that each half can be captured into a graph.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onebox.engine.batch import StepInputs, chained_batch, following_batch, following_rows_of, start_chain
from onebox.kernels.sampling import sample, sample_drafts
from onebox.kernels.step import verify_drafts
from onebox.kernels.step.tensors import ChainRows
from onebox.model.batch import Batch
from onebox.model.head import SampledRows
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35

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

    def copy_to(self, other: "Forwarded") -> None:
        other.hidden.copy_(self.hidden)
        other.logits.copy_(self.logits)


class DecodeOutcome(NamedTuple):
    """What a step sampled, accepted and drafted, on the host."""

    token_ids: list[int]
    """[R]: the token after each row."""
    num_accepted: list[int]
    """[S]: rows of each sequence whose tokens are certain now."""
    drafts: list[list[int]]
    """[S][depth]."""
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
    """[S, depth]."""


class OutcomeLayout(NamedTuple):
    """Where the fields of an outcome lie in its buffer of int64 words: token_ids, num_accepted, is_finite, drafts.

    One buffer, so that a step's outcome comes back to the host in one copy.
    """

    num_rows: int
    num_sequences: int
    depth: int

    @property
    def size(self) -> int:
        return 2 * self.num_rows + self.num_sequences + self.num_sequences * self.depth

    def split(self, words: Tensor) -> OutcomeTensors:
        accepted, finite, drafts = self._starts()
        return OutcomeTensors(
            verified=words[:drafts],
            token_ids=words[:accepted],
            num_accepted=words[accepted:finite],
            is_finite=words[finite:drafts],
            drafts=words[drafts:].view(self.num_sequences, self.depth),
        )

    def read(self, words: list[int]) -> DecodeOutcome:
        accepted, finite, drafts = self._starts()
        depth = self.depth
        return DecodeOutcome(
            token_ids=words[:accepted],
            num_accepted=words[accepted:finite],
            is_finite=words[finite:drafts],
            drafts=[words[drafts + i * depth : drafts + (i + 1) * depth] for i in range(self.num_sequences)],
        )

    def _starts(self) -> tuple[int, int, int]:
        """Of num_accepted, is_finite and drafts."""
        accepted = self.num_rows
        finite = accepted + self.num_sequences
        return accepted, finite, finite + self.num_rows


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

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self._model.dtype

    def forward(self, batch: Batch) -> Forwarded:
        return self.logits_for(self._model.decode(batch, self._memory))

    def new_forwarded(self, num_rows: int) -> Forwarded:
        """Uninitialised tensors for so many rows."""
        spec, device = self._model.spec, self._model.device
        hidden = torch.empty(num_rows, spec.hidden_size, dtype=self._model.dtype, device=device)
        return Forwarded(hidden, torch.empty(num_rows, spec.vocab_size, dtype=torch.float32, device=device))

    def logits_for(self, hidden: Tensor) -> Forwarded:
        """The logits of hidden states [R, H] that are computed already."""
        return Forwarded(hidden, self._model.start_logits(hidden))

    def complete(self, forwarded: Forwarded) -> None:
        """Completes logits that are not sampled from as they are; `end_complete` must follow their sampling."""
        self._model.complete_logits(forwarded.hidden, forwarded.logits)
        self._is_complete.fill_(1)

    def end_complete(self) -> None:
        self._is_complete.zero_()

    def sample(self, forwarded: Forwarded, inputs: StepInputs, depth: int) -> Tensor:
        """Samples, verifies and drafts: int64 words in the `OutcomeLayout` of these inputs and depth."""
        draw, following = inputs.draw, following_rows_of(inputs)
        rows = SampledRows(draw.temperature, draw.top_k, inputs.batch.num_rows, self._is_complete)
        self._model.complete_candidates(forwarded.hidden, forwarded.logits, rows)
        sampled = sample(
            forwarded.logits,
            draw.temperature,
            draw.top_k,
            draw.top_p,
            draw.min_p,
            draw.seeds,
            following.places,
        )
        layout = OutcomeLayout(len(sampled), len(inputs.batch.slots), depth)
        words = torch.empty(layout.size, dtype=torch.int64, device=sampled.device)
        outcome = layout.split(words)
        verify_drafts(outcome.verified, sampled, draw.next_ids, draw.checks, inputs.batch.cu_rows)
        pages = self._memory.mtp
        if self._model.mtp and pages:
            batch = following_batch(inputs, following, outcome.token_ids)
            if depth:
                mixed = self._model.draft(batch, forwarded.hidden, pages)
                chain = start_chain(inputs, following, mixed, outcome.num_accepted, depth)
                torch.stack(self._drafts(inputs, chain, depth), dim=1, out=outcome.drafts)
            else:
                # A later step that drafts needs the head's KV entries of the tokens decoded without drafts, too.
                self._model.write_draft_kv(batch, forwarded.hidden, pages)
        elif depth:
            raise RuntimeError("Drafts were asked of a model without an MTP head.")
        return words

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

    def __init__(self, decoder: Decoder, forwarded: Forwarded, inputs: StepInputs, depth: int) -> None:
        self.forwarded = forwarded
        self._decoder = decoder
        self._inputs = inputs
        self._layout = OutcomeLayout(len(inputs.batch.token_ids), len(inputs.batch.slots), depth)
        self._words: Tensor | None = None

    def complete(self) -> None:
        self._decoder.complete(self.forwarded)

    def sample(self) -> None:
        self._words = self._decoder.sample(self.forwarded, self._inputs, self._layout.depth)
        self._decoder.end_complete()

    def read(self) -> DecodeOutcome:
        if self._words is None:
            raise RuntimeError("A step was read before anything was sampled.")
        return self._layout.read(self._words.tolist())
