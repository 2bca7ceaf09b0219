"""The engine's nouns: what is asked (Request, SamplingParams), what comes back (Events), what refuses (errors).

Everything here is frozen and free of tensors, so that it may cross a thread or, later, a process boundary.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from onebox.spec.errors import OneboxError, UsageError

__all__ = [
    "ContextTooLongError",
    "Counts",
    "EngineConfig",
    "EngineStats",
    "EngineStoppedError",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "QueueFullError",
    "Request",
    "SamplingParams",
    "Started",
    "Tokens",
]


class QueueFullError(OneboxError):
    """All slots and all places in the queue are taken; the request was not accepted."""

    retry_after_s = 1


class ContextTooLongError(UsageError):
    """The prompt, or the prompt and the tokens asked for, exceed the context; the message carries both numbers."""


class EngineStoppedError(OneboxError):
    """The engine is closed or has died; nothing more is computed."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits that hold for the engine's life. All are resolved numbers."""

    max_model_len: int
    max_num_seqs: int = 8
    max_num_waiting: int = 64
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.max_num_waiting < 0:
            raise UsageError(f"max_num_waiting is {self.max_num_waiting}; it cannot be negative.")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """None lets the engine draw one; with a seed, position alone decides a token's noise."""
    max_tokens: int | None = None
    """None: as many as the context holds."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}; it must be a number from 0 up.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; it must be at least 1.")


@dataclass(frozen=True)
class Request:
    """One prompt as token ids. The id names it among all open requests."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Counts:
    """Tokens read and tokens made; the token that ended the answer is counted though it is not delivered."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Started:
    """The request left the queue and got a slot."""

    request_id: str


@dataclass(frozen=True)
class Tokens:
    """New tokens in order: one or more a step, never the stop token."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """The last event of a request that went well."""

    request_id: str
    reason: FinishReason
    counts: Counts


@dataclass(frozen=True)
class Failed:
    """The last event of a request that the engine could not carry out."""

    request_id: str
    message: str


Event = Started | Tokens | Finished | Failed


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine from outside; the totals count since it started."""

    is_alive: bool
    num_running: int
    num_waiting: int
    num_finished: int
    num_failed: int
    prompt_tokens: int
    completion_tokens: int
