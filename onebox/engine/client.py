"""What callers see of an engine, whether it runs on a thread of this process or in a process of its own.

`EngineClient` is the interface, `RequestHandle` what a caller reads, `OpenRequests` the accepted requests by id. The
checks here need no model, so both kinds of engine refuse the same requests with the same messages.
"""

import asyncio
import contextlib
import logging
import queue
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import StrEnum
from numbers import Integral
from typing import NamedTuple, Self

import numpy as np

from onebox.engine.config import EngineConfig
from onebox.engine.grammar.value import Grammar
from onebox.engine.prefix import PrefixLookup
from onebox.engine.request import (
    ClientShare,
    ContextTooLongError,
    EngineStoppedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    QueueFullError,
    Request,
    ShareFullError,
    Started,
)
from onebox.engine.stats import EngineStats
from onebox.spec.errors import UsageError
from onebox.spec.kv import PAGE_TOKENS

__all__ = [
    "Deliveries",
    "EngineClient",
    "EngineRestartingError",
    "Health",
    "HealthStatus",
    "Observer",
    "OpenRequests",
    "RequestHandle",
    "Watch",
    "check_capacity",
    "check_request",
]

_log = logging.getLogger(__name__)

Watch = Callable[[Event, float], None]
"""Called with each event of one request when it is delivered, whether or not anybody reads it. The number is when the
step that produced the event started, on time.monotonic's clock. Runs on the delivering thread: it must be quick."""

Observer = Callable[[Request], Watch]
"""Called with each request when it is accepted."""


class EngineRestartingError(EngineStoppedError):
    """The engine's process died and is being restarted; the request was not accepted."""

    retry_after_s = 5


class HealthStatus(StrEnum):
    STARTING = "starting"
    OK = "ok"
    IDLE = "idle"
    """Its memory is released; the next request starts it again and waits for that."""
    WAKING = "waking"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def takes_requests(self) -> bool:
        return self in (HealthStatus.OK, HealthStatus.IDLE, HealthStatus.WAKING)


class Health(NamedTuple):
    """Whether requests are accepted, and why not."""

    status: HealthStatus
    message: str
    num_restarts: int = 0


class EngineClient(ABC):
    """An engine as callers use it: on a thread of this process (`Engine`) or in its own process (`EngineProcess`)."""

    observer: Observer | None = None

    @property
    @abstractmethod
    def config(self) -> EngineConfig: ...

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @abstractmethod
    def submit_all(self, requests: list[Request]) -> tuple["RequestHandle", ...]:
        """Accepts all of these or none."""

    @abstractmethod
    def check_grammar(self, grammar: Grammar) -> "Future[None]":
        """Done when it is known that the grammar can be used, or failed with why not; cancelling it changes nothing.

        Known grammars are answered at once. A submission checks its grammar too, and waits for it.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Ends an open request at the next step, with a Finished event of reason abort; others are not affected."""

    @abstractmethod
    def lookup(self, request: Request) -> PrefixLookup:
        """What the prefix cache holds of the request's prompt, up to its last token but one.

        Refuses what `submit` would refuse for its prompt. Nothing is computed, loaded or counted as a hit, and no step
        is waited for; an engine that does not answer in time all the same raises QueueFullError.
        """

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def health(self) -> Health: ...

    @abstractmethod
    def close(self) -> None:
        """Fails what is open, stops the engine and waits for it. Closing twice is fine."""

    def awake(self) -> "Future[None]":
        """Done when requests can be submitted: at once, unless the engine has to be started again for it."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def submit(self, request: Request) -> "RequestHandle":
        """Accepts the request or refuses it with an error that says why; nothing is computed before it returns."""
        return self.submit_all([request])[0]

    def submit_copies(self, request: Request, count: int) -> tuple["RequestHandle", ...]:
        """Accepts `count` answers to one prompt, all or none. Copy i has the id `<id>/<i>` and the seed plus i."""
        return self.submit_all(_copies_of(request, count))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RequestHandle:
    """One accepted request's Events, to be read once: by `for` in a thread or by `async for` on an event loop."""

    def __init__(self, request_id: str, watch: Watch | None = None) -> None:
        self.request_id = request_id
        self.is_complete = False
        """Set by a reader that needs no more, for instance after a stop string: the abort that follows is then reported
        as a stop."""
        self.started_at: float | None = None
        """When the step began that took the request out of the queue, on time.monotonic's clock."""
        self._watch = watch
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def deliver(self, event: Event, started_at: float) -> None:
        """Called by the delivering thread; `started_at` as in Watch."""
        if self.is_complete and isinstance(event, Finished) and event.reason is FinishReason.ABORT:
            event = replace(event, reason=FinishReason.STOP)
        if isinstance(event, Started):
            self.started_at = started_at
        if self._watch:
            try:
                self._watch(event, started_at)
            except Exception:
                # Whoever watches must not keep the reader, or the other readers, from their events.
                _log.exception("an observer of request %s failed", self.request_id)
        self._events.put(event)
        if self._wake:
            # The loop may be closed, and its reader gone.
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
        # Set before the queue is first read, so that no event is missed in between.
        self._wake = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            while not self._events.empty():
                event = self._events.get_nowait()
                yield event
                if isinstance(event, Finished | Failed):
                    return
            await ready.wait()
            ready.clear()


Deliveries = list[tuple[RequestHandle, Event]]
"""Events with the handles they go to, in order."""


class OpenRequests:
    """The handles of accepted requests by id. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._handles: dict[str, RequestHandle] = {}
        self._clients: dict[str, ClientShare] = {}
        """Of the open requests that have one, by request id."""

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._handles

    def ids(self) -> list[str]:
        return list(self._handles)

    def accept(
        self, requests: list[Request], config: EngineConfig, observer: Observer | None
    ) -> tuple[RequestHandle, ...]:
        """Opens all of the requests, or refuses all where an id, the queue or the client's share of it is taken."""
        check_capacity([request.request_id for request in requests], self._handles, config)
        self._check_shares(requests)
        handles = tuple(RequestHandle(r.request_id, observer(r) if observer else None) for r in requests)
        self._handles.update((handle.request_id, handle) for handle in handles)
        self._clients.update((r.request_id, r.client) for r in requests if r.client)
        return handles

    def route(self, events: Iterable[Event]) -> Deliveries:
        """Each event with its handle; a request is closed by its last event. Nobody waits for events of closed ones."""
        handles, deliveries = self._handles, Deliveries()
        for event in events:
            is_last = isinstance(event, (Finished, Failed))
            handle = self._close(event.request_id) if is_last else handles.get(event.request_id)
            if handle:
                deliveries.append((handle, event))
        return deliveries

    def remove(self, request_ids: Iterable[str]) -> list[RequestHandle]:
        """Closes these; ids that are closed already are left out."""
        closed = [self._close(request_id) for request_id in request_ids]
        return [handle for handle in closed if handle]

    def _close(self, request_id: str) -> RequestHandle | None:
        self._clients.pop(request_id, None)
        return self._handles.pop(request_id, None)

    def _check_shares(self, requests: list[Request]) -> None:
        asked = Counter(request.client for request in requests)
        for client, count in asked.items():
            if client is None:
                continue
            num_held = sum(open_one.name == client.name for open_one in self._clients.values())
            if num_held + count > client.max_places:
                raise ShareFullError(
                    f"Of the {client.max_places} places that are the share of the API key {client.name!r}, {num_held} "
                    f"are taken and {count} more are asked for; try again when one of its requests has ended."
                )


def _copies_of(request: Request, count: int) -> list[Request]:
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
    """Refuses what the engine could never compute, with the numbers; returns the answer's largest length in tokens."""
    _check_tokens(request, vocab_size)
    _check_bans(request, config, vocab_size)
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
    if request.sampling.min_tokens > max_tokens:
        raise UsageError(
            f"min_tokens is {request.sampling.min_tokens} and at most {max_tokens} tokens can be answered; lower it."
        )
    num_pages = -(-(num_prompt + max_tokens) // PAGE_TOKENS)
    if num_pages > config.num_pages:
        raise ContextTooLongError(
            f"The prompt has {num_prompt} tokens and {max_tokens} more are asked for: {num_pages} pages of "
            f"{PAGE_TOKENS} tokens, where the KV cache has {config.num_pages}. Lower max_tokens or shorten the prompt."
        )
    return max_tokens


def check_capacity(request_ids: list[str], open_ids: Collection[str], config: EngineConfig) -> None:
    """Refuses ids that are taken, and requests beyond the slots and the queue."""
    taken = next((name for name in request_ids if name in open_ids or request_ids.count(name) > 1), None)
    if taken is not None:
        raise UsageError(f"A request with the id {taken} is open already; ids must be unique.")
    places = config.max_num_seqs + config.max_num_waiting
    if len(open_ids) + len(request_ids) > places:
        raise QueueFullError(f"Of {places} places for requests {len(open_ids)} are taken; try again in a moment.")


def _check_tokens(request: Request, vocab_size: int) -> None:
    if not request.prompt:
        raise UsageError("The prompt is empty; at least one token is needed.")
    outside = _outside(request.prompt, vocab_size)
    if outside is not None:
        raise UsageError(f"The prompt holds token id {outside}; the vocabulary's ids go from 0 to {vocab_size - 1}.")
    sampling = request.sampling
    biased = [token_id for token_id, _ in sampling.logit_bias]
    for name, token_ids in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
        outside = _outside(token_ids, vocab_size)
        if outside is not None:
            raise UsageError(f"{name} names token id {outside}; ids go from 0 to {vocab_size - 1}.")


def _outside(token_ids: Sequence[int], vocab_size: int) -> str | None:
    """The first that is no id of the vocabulary, as a message repeats it."""
    with contextlib.suppress(ValueError, OverflowError):
        ids = np.array(token_ids)
        if not len(ids) or (ids.dtype.kind == "i" and ids.ndim == 1 and ids.min() >= 0 and ids.max() < vocab_size):
            return None
    given: Sequence[object] = token_ids
    wrong = (value for value in given if not (isinstance(value, Integral) and 0 <= int(value) < vocab_size))
    return next((repr(value)[:60] for value in wrong), None)


def _check_bans(request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Refuses a min_tokens that leaves no token to sample."""
    sampling = request.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else config.eos_token_ids)}
    if sampling.min_tokens and len(stops) >= vocab_size:
        raise UsageError(
            f"min_tokens is {sampling.min_tokens} and all {vocab_size} tokens are stop tokens, so none may be sampled; "
            "shorten stop_token_ids or leave min_tokens out."
        )
