"""One decode step on the device: logits of all rows, the tokens drawn from them, what is kept, and the next drafts.

Drawing and checking are one rule. A row's token is a function of its logits and of (seed, position); a draft is kept if
it is that token. So the answer is the one without drafts, token for token. Nothing here asks the device for a value, so
that each half can be captured into a graph.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onebox.engine.inputs import DrawInputs, StepSizes, StepInputs
from onebox.kernels.kv_slots import kv_slots
from onebox.kernels.sampling import sample
from onebox.kernels.settle import settle
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Batch, MtpHead, Qwen35
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["Decoder", "Forwarded", "DecodeOutcome", "PlainStep", "DecodeStep", "outcome_of"]


@dataclass(frozen=True)
class Forwarded:
    """What the model says of R rows."""

    hidden: Tensor
    """[R, H]."""
    logits: Tensor
    """float32 [R, V], as the model gives them; may be adjusted in place before tokens are drawn."""


class DecodeOutcome(NamedTuple):
    """What a step decided, on the host."""

    token_ids: list[int]
    """[R]: the token after each row."""
    num_kept: list[int]
    """[S]: rows of each sequence whose tokens are certain."""
    drafts: list[list[int]]
    """[S][depth]."""
    is_number: list[int]
    """[R]: 0 where logits were none, so that nothing could be drawn."""


class DecodeStep(Protocol):
    """A decode step under way: the device has been given the model's part of it."""

    @property
    def forwarded(self) -> Forwarded: ...

    def draw(self) -> None:
        """Gives the device the rest: tokens are drawn, checked and drafted. Does not wait for it."""

    def read(self) -> DecodeOutcome:
        """What was decided; waits for the device."""


class Decoder:
    """The model and its memory, step by step."""

    def __init__(self, model: Qwen35, memory: Memory) -> None:
        self._model = model
        self._memory = memory

    def forward(self, batch: Batch) -> Forwarded:
        return self.judge(self._model.forward(batch, self._memory))

    def judge(self, hidden: Tensor) -> Forwarded:
        """The logits of hidden states [R, H] that were computed already."""
        return Forwarded(hidden, self._model.logits(hidden))

    def finish(self, forwarded: Forwarded, inputs: StepInputs, depth: int) -> Tensor:
        """Draws, checks and drafts: int64 words that `outcome_of` takes apart."""
        draw = inputs.draw
        drawn = sample(
            forwarded.logits,
            draw.temperature,
            draw.top_k,
            draw.top_p,
            draw.min_p,
            draw.seeds,
            draw.positions + 1,
        )
        num_rows, num_sequences = len(drawn), len(inputs.batch.slots)
        edge = 2 * num_rows + num_sequences
        words = torch.empty(edge + num_sequences * depth, dtype=torch.int64, device=drawn.device)
        settle(words[:edge], drawn, draw.next_ids, draw.verdicts, inputs.batch.cu_rows)
        head, pages = self._model.mtp, self._memory.mtp
        if head and pages:
            followed = _followed(inputs, words[:num_rows])
            if depth:
                mixed = self._model.draft(head, followed, forwarded.hidden, pages)
                drafts = self._drafts(head, mixed, inputs, words[num_rows : num_rows + num_sequences], depth)
                torch.stack(drafts, dim=1, out=words[edge:].view(num_sequences, depth))
            else:
                # Whoever drafts later finds the head's entries of the tokens that were decoded without it.
                self._model.remember(head, followed, forwarded.hidden, pages)
        elif depth:
            raise RuntimeError("Drafts were asked of a model without an MTP head.")
        return words

    def _drafts(self, head: MtpHead, mixed: Tensor, inputs: StepInputs, num_kept: Tensor, depth: int) -> list[Tensor]:
        """int64 [S] each: tokens for the places after each sequence's last new one, from the head's rows [R, H]."""
        if self._memory.mtp is None:
            raise RuntimeError("Drafting needs the MTP head's pages.")
        batch, draw = inputs
        last = (batch.cu_rows[:-1] + num_kept - 1).clamp(0, len(mixed) - 1)
        offsets = (batch.positions[0] - draw.positions)[last]
        chain = _Chain(mixed[last], draw.positions[last] + 2, offsets, _limits(draw, last))
        drafts = [self._draw_draft(chain)]
        for _ in range(depth - 1):
            row = _chained(batch, drafts[-1], chain)
            hidden = self._model.draft(head, row, chain.hidden, self._memory.mtp)
            chain = replace(chain, hidden=hidden, positions=chain.positions + 1)
            drafts.append(self._draw_draft(chain))
        return drafts

    def _draw_draft(self, chain: "_Chain") -> Tensor:
        """The head's tokens at the chain's positions, with the noise that the model itself will meet there."""
        token_ids = sample(self._model.logits(chain.hidden), *chain.limits, chain.positions)
        # Where there are no numbers nothing is drawn; a draft is a token all the same.
        return token_ids.clamp(min=0)


class PlainStep:
    """A step whose functions are called one by one, without graphs."""

    def __init__(self, decoder: Decoder, forwarded: Forwarded, inputs: StepInputs, sizes: StepSizes, depth: int) -> None:
        self.forwarded = forwarded
        self._decoder = decoder
        self._inputs = inputs
        self._sizes = sizes
        self._depth = depth
        self._words: Tensor | None = None

    def draw(self) -> None:
        self._words = self._decoder.finish(self.forwarded, self._inputs, self._depth)

    def read(self) -> DecodeOutcome:
        if self._words is None:
            raise RuntimeError("A step was read before anything was drawn.")
        return outcome_of(self._words.tolist(), self._sizes, self._depth)


@dataclass(frozen=True)
class _Chain:
    """Drafting from draft to draft, one row a sequence."""

    hidden: Tensor
    """[S, H]: the head's own output so far."""
    positions: Tensor
    """int64 [S]: where the next draft will stand."""
    offsets: Tensor
    """int64 [S]: what is added to a place to give the position it is rotated by."""
    limits: "_Limits"
    """[S] each: temperature, top_k, top_p, min_p and seed, as `sample` takes them."""


_Limits = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _limits(draw: DrawInputs, rows: Tensor) -> _Limits:
    """How drafts are drawn for sequences whose settings are those of these rows [S]."""
    return draw.temperature[rows], draw.draft_top_k[rows], draw.top_p[rows], draw.min_p[rows], draw.seeds[rows]


def _followed(inputs: StepInputs, token_ids: Tensor) -> Batch:
    """What the head takes in: each row's hidden state with the token [R] after it, at that token's place.

    DecodeRows that were not kept come last in their sequence: what they write is written again by the next step before anyone
    reads it.
    """
    batch, draw = inputs
    return replace(
        batch,
        token_ids=token_ids,
        positions=batch.positions + 1,
        seen=batch.seen + 1,
        kv_slots=kv_slots(batch.page_table, draw.row_sequence, draw.positions + 1, PAGE_TOKENS),
    )


def _chained(batch: Batch, drafts: Tensor, chain: _Chain) -> Batch:
    """One row a sequence: its latest draft."""
    sequences = torch.arange(len(drafts), device=drafts.device)
    return replace(
        batch,
        token_ids=drafts,
        positions=(chain.positions + chain.offsets).expand(3, -1),
        cu_rows=torch.arange(len(drafts) + 1, dtype=torch.int32, device=drafts.device),
        seen=(chain.positions + 1).to(torch.int32),
        kv_slots=kv_slots(batch.page_table, sequences, chain.positions, PAGE_TOKENS),
    )


def outcome_of(words: list[int], sizes: StepSizes, depth: int) -> DecodeOutcome:
    """What the words that `finish` made say."""
    num_rows, num_sequences = sizes.rows, sizes.sequences
    edge = num_rows + num_sequences
    rest = words[edge + num_rows :]
    return DecodeOutcome(
        token_ids=words[:num_rows],
        num_kept=words[num_rows:edge],
        is_number=words[edge : edge + num_rows],
        drafts=[rest[i * depth : (i + 1) * depth] for i in range(num_sequences)] if rest else [[]] * num_sequences,
    )
