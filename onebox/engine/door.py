"""What every door to an engine has in common, whether the engine is a thread here or a process of its own.

`RequestHandle` is what a caller reads, `EngineDoor` is what a caller may rely on, and the checks are the refusals that
need no model, so that both doors refuse the same things in the same words.
"""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from onebox.engine.config import PAGE_TOKENS, EngineConfig
from onebox.engine.request import (
    ContextTooLongError,
    EngineStoppedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    QueueFullError,
    Request,
)
from onebox.engine.stats import EngineStats
from onebox.spec.errors import UsageError

__all__ = [
    "EngineDoor",
    "EngineRestartingError",
    "Health",
    "HealthStatus",
    "Observer",
    "RequestHandle",
    "Watch",
    "check_places",
    "check_request",
    "copies_of",
]

Watch = Callable[[Event, float], None]
"""Hears one request's events when they come, whether or not anybody reads them. The number is when the step that gave
the event began, on time.monotonic's clock. Called on the thread that brings events: it must be quick."""

Observer = Callable[[Request], Watch]
"""Hears of each request when it is accepted."""


class EngineRestartingError(EngineStoppedError):
    """The engine's process died and the next one is on its way; the request was not accepted."""

    retry_after_s = 5


class HealthStatus(StrEnum):
    STARTING = "starting"
    OK = "ok"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Health:
    """Whether requests are taken, and why not where they are not."""

    status: HealthStatus
    message: str
    num_restarts: int = 0


class EngineDoor(Protocol):
    """An engine as callers see it: a thread of this process (Engine) or a process of its own (EngineProcess)."""

    observer: Observer | None

    @property
    def config(self) -> EngineConfig: ...
    def submit(self, request: Request) -> "RequestHandle": ...
    def submit_all(self, requests: list[Request]) -> tuple["RequestHandle", ...]: ...
    def submit_copies(self, request: Request, count: int) -> tuple["RequestHandle", ...]: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    def health(self) -> Health: ...
    def close(self) -> None: ...
    def __enter__(self) -> "EngineDoor": ...
    def __exit__(self, *_: object) -> None: ...


class RequestHandle:
    """One accepted request's Events, to be read once: by `for` in a thread or by `async for` on an event loop."""

    def __init__(self, request_id: str, watch: Watch | None = None) -> None:
        self.request_id = request_id
        self.is_complete = False
        """Set by a reader that has all it wants, such as a stop string: the abort that follows is told as a stop."""
        self._watch = watch
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def post(self, event: Event, began: float) -> None:
        """Called by the thread that brings events; `began` as in Watch."""
        if self.is_complete and isinstance(event, Finished) and event.reason is FinishReason.ABORT:
            event = replace(event, reason=FinishReason.STOP)
        if self._watch:
            self._watch(event, began)
        self._events.put(event)
        if self._wake:
            # A loop that is closed has no reader any more.
            with contextlib.suppress(RuntimeError):
                self._wake()

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        # Set before the first look into the queue, so that no event slips in between unheard.
        self._wake = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            while not self._events.empty():
                event = self._events.get_nowait()
                yield event
                if isinstance(event, Finished | Failed):
                    return
            await ready.wait()
            ready.clear()


def copies_of(request: Request, count: int) -> list[Request]:
    """`count` answers to one prompt. Copy i has the id `<id>/<i>` and the seed plus i."""
    if count < 1:
        raise UsageError(f"n is {count}; at least one answer must be asked for.")
    seed = request.sampling.seed
    return [
        replace(
            request,
            request_id=f"{request.request_id}/{place}",
            sampling=request.sampling if seed is None else replace(request.sampling, seed=seed + place),
        )
        for place in range(count)
    ]


def check_request(request: Request, config: EngineConfig, vocab_size: int) -> int:
    """Refuses what no step could carry out, with the numbers; gives the most tokens that the answer may have."""
    _check_tokens(request, vocab_size)
    limit, num_prompt = config.max_model_len, len(request.prompt)
    if num_prompt >= limit:
        raise ContextTooLongError(
            f"The prompt has {num_prompt} tokens and the context holds {limit}, answer included; shorten it."
        )
    max_tokens = request.sampling.max_tokens or limit - num_prompt
    if num_prompt + max_tokens > limit:
        raise ContextTooLongError(
            f"The prompt has {num_prompt} tokens and {max_tokens} more are asked for, {num_prompt + max_tokens} in "
            f"all; the context holds {limit}. Lower max_tokens or shorten the prompt."
        )
    num_pages = -(-(num_prompt + max_tokens) // PAGE_TOKENS)
    if num_pages > config.num_pages:
        raise ContextTooLongError(
            f"The prompt has {num_prompt} tokens and {max_tokens} more are asked for: {num_pages} pages of "
            f"{PAGE_TOKENS} tokens, where the KV cache has {config.num_pages}. Lower max_tokens or shorten the prompt."
        )
    return max_tokens


def check_places(request_ids: list[str], open_ids: Collection[str], config: EngineConfig) -> None:
    """Refuses names that are taken, and requests beyond the queue's places."""
    taken = next((name for name in request_ids if name in open_ids or request_ids.count(name) > 1), None)
    if taken is not None:
        raise UsageError(f"A request with the id {taken} is open already; ids must be unique.")
    places = config.max_num_seqs + config.max_num_waiting
    if len(open_ids) + len(request_ids) > places:
        raise QueueFullError(f"Of {places} places for requests {len(open_ids)} are taken; try again in a moment.")


def _check_tokens(request: Request, vocab_size: int) -> None:
    if not request.prompt:
        raise UsageError("The prompt is empty; at least one token is needed.")
    outside = next((token for token in request.prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UsageError(f"The prompt holds token id {outside}; the vocabulary's ids go from 0 to {vocab_size - 1}.")
    named = [("logit_bias", token_id) for token_id, _ in request.sampling.logit_bias]
    named += [("stop_token_ids", token_id) for token_id in request.sampling.stop_token_ids]
    for name, token_id in named:
        if not 0 <= token_id < vocab_size:
            raise UsageError(f"{name} names token id {token_id}; ids go from 0 to {vocab_size - 1}.")
