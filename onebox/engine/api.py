"""The engine's only door: submit token ids, receive Events, abort, look at the stats, close.

Callers know no tensors and no steps. One thread owns the model and the scheduler; what crosses over is a Request on the
way in and Events on the way out, so the thread can become a process without a change to any caller. Nothing in this
module imports torch.
"""

import asyncio
import contextlib
import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

from onebox.engine.batch import Runner
from onebox.engine.request import (
    ContextTooLongError,
    Counts,
    EngineConfig,
    EngineStats,
    EngineStoppedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    QueueFullError,
    Request,
    SamplingParams,
    Started,
    Tokens,
)
from onebox.engine.scheduler import Scheduler, Sequence
from onebox.spec.errors import UsageError

__all__ = [
    "ContextTooLongError",
    "Counts",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "EngineStoppedError",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "QueueFullError",
    "Request",
    "RequestHandle",
    "SamplingParams",
    "Started",
    "Tokens",
]

_log = logging.getLogger(__name__)


class RequestHandle:
    """One accepted request's Events, to be read once: by `for` in a thread or by `async for` on an event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def post(self, event: Event) -> None:
        """Called by the engine thread."""
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


class Engine:
    """The loaded model as callers see it. Every accepted request ends with one Finished or Failed event."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.config = config
        self._runner = runner
        self._scheduler = Scheduler(config, release=runner.release)
        # Guards all below; the engine thread waits on it when nothing is alive.
        self._changed = threading.Condition()
        self._open: dict[str, RequestHandle] = {}
        self._submitted: deque[Sequence] = deque()
        self._aborted: deque[str] = deque()
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._loop, name="onebox-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called from any thread.

    def submit(self, request: Request) -> RequestHandle:
        """Accepts the request or refuses it with an error that says why; nothing is computed before it returns."""
        sequence = self._sequence(request)
        with self._changed:
            self._refuse_when_stopped_or_full(request.request_id)
            handle = self._open[request.request_id] = RequestHandle(request.request_id)
            self._submitted.append(sequence)
            self._changed.notify()
        return handle

    def abort(self, request_id: str) -> None:
        """Ends the request at the next step; its last event is Finished with the reason abort. Others: no effect."""
        with self._changed:
            if request_id in self._open:
                self._aborted.append(request_id)
                self._changed.notify()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        with self._changed:
            num_submitted, is_alive = len(self._submitted), self._stopped is None
        return EngineStats(
            is_alive=is_alive,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_submitted,
            num_finished=scheduler.num_finished,
            num_failed=scheduler.num_failed,
            prompt_tokens=scheduler.prompt_tokens,
            completion_tokens=scheduler.completion_tokens,
        )

    def close(self) -> None:
        """Fails what is open, stops the thread and waits for it. Closing twice is fine."""
        self._stop("The engine was closed before this request was done.")
        self._thread.join()

    def _sequence(self, request: Request) -> Sequence:
        sampling, limit, num_prompt = request.sampling, self.config.max_model_len, len(request.prompt)
        self._refuse_bad_prompt(request.prompt)
        if num_prompt >= limit:
            raise ContextTooLongError(
                f"The prompt has {num_prompt} tokens and the context holds {limit}, answer included; shorten it."
            )
        max_tokens = sampling.max_tokens or limit - num_prompt
        if num_prompt + max_tokens > limit:
            raise ContextTooLongError(
                f"The prompt has {num_prompt} tokens and {max_tokens} more are asked for, {num_prompt + max_tokens} in "
                f"all; the context holds {limit}. Lower max_tokens or shorten the prompt."
            )
        if sampling.seed is None:
            request = replace(request, sampling=replace(sampling, seed=secrets.randbits(63)))
        eos = () if sampling.ignore_eos else self.config.eos_token_ids
        return Sequence(request, max_tokens, frozenset(sampling.stop_token_ids) | frozenset(eos))

    def _refuse_bad_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise UsageError("The prompt is empty; at least one token is needed.")
        outside = next((token for token in prompt if not 0 <= token < self._runner.vocab_size), None)
        if outside is not None:
            raise UsageError(
                f"The prompt holds token id {outside}; the vocabulary's ids go from 0 to {self._runner.vocab_size - 1}."
            )

    def _refuse_when_stopped_or_full(self, request_id: str) -> None:
        if self._stopped is not None:
            raise EngineStoppedError("The engine has stopped and accepts nothing more.")
        if request_id in self._open:
            raise UsageError(f"A request with the id {request_id} is open already; ids must be unique.")
        places = self.config.max_num_seqs + self.config.max_num_waiting
        if len(self._open) >= places:
            raise QueueFullError(f"All {places} places for requests are taken; try again in a moment.")

    def _stop(self, message: str) -> None:
        with self._changed:
            if self._stopped is None:
                self._stopped = message
            self._changed.notify()

    # The engine thread.

    def _loop(self) -> None:
        try:
            while self._take_in():
                self._step()
        except Exception as error:
            _log.exception("the engine died")
            self._stop(f"The engine died: {error}.")
        finally:
            self._fail_open()

    def _take_in(self) -> bool:
        """Waits until there is something to do, takes in what came, and tells whether to go on."""
        with self._changed:
            self._changed.wait_for(self._has_news if self._scheduler.is_idle else lambda: True)
            submitted, aborted = [*self._submitted], [*self._aborted]
            self._submitted.clear()
            self._aborted.clear()
            goes_on = self._stopped is None
        for sequence in submitted:
            self._scheduler.add(sequence)
        for request_id in aborted:
            self._deliver(self._scheduler.abort(request_id))
        return goes_on

    def _has_news(self) -> bool:
        return bool(self._submitted or self._aborted or self._stopped)

    def _step(self) -> None:
        """Decide, compute, account."""
        batch = self._scheduler.next()
        output = self._runner.run(batch)
        self._deliver(self._scheduler.commit(batch, output))
        if self._scheduler.is_idle:
            self._scheduler.check()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            with self._changed:
                is_last = isinstance(event, Finished | Failed)
                handle = self._open.pop(event.request_id) if is_last else self._open[event.request_id]
            handle.post(event)

    def _fail_open(self) -> None:
        with self._changed:
            handles, message = list(self._open.values()), self._stopped or "The engine stopped."
            self._open.clear()
        for handle in handles:
            handle.post(Failed(handle.request_id, message))
