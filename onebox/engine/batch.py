"""What one step computes: a Batch, complete and frozen when built, and its StepOutput, part for part.

A step has two kinds of work. A `Piece` is a stretch of a prompt, computed by prefill. A `Rows` is what one running
sequence adds: tokens that are certain but not computed yet (one, as a rule), then its drafts. Both may end in a `Draw`.

What is made anew in every step is a NamedTuple: a frozen dataclass takes four times as long to make, and the device
waits for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from onebox.engine.adjust import Adjustment
from onebox.engine.request import SamplingParams, TokenLogprob, Vision

__all__ = ["Batch", "Draw", "Piece", "Result", "Rows", "Runner", "Save", "Seen", "StepOutput", "Verdict"]


class Verdict(IntEnum):
    """What becomes of the token that a row is followed by; the numbers are those of `kernels.settle`."""

    COMPARE = 0
    """It is a draft: kept if it is the token that the row draws."""
    ACCEPT = 1
    """It is certain already, or taken by synthetic acceptance."""
    REJECT = 2
    """It is refused by synthetic acceptance."""


class Draw(NamedTuple):
    """How tokens are drawn after a sequence's last m rows, which of them are new, and how many to draft further."""

    sampling: SamplingParams
    next_ids: tuple[int, ...]
    """For each row the token known or drafted to follow it; -1 where there is none."""
    verdicts: tuple[Verdict, ...]
    first_new: int
    """The first row whose drawn token is new; m where all that follows is certain already."""
    adjustments: tuple[Adjustment, ...] = ()
    """One for each row from first_new on, or none at all."""
    depth: int = 0
    """MTP drafts that the next step could use."""
    goes_on: bool = False
    """Whether the next step's rows will be the token drawn here and the drafts made here, unless a token ends it."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A prompt with images, as the runner sees it."""

    positions: NDArray[np.int64]
    """[3, T]: time, height, width of each token."""
    next_position: int
    """Of the first token after the prompt, in all three; text counts on from there."""
    cache_tokens: tuple[int, ...]
    """The prompt with its pad tokens replaced by what they stand for: equal only where the images are."""
    places: NDArray[np.int64]
    """[m]: the pad tokens, in order."""
    embeddings: Any
    """[m, H], the runner's own."""

    @property
    def offset(self) -> int:
        """What is added to the place of a token after the prompt to give its position."""
        return self.next_position - len(self.cache_tokens)


@dataclass(frozen=True)
class Save:
    """A state to be kept: after how many tokens of the sequence, under which checkpoint number."""

    num_tokens: int
    checkpoint: int


@dataclass(frozen=True)
class Piece:
    """A stretch of a prompt from a grid point on; it ends at a grid point or with the prompt."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    start: int
    """The position of its first token."""
    pages: NDArray[np.int32]
    saves: tuple[Save, ...]
    draw: Draw | None
    """Set where the prompt ends."""
    prompt_logprobs: int | None = None
    """Alternatives wanted for each token that follows a token of this piece within the prompt; None: nothing."""
    following: int | None = None
    """The prompt's token after this piece."""
    seen: Seen | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Rows(NamedTuple):
    """The rows of one running sequence: certain tokens, then drafts."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    start: int
    keep: int
    """Tokens of its last step that turned out right."""
    pages: NDArray[np.int32]
    draw: Draw
    position_offset: int = 0
    """What images before add to the places of these tokens to give their positions."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Batch(NamedTuple):
    """Slots are cleared and restored first, then pieces are computed, then rows."""

    cleared_slots: tuple[int, ...] = ()
    restored: tuple[tuple[int, int], ...] = ()
    """(checkpoint, slot)."""
    pieces: tuple[Piece, ...] = ()
    rows: tuple[Rows, ...] = ()


class Result(NamedTuple):
    """What a piece or a sequence's rows gave."""

    token_ids: tuple[int, ...] = ()
    """New tokens, in order."""
    num_kept: int = 0
    """Rows whose tokens are now certain; a piece keeps all its tokens and leaves this 0."""
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the new tokens, where asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class StepOutput(NamedTuple):
    """In the order of the batch: results, or the exception that ends a sequence."""

    pieces: tuple[Result | Exception, ...] = ()
    rows: tuple[Result | Exception, ...] = ()


class Runner(Protocol):
    """Owns the model and its memory; used by the engine thread alone."""

    @property
    def vocab_size(self) -> int: ...

    def run(self, batch: Batch, meanwhile: Callable[[], None]) -> StepOutput:
        """Computes the step.

        `meanwhile` is what the host has to do beside: to be called when the device has its work, or before that where
        giving it keeps this thread busy. A second call does nothing.
        """

    def see(self, prompt: tuple[int, ...], vision: Vision) -> Seen:
        """Looks at a prompt's images. Refuses what does not fit the prompt or the model with a OneboxError."""
