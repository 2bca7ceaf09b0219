"""What one step computes: a StepPlan, complete and frozen when built, and its StepOutput, part for part.

A step has two kinds of work. A `PromptChunk` is a stretch of a prompt, computed by prefill. A `DecodeRows` is what one
running sequence adds: tokens that are certain but not computed yet (usually one), then its drafts. Both may end in a
`Draw`.

What is created in every step is a NamedTuple: a frozen dataclass takes four times as long to create, and the device
waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from onebox.engine.draft.kinds import Drafter
from onebox.engine.logits import Adjustment
from onebox.engine.request import SamplingParams, TokenLogprob, Vision

__all__ = [
    "DecodeRows",
    "DraftCheck",
    "DraftDepths",
    "Draw",
    "EncodedImages",
    "PromptChunk",
    "Result",
    "Runner",
    "StateSave",
    "StepOutput",
    "StepPlan",
    "StepRun",
]


class DraftCheck(IntEnum):
    """How the token after a row is verified; the numbers are those of `kernels.step.verify_drafts`."""

    COMPARE = 0
    """A draft: accepted if it is the token that is sampled from the row."""
    ACCEPT = 1
    """Certain already, or accepted by synthetic acceptance."""
    REJECT = 2
    """Rejected by synthetic acceptance."""


class DraftDepths(NamedTuple):
    """How many drafts a step makes for each of its sequences, by drafter; a sequence takes those of its own."""

    mtp: int = 0
    block: int = 0

    @property
    def most(self) -> int:
        return max(self)


class Draw(NamedTuple):
    """How tokens are sampled from a sequence's last m rows, which of them are new, and how many to draft next."""

    sampling: SamplingParams
    next_ids: tuple[int, ...]
    """For each row the token known or drafted to follow it; -1 where there is none."""
    checks: tuple[DraftCheck, ...]
    first_new: int
    """The first row whose sampled token is new; m where all that follows is certain already."""
    adjustments: tuple[Adjustment, ...] = ()
    """One for each row from first_new on, or none at all."""
    depth: int = 0
    """Drafts that the next step could use."""
    continues: bool = False
    """Whether the next step's rows will be the token sampled here and the drafts made here, unless a token ends it."""
    drafter: Drafter = Drafter.NONE
    """Who makes the drafts in this step: the MTP head, the DFlash drafter, or nobody (depth 0)."""


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """A prompt's images and videos after the vision tower."""

    positions: NDArray[np.int64]
    """[3, T]: time, height, width of each token of the prompt."""
    next_position: int
    """Of the first token after the prompt, in all three; text counts on from there."""
    cache_tokens: tuple[int, ...]
    """The prompt with its pad tokens replaced by ids of the image content: equal only where the images are."""
    places: NDArray[np.int64]
    """[m]: the pad tokens, in order."""
    embeddings: Any
    """[m, H], on the runner's device."""

    @property
    def position_offset(self) -> int:
        """What is added to the place of a token after the prompt to give its position."""
        return self.next_position - len(self.cache_tokens)


class StateSave(NamedTuple):
    """A state to save: after how many tokens of the sequence, under which checkpoint number."""

    num_tokens: int
    checkpoint: int


@dataclass(frozen=True)
class PromptChunk:
    """A stretch of a prompt; it starts on a page boundary, and ends on one or with the prompt."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    start: int
    """The position of its first token."""
    pages: NDArray[np.int32]
    saves: tuple[StateSave, ...]
    draw: Draw | None
    """Set where the prompt ends."""
    prompt_logprobs: int | None = None
    """Alternatives wanted for each token that follows a token of this chunk within the prompt; None: no logprobs."""
    following: int | None = None
    """The prompt's token after this chunk."""
    images: EncodedImages | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class DecodeRows(NamedTuple):
    """The rows of one running sequence: certain tokens, then drafts."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    start: int
    num_accepted: int
    """Rows of its last step that were accepted; this step folds them into the state."""
    pages: NDArray[np.int32]
    draw: Draw
    position_offset: int = 0
    """What earlier images add to the places of these tokens to give their positions."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class StepPlan(NamedTuple):
    """Slots are cleared and restored first, then prompt chunks are computed, then decode rows."""

    cleared_slots: tuple[int, ...] = ()
    restored: tuple[tuple[int, int], ...] = ()
    """(checkpoint, slot)."""
    chunks: tuple[PromptChunk, ...] = ()
    rows: tuple[DecodeRows, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.rows

    def depth_by(self, drafter: Drafter) -> int:
        """The most drafts that this head makes for a sequence of the decode rows."""
        return max((rows.draw.depth for rows in self.rows if rows.draw.drafter is drafter), default=0)


class Result(NamedTuple):
    """The outcome of a prompt chunk or of a sequence's rows."""

    token_ids: tuple[int, ...] = ()
    """New tokens, in order."""
    num_accepted: int = 0
    """Rows whose tokens are certain now; 0 for a chunk, all of whose tokens are."""
    drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the new tokens, where asked for."""
    prompt_logprobs: Sequence[TokenLogprob] = ()


class StepOutput(NamedTuple):
    """In the order of the plan: results, or the exception that ends a sequence."""

    chunks: tuple[Result | Exception, ...] = ()
    rows: tuple[Result | Exception, ...] = ()


class StepRun(Protocol):
    """A step under way."""

    def finish(self) -> StepOutput:
        """Does what is left of the step, waits for the device and returns the results."""


class Runner(Protocol):
    """Owns the model and its memory; used by the engine thread alone."""

    @property
    def vocab_size(self) -> int: ...

    def start(self, plan: StepPlan) -> StepRun:
        """Queues the step on the device and returns without waiting for it.

        What cannot be queued quickly (prompts, graphs to capture, any step on a CPU) is left to `finish`: the host work
        that the caller does between the two would have to wait for it.
        """

    def encode_images(self, prompt: tuple[int, ...], vision: Vision) -> EncodedImages:
        """Runs the vision tower. Refuses what does not fit the prompt or the model with a OneboxError."""

    def put_draft_rows(self, places: Sequence[int], token_ids: Sequence[int]) -> None:
        """Has the head for drafts hold the rows of these tokens at these places; later steps draft from them."""

    def cache_tokens(self, prompt: tuple[int, ...], vision: Vision) -> tuple[int, ...]:
        """The prompt as the prefix cache keys it, without running the tower. May be called by any thread."""
