"""The engine's nouns: requests (Request, SamplingParams), their results (Events), and refusals (errors).

Everything here is frozen and free of tensors, so that it may cross a thread or a process boundary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.engine.draft.kinds import Drafter, TextPart
from onebox.engine.grammar.value import Grammar
from onebox.engine.logprobs import TokenLogprob
from onebox.spec.errors import OneboxError, UsageError

__all__ = [
    "AcceptanceCounts",
    "CacheTier",
    "ClassCounts",
    "ClientShare",
    "ContextTooLongError",
    "Counts",
    "EngineStoppedError",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "Pictures",
    "PromptLogprobs",
    "QueueFullError",
    "Request",
    "SamplingParams",
    "ShareFullError",
    "Started",
    "TokenLogprob",
    "Tokens",
    "Vision",
    "failure_of",
]

MAX_LOGPROBS = 20
"""Alternatives that a request may ask for at each position, as in the OpenAI API."""

MAX_NAMED_TOKENS = 4096
"""Tokens that logit_bias or stop_token_ids may name: they are sent to the device in every step."""

_LEAST, _LARGEST = 1e-10, 1e10
"""What logits may be divided or multiplied by. They are float32, computed with in float64: with these, values up to
1e20 stay finite, and no share of a probability becomes 0."""

_MAX_TIMEOUT_S = 1e9


class QueueFullError(OneboxError):
    """All slots and the whole queue are taken; the request was not accepted."""

    retry_after_s = 1


class ShareFullError(QueueFullError):
    """The client's share of the places is taken; the request was not accepted, others' may be."""


class ContextTooLongError(UsageError):
    """The prompt, or the prompt and the tokens asked for, exceed the context; the message carries both numbers."""


class EngineStoppedError(OneboxError):
    """The engine is closed or has died; nothing more is computed."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. The defaults draw from the model's own distribution."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 keeps all tokens."""
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are dropped."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    seed: int | None = None
    """None: the engine draws one. With a seed, a token's noise depends on its position alone."""
    max_tokens: int | None = None
    """None: as many as the context holds."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """The log-probability of each generated token, and this many alternatives; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first. The prompt is then computed whole, without the cache."""
    grammar: Grammar | None = None

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's distribution or a sharper one, with nothing added to its logits."""
        has_penalty = bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)
        return self.temperature <= 1 and not has_penalty and not self.logit_bias and self.grammar is None

    def __post_init__(self) -> None:
        self._refuse_other_types()
        if self.temperature != 0 and not _LEAST <= self.temperature <= _LARGEST:
            raise UsageError(
                f"temperature is {_brief(self.temperature)}; it must be 0 (greedy) or from {_LEAST} to {_LARGEST:.0e}."
            )
        if not _LEAST <= self.top_p <= 1:
            raise UsageError(f"top_p is {_brief(self.top_p)}; it must be from {_LEAST} to 1.")
        if not 0 <= self.top_k < 2**31:
            raise UsageError(f"top_k is {_brief(self.top_k)}; it must be 0 (all tokens) or more, and below 2^31.")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {_brief(self.min_p)}; it must be from 0 to 1.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {_brief(self.max_tokens)}; it must be at least 1.")
        if not 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens):
            raise UsageError(f"min_tokens is {_brief(self.min_tokens)}; it must be from 0 to max_tokens.")
        self._refuse_bad_penalties()
        self._refuse_bad_logprobs()

    def _refuse_other_types(self) -> None:
        """What is computed with must be numbers: a wrong type would be found out in the step that all share."""
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not _is_number(getattr(self, name)):
                raise UsageError(f"{name} is {_brief(getattr(self, name))}; it must be a number.")
        for name in ("top_k", "min_tokens"):
            if not _is_integer(getattr(self, name)):
                raise UsageError(f"{name} is {_brief(getattr(self, name))}; it must be an integer.")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if not (getattr(self, name) is None or _is_integer(getattr(self, name))):
                raise UsageError(f"{name} is {_brief(getattr(self, name))}; it must be an integer or None.")

    def _refuse_bad_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UsageError(f"{name} is {_brief(getattr(self, name))}; it must be from -2 to 2.")
        if not _LEAST <= self.repetition_penalty <= _LARGEST:
            raise UsageError(
                f"repetition_penalty is {_brief(self.repetition_penalty)}; it must be from {_LEAST} to {_LARGEST:.0e}."
            )
        for name in ("logit_bias", "stop_token_ids"):
            if len(getattr(self, name)) > MAX_NAMED_TOKENS:
                raise UsageError(
                    f"{name} names {len(getattr(self, name))} tokens; it may name at most {MAX_NAMED_TOKENS}."
                )
        for token_id, bias in self.logit_bias:
            if not (_is_number(bias) and -100 <= bias <= 100):
                raise UsageError(
                    f"logit_bias of token {_brief(token_id)} is {_brief(bias)}; it must be a number from -100 to 100."
                )

    def _refuse_bad_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
                raise UsageError(f"{name} is {asked}; it must be from 0 to {MAX_LOGPROBS}.")


@dataclass(frozen=True, eq=False)
class Pictures:
    """All images, or all videos, of one prompt, cut into patches by the checkpoint's own processor."""

    patches: NDArray[np.float32]
    """[P, in_channels * temporal_patch_size * patch_size^2], one picture after the other."""
    grids: tuple[tuple[int, int, int], ...]
    """Each one's patches in time, height and width; P is the sum of their products."""


@dataclass(frozen=True)
class Vision:
    """A prompt's images and videos. The prompt has one pad token for each embedding that the tower makes of them."""

    images: Pictures | None = None
    videos: Pictures | None = None


class ClientShare(NamedTuple):
    """Whose a request is, where several clients share the engine. In the queue they take turns."""

    name: str
    max_places: int
    """Of the places for requests, slots and queue together, those that this client may hold."""
    max_slots: int | None = None
    """Of the slots, those that it may hold while another client waits for one; None: all of them."""
    is_key: bool = True
    """Whether the name is that of an API key; otherwise it is an address."""


@dataclass(frozen=True)
class Request:
    """One prompt as token ids. The id is unique among all open requests."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """The lower number goes first, and may take the place of a running request with a higher one."""
    timeout_s: float | None = None
    """Seconds from submission after which the request ends with what it has."""
    cache_prompt: bool = True
    """Whether the prompt may use the prefix cache and enter it."""
    pin_prompt: bool = False
    """Whether what it adds to the cache stays until nothing else is left to evict."""
    vision: Vision | None = None
    client: ClientShare | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not (_is_number(self.timeout_s) and 0 < self.timeout_s < _MAX_TIMEOUT_S):
            raise UsageError(
                f"timeout_s is {_brief(self.timeout_s)}; it must be above 0 and below {_MAX_TIMEOUT_S:.0e}."
            )
        if not _is_integer(self.priority):
            raise UsageError(f"priority is {_brief(self.priority)}; it must be an integer.")

    @property
    def uses_cache(self) -> bool:
        """Whether its prompt may use the prefix cache and enter it: log-probabilities of a prompt need all of it."""
        return self.cache_prompt and self.sampling.prompt_logprobs is None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class AcceptanceCounts:
    """Totals of drafting that can be added up: over steps, sequences or engines."""

    num_steps: int = 0
    """Steps of a sequence in which something was drafted for it."""
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """How many first drafts were accepted, how many second ones, and so on."""

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        return AcceptanceCounts(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            tuple(first + second for first, second in pairs),
        )


ClassCounts = Mapping[tuple[Drafter, TextPart], AcceptanceCounts]
"""By who drafted, and for which part of the answer; what never occurred is absent."""


class CacheTier(StrEnum):
    """Where a cached prefix is held."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True)
class Counts:
    """Prompt and generated tokens; the token that ended the answer is counted though it is not delivered."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    drafts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    cached_tier: CacheTier | None = None
    """Where the cached tokens were found: on disk, where they were read from it for this request."""
    drafts_by_class: ClassCounts = field(default_factory=dict)
    """Of these drafts."""


@dataclass(frozen=True)
class Started:
    """The request left the queue and got a slot."""

    request_id: str


@dataclass(frozen=True)
class PromptLogprobs:
    """Of the prompt's tokens from the second on, in order, in one or more parts before the first Tokens."""

    request_id: str
    logprobs: Sequence[TokenLogprob]
    """`LogprobRows`, where a model computed them."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens in order: one or more per step, never the stop token. Log-probabilities where they were asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Finished:
    """The last event of a request that ended normally."""

    request_id: str
    reason: FinishReason
    counts: Counts


@dataclass(frozen=True)
class Failed:
    """The last event of a request that the engine could not complete."""

    request_id: str
    message: str
    is_refusal: bool = False
    """Whether the request itself is why: its grammar, its images. Sent again, it would fail again."""


Event = Started | PromptLogprobs | Tokens | Finished | Failed


def failure_of(request_id: str, error: BaseException) -> Failed:
    """How a request ends with this error."""
    if isinstance(error, OneboxError):
        return Failed(request_id, str(error), is_refusal=True)
    if isinstance(error, ArithmeticError):
        reason = str(error).rstrip(".") or "its numbers are not finite"
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        reason = "there is not enough memory for it"
    else:
        reason = f"there was an internal error ({type(error).__name__}), which the log describes"
    return Failed(request_id, f"The model could not compute this request: {reason}.")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral)


def _brief(value: object) -> str:
    """The value as a message repeats it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
