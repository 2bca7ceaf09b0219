"""POST /v1/responses, and the answers that were stored: retrieved, deleted, cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import Response

from onebox.engine.api import EngineConfig
from onebox.server.answer import Answers
from onebox.server.body import JsonRoute
from onebox.server.budget import HeldBytes
from onebox.server.conversations import Conversations, KeptReply
from onebox.server.endpoints.response_reply import Echo, ResponseReply
from onebox.server.errors import FieldError
from onebox.server.pieces import JsonResponse
from onebox.server.prompt import Prompt
from onebox.server.record import note
from onebox.server.reply import STREAMABLE
from onebox.server.schemas.common import Json
from onebox.server.schemas.responses import ResponsesRequest, read_items
from onebox.server.service import Service
from onebox.server.settings import ServerSettings
from onebox.server.truncation import context_room, fit_to_context

__all__ = ["responses_router"]

_Id = Annotated[str, Path(max_length=128)]


def responses_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    conversations = Conversations(settings.responses, settings.responses_dir)

    @router.post("/v1/responses", responses=STREAMABLE)
    async def responses(body: ResponsesRequest) -> Response:
        """OpenAI's Responses, as agents use them: tools, stored conversations, answers in the background"""
        service.refuse_other_model(body.model)
        with conversations.hold() as held:
            earlier = await conversations.earlier(body, held)
            prompt, num_dropped = await _prompt(service, body, earlier)
            keep = await conversations.keeper(body, earlier)
            del earlier
        echo = await asyncio.to_thread(Echo.of_request, body, prompt.sampling)
        for kind in body.left_out:
            note(f"tools of the type {kind!r} were left out: nothing here can run them")

        def form(answers: Answers) -> ResponseReply:
            return ResponseReply(answers, echo, service.model_name, keep, num_dropped)

        is_stream = bool(body.stream)
        submitted = service.submit([prompt], "resp", is_stream=is_stream)
        if body.background:
            started = await conversations.start(submitted, form, num_bytes=2 * len(echo.text))
            return JsonResponse(lambda: started)
        return KeptReply(submitted, form, settings, is_stream=is_stream)

    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: _Id, stream: bool = False) -> Response:
        """An answer that was stored, or that is computed in the background"""
        if stream:
            raise FieldError("A stored answer is returned whole, not as a stream; leave stream out.", "stream")
        return await _held(conversations, lambda held: conversations.find(response_id, held))

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: _Id) -> Json:
        """Forgets a stored answer"""
        await conversations.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: _Id) -> Response:
        """Ends an answer that is computed in the background"""
        return await _held(conversations, lambda held: conversations.cancel(response_id, held))

    return router


async def _held(conversations: Conversations, find: Callable[[HeldBytes], Awaitable[Json]]) -> Response:
    """A stored response, which counts until it is sent."""
    with ExitStack() as stack:
        found = await find(stack.enter_context(conversations.hold()))
        return JsonResponse(lambda: found, stack.pop_all())


async def _prompt(service: Service, body: ResponsesRequest, earlier: list[dict[str, Any]]) -> tuple[Prompt, int]:
    """The prompt, and how many items were left out. A refused message is reported at `input`, where it came from."""
    chat, items = await asyncio.to_thread(lambda: body.chat_input(service.defaults, read_items(earlier)))

    prompts, config, num_dropped = service.prompts, service.engine.config, 0

    async def build(left: Sequence[Any]) -> Prompt:
        messages = await asyncio.to_thread(body.messages_of, left)
        return await prompts.count_chat(replace(chat, messages=messages), files)

    try:
        with prompts.media.files() as files:
            if body.truncation == "auto":
                prompt, num_dropped = await fit_to_context(items, build, config)
            else:
                prompt = await prompts.count_chat(chat, files)
            prompt = await prompts.decode_pictures(prompt)
    except FieldError as error:
        is_message = error.param.startswith("messages.")
        raise FieldError(str(error), "input" if is_message else error.param) from None
    if num_dropped:
        note(f"{num_dropped} items of the input were left out to fit the context")
    return _bounded(prompt, config), num_dropped


def _bounded(prompt: Prompt, config: EngineConfig) -> Prompt:
    """With a token limit that fits the context: agents ask for as many tokens as their own model could generate.

    The answer tells the limit as it is. A prompt that leaves no room is the engine's to refuse.
    """
    asked = prompt.sampling.max_tokens
    room = context_room(config) - len(prompt.token_ids)
    if asked is None or room < 1 or asked <= room:
        return prompt
    note(f"max_output_tokens {asked} was lowered to {room}, which the context leaves")
    return replace(prompt, sampling=replace(prompt.sampling, max_tokens=room))
