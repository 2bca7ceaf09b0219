"""An open request as the scheduler sees it: its tokens so far, what memory holds of them, and what ends it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onebox.engine.config import EngineConfig
from onebox.engine.draft.speculate import SequenceDrafts
from onebox.engine.logits import LogitsRules
from onebox.engine.request import AcceptanceCounts, CacheTier, Counts, FinishReason, Request
from onebox.engine.step import EncodedImages
from onebox.spec.kv import PAGE_TOKENS

if TYPE_CHECKING:
    from onebox.engine.disk.jobs import LoadJob

__all__ = ["Sequence", "checkpoint_positions"]

_EARLIER_TOKENS = 512
"""The earlier cut is so far before the last message: longer than most questions about a document."""
_LEAST_EARLIER_TOKENS = 2048
"""Prompts that are shorter get none: computing them again costs little more than the state is worth."""


@dataclass(eq=False)
class Sequence:
    """Mutable; the scheduler alone changes it."""

    request: Request
    max_tokens: int
    stop_token_ids: frozenset[int]
    logits_rules: LogitsRules
    speculation: SequenceDrafts
    arrival: int = 0
    turn: int = 0
    """Among the clients, see `turns.py`."""
    deadline: float | None = None
    """On the engine's clock."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer, without the stop token."""
    num_sampled: int = 0
    """Tokens sampled, a stop token included."""
    num_cached: int = 0
    cached_tier: CacheTier | None = None
    num_overtaken: int = 0
    """Later requests that were admitted before it."""
    num_left: int = 0
    """Prompt tokens that were not in the prefix cache when it came."""
    is_started: bool = False
    images: EncodedImages | None = None
    num_prompt_logprobs: int = 0
    """How many of them were delivered."""

    # What memory holds of it; all of this is empty while it waits.
    slot: int | None = None
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    num_computed: int = 0
    """Tokens that memory holds, the accepted ones of the last step included."""
    num_accepted: int = 0
    """Of those, the ones that the next step folds into the state."""
    save_positions: tuple[int, ...] = ()
    """Where the prompt's state is to be saved, in rising order."""
    reserved: set[int] = field(default_factory=set)
    """Checkpoint numbers that this step saves states under, until they are in the prefix cache."""

    # With prefixes on disk.
    prefix_keys: list[bytes] | None = None
    """Of the prompt's pages; None: not computed yet."""
    load: "LoadJob | None" = None
    """Under way for it: it has a slot, and nothing else."""
    loaded: "LoadJob | None" = None
    """Complete, and its prefix in the cache when it was last looked at."""
    num_loads: int = 0

    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.num_prompt = len(self.tokens)

    @property
    def order(self) -> tuple[int, int, int]:
        """The lower one is scheduled first and preempted last."""
        return self.request.priority, self.turn, self.arrival

    def has_same_turns(self, other: "Sequence") -> bool:
        """Whether their order is the client's own affair: requests of one client with one priority."""
        one, two = self.request, other.request
        return one.priority == two.priority and one.client == two.client

    @property
    def cache_tokens(self) -> tuple[int, ...]:
        """The prompt as the prefix cache keys it."""
        return self.images.cache_tokens if self.images else self.request.prompt

    @property
    def needs_images(self) -> bool:
        """Whether its images have yet to be encoded, before anything else can be computed."""
        return self.request.vision is not None and self.images is None

    @property
    def is_cached(self) -> bool:
        """Whether its prompt may use the prefix cache and enter it."""
        return self.request.uses_cache

    def is_late(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prompt

    @property
    def counts(self) -> Counts:
        by_class = self.speculation.counts
        drafts = sum(by_class.values(), AcceptanceCounts())
        return Counts(self.num_prompt, self.num_sampled, self.num_cached, drafts, self.cached_tier, by_class)

    def num_pages_needed(self, ahead: int) -> int:
        """Pages for the tokens that are certain and `ahead` more, but never more than the request can fill."""
        longest = self.num_prompt + self.max_tokens
        return -(-min(len(self.tokens) + ahead, longest) // PAGE_TOKENS)

    def append(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends sampled tokens until one ends the sequence: (those to deliver, the reason where it ended)."""
        delivered: list[int] = []
        reason = None
        for token_id in token_ids:
            self.num_sampled += 1
            if token_id in self.stop_token_ids:
                reason = FinishReason.STOP
                break
            delivered.append(token_id)
            if self.num_sampled == self.max_tokens:
                reason = FinishReason.LENGTH
                break
        self.tokens += delivered
        taken = tuple(delivered)
        if reason:
            said = (*taken, token_id) if reason is FinishReason.STOP else taken
            self.logits_rules.finish(said)
            self.speculation.finish(said)
        else:
            self.logits_rules.advance(taken)
            self.speculation.extend(taken)
        return taken, reason

    def forget(self) -> None:
        """Memory no longer holds any of it."""
        self.slot, self.pages = None, np.empty(0, dtype=np.int32)
        self.num_computed = self.num_accepted = 0
        self.save_positions = ()
        self.reserved = set()


def checkpoint_positions(prompt: tuple[int, ...], config: EngineConfig, after: int) -> tuple[int, ...]:
    """The grid points beyond `after` at which a prompt's state is worth saving, in rising order.

    The last one before the last message opens: the next turn's prompt leaves this one there, because the answer comes
    back without its reasoning. The last one before the second message: the system prompt, which others share. The last
    one of the prompt, for a request that continues or repeats it. In a long prompt one that is earlier than the last
    message by a question's length: the same document comes back with another question at its end. Long stretches
    between get one every `checkpoint_spacing` tokens.
    """
    if not config.num_checkpoints:
        return ()
    opened = np.flatnonzero(np.isin(np.array(prompt), config.boundary_token_ids)).tolist()
    wanted = {len(prompt), *opened[1:2], *opened[-1:]}
    if len(prompt) >= _LEAST_EARLIER_TOKENS:
        wanted.add((opened[-1] if opened else len(prompt)) - _EARLIER_TOKENS)
    points = {position // PAGE_TOKENS * PAGE_TOKENS for position in wanted}
    points |= set(range(config.checkpoint_spacing, len(prompt), config.checkpoint_spacing))
    return tuple(sorted(point for point in points if point > after))
