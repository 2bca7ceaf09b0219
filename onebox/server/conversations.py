"""Conversations of the Responses API: which goes on, what is kept of it, what runs in the background."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from onebox.server.answer import Answers
from onebox.server.budget import ByteBudget, HeldBytes
from onebox.server.endpoints.response_reply import ResponseReply
from onebox.server.errors import FieldError
from onebox.server.keys import current_caller
from onebox.server.pool import WorkPool
from onebox.server.record import current_record, note
from onebox.server.reply import AnswerResponse, ReplyForm
from onebox.server.response_store import OpenEntry, ResponseStore, StoreLimits
from onebox.server.schemas.common import Json
from onebox.server.schemas.responses import ResponsesRequest
from onebox.spec.errors import OneboxError

__all__ = ["Conversations", "KeptReply"]

_pool = WorkPool("stored responses", num_threads=2, max_waiting=256)
_MAX_HELD_BYTES = 512 << 20
"""Of texts in memory that requests brought there by an id alone; beyond it they are refused with 429."""
_NOT_STORED = "the response was too large to be stored"


class _Running(NamedTuple):
    owner: str
    reply: ResponseReply
    task: "asyncio.Task[None]"


class Conversations:
    """Of one server. Its methods are called where an HTTP request is handled: whose it is decides what there is."""

    def __init__(self, limits: StoreLimits, directory: Path | None = None) -> None:
        self._store = ResponseStore(limits, directory)
        self._running: dict[str, _Running] = {}
        """Answers in the background, by id: no more than the engine has places."""
        self._budget = ByteBudget(_MAX_HELD_BYTES, "Stored conversations")
        """For what a short request brings into memory, and for what outlives its request."""

    def hold(self) -> HeldBytes:
        """For the texts that a request brings into memory."""
        return self._budget.hold()

    async def earlier(self, body: ResponsesRequest, held: HeldBytes) -> list[dict[str, Any]]:
        """The items of the conversation that the request goes on with, counted in `held`."""
        if body.previous_response_id is None:
            return []
        if body.previous_response_id in self._running:
            raise FieldError("The previous response is not done yet; wait for it.", "previous_response_id")
        kept, num_bytes = await _pool.run(self._store.read, body.previous_response_id, _owner())
        held.add(num_bytes)
        return kept.items

    async def keeper(self, body: ResponsesRequest, earlier: list[dict[str, Any]]) -> Callable[[Json], None] | None:
        """Stores the final response, where that is asked for and can be done."""
        if (body.store or body.background) and not self._store.is_on:
            raise FieldError("This server stores no responses (--responses-bytes 0); leave store out.", "store")
        if body.store is False or not self._store.is_on:
            return None
        begun = await _pool.run(lambda: OpenEntry([*earlier, *body.own_items], self._store.limits))
        if begun.is_too_large:
            if body.background:
                raise FieldError("The conversation is too large to be stored, which background needs.", "background")
            note(_NOT_STORED)
            return None
        return partial(self._keep, begun, _owner())

    def _keep(self, begun: OpenEntry, owner: str, final: Json) -> None:
        output = list(final["output"].items)
        usable = [item for item in output if item["status"] == "completed" or item["type"] == "message"]
        if not self._store.put_open(final["id"], owner, begun, usable, {**final, "output": output}):
            note(_NOT_STORED)

    async def find(self, response_id: str, held: HeldBytes) -> Json:
        """Counted in `held`."""
        running = self._running.get(response_id)
        if running and running.owner == _owner():
            return running.reply.unfinished("in_progress")
        kept, num_bytes = await _pool.run(self._store.read, response_id, _owner())
        held.add(num_bytes)
        return kept.response

    async def delete(self, response_id: str) -> None:
        if response_id in self._running:
            await self._end(response_id)
        await _pool.run(self._store.delete, response_id, _owner())

    # In the background.

    async def start(
        self, submitted: AbstractAsyncContextManager[Answers], form: Callable[[Answers], ResponseReply], num_bytes: int
    ) -> Json:
        """Begins to compute an answer without a connection; raises where it is refused.

        `num_bytes` are held for it until it is done: no request counts them any more.
        """
        accepted: asyncio.Future[ResponseReply] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._compute(submitted, form, accepted, num_bytes))
        # Kept until it is accepted: a client that leaves before that ends it.
        try:
            reply = await accepted
        except BaseException:
            task.cancel()
            raise
        self._running[reply.response_id] = _Running(_owner(), reply, task)
        task.add_done_callback(lambda _: self._running.pop(reply.response_id, None))
        return reply.unfinished("queued")

    async def cancel(self, response_id: str, held: HeldBytes) -> Json:
        await self._end(response_id)
        return await self.find(response_id, held)

    async def _end(self, response_id: str) -> None:
        running = self._running.get(response_id)
        if running is None or running.owner != _owner():
            with self.hold() as held:
                await self.find(response_id, held)  # refuses where there is none
            raise FieldError(
                "Only a response in the background that is not done can be cancelled; to end another one, close its "
                "connection.",
                "response_id",
            )
        if not running.task.cancelling():
            # Once: a second time would end the storing of what was cancelled.
            running.task.cancel()
        await asyncio.wait([running.task])

    async def _compute(
        self,
        submitted: AbstractAsyncContextManager[Answers],
        form: Callable[[Answers], ResponseReply],
        accepted: "asyncio.Future[ResponseReply]",
        num_bytes: int,
    ) -> None:
        reply: ResponseReply | None = None
        try:
            with self.hold() as held:
                held.add(num_bytes)
                async with submitted as answers:
                    reply = form(answers)
                    # The line in the log is that of the request which began this: it has ended when it is accepted.
                    current_record.set(None)
                    accepted.set_result(reply)
                    chunks = await answers.whole()
                await _pool.run(reply.whole, chunks)
        except asyncio.CancelledError:
            await _keep_unfinished(reply, "cancelled", None)
            raise
        except OneboxError as error:
            if accepted.done():
                await _keep_unfinished(reply, "failed", error)
            else:
                accepted.set_exception(error)
        except Exception as error:
            if not accepted.done():
                accepted.set_exception(error)
            raise


async def _keep_unfinished(reply: ResponseReply | None, status: str, error: OneboxError | None) -> None:
    if reply and reply.keep:
        await _pool.run(reply.keep, reply.unfinished(status, error))


class KeptReply(AnswerResponse):
    """Stores a streamed answer before its last event: whoever reads that may go on with it."""

    def _stream(self, form: ReplyForm) -> AsyncGenerator[str]:
        events = super()._stream(form)
        return _kept_events(form, events) if isinstance(form, ResponseReply) else events


async def _kept_events(form: ResponseReply, events: AsyncGenerator[str]) -> AsyncGenerator[str]:
    async with aclosing(events):
        async for event in events:
            if form.final is not None and form.keep is not None:
                keep, form.keep = form.keep, None
                await _pool.run(keep, form.final)
            yield event


def _owner() -> str:
    caller = current_caller.get()
    return caller.fingerprint if caller else ""
