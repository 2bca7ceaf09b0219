"""The owner of what one HTTP request has in the engine: however the request ends, nothing of it is computed further."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from onebox.engine.api import EngineClient, EngineConfig, QueueFullError, Request, RequestHandle
from onebox.server.errors import GenerationError

__all__ = ["RESUBMIT_TIMEOUT_S", "Submission"]

_RETRY_S = 0.05
RESUBMIT_TIMEOUT_S = 30.0
"""How long the rest of an answer may wait for a place in a full queue."""

# So that a request without a grammar does not wait for a thread behind those whose grammar is compiled.
_quick_threads = ThreadPoolExecutor(2, "onebox-submit")
_grammar_threads = ThreadPoolExecutor(4, "onebox-submit-grammar")


class Submission:
    """The server's only way to submit. `close` aborts all that was submitted through it, and forbids more.

    A thread that submits goes on when the task that waits for it is cancelled: what it has submitted is aborted as
    soon as the engine has accepted it.
    """

    def __init__(self, engine: EngineClient, resubmit_timeout_s: float = RESUBMIT_TIMEOUT_S) -> None:
        self._engine = engine
        self._resubmit_timeout_s = resubmit_timeout_s
        # Guards the two below.
        self._lock = threading.Lock()
        self._request_ids: list[str] = []
        self._is_closed = False

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    async def submit_copies(self, request: Request, count: int) -> tuple[RequestHandle, ...]:
        """`count` answers to one prompt, all or none. A grammar is compiled on the way."""
        return await self._in_thread(request, lambda: self._engine.submit_copies(request, count))

    async def resubmit(self, request: Request) -> RequestHandle:
        """The rest of an answer, which waits for a place in a full queue."""
        timeout_s = self._resubmit_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return (await self._in_thread(request, lambda: (self._engine.submit(request),)))[0]
                    except QueueFullError:
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise QueueFullError(
                f"The thinking budget was used up and the queue stayed full for {timeout_s:g} seconds, so the answer "
                "could not be continued; try again later."
            ) from None

    def abort(self, request_id: str) -> None:
        """Ends one request; after its end this has no effect."""
        self._engine.abort(request_id)

    def close(self) -> None:
        """The engine's slots are free within a step. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            request_ids, self._request_ids = self._request_ids, []
        for request_id in request_ids:
            self.abort(request_id)

    async def _in_thread(
        self, request: Request, submit: Callable[[], tuple[RequestHandle, ...]]
    ) -> tuple[RequestHandle, ...]:
        await asyncio.wrap_future(self._engine.awake())
        grammar = request.sampling.grammar
        if grammar:
            # Without a thread that waits: a new grammar may take a while, and many may come at once.
            await asyncio.wrap_future(self._engine.check_grammar(grammar))
        threads = _grammar_threads if grammar else _quick_threads
        return await asyncio.get_running_loop().run_in_executor(threads, self._own, submit)

    def _own(self, submit: Callable[[], tuple[RequestHandle, ...]]) -> tuple[RequestHandle, ...]:
        handles = () if self._is_closed else submit()
        with self._lock:
            self._request_ids += [handle.request_id for handle in handles]
            is_late = self._is_closed
        if is_late:
            self.close()
            raise GenerationError("The client left before the answer was complete.")
        return handles
