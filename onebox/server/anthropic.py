"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, an answer as a list of blocks."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from onebox.engine.api import PAGE_TOKENS, ContextTooLongError, SamplingParams
from onebox.server.answer import Answer, Prompt, Usage
from onebox.server.anthropic_errors import AnthropicErrorReply, anthropic_error
from onebox.server.anthropic_schema import Conversation, MessagesRequest
from onebox.server.complete import Answers, Service, start
from onebox.server.generate import ChatCall, prompt_of, with_pictures
from onebox.server.heartbeat import with_silences
from onebox.server.reply import STREAMABLE, EventStream, Json, event, whole_or_gone
from onebox.server.sections import Closed, Grown, Opened, Section, SectionEvent, Sections
from onebox.server.settings import ServerSettings
from onebox.spec.errors import OneboxError

__all__ = ["anthropic_router"]

_REFUSAL: dict[str, Any] = {"model": AnthropicErrorReply, "description": "A refusal or a failure."}


def anthropic_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(responses={"4XX": _REFUSAL, "5XX": _REFUSAL})

    @router.post("/v1/messages", responses=STREAMABLE)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        service.refuse_other_model(body.model)
        call = await with_pictures(service, lambda: body.chat_call(service))
        # Rendering and encoding a long conversation takes a while, and the loop has other clients.
        answers = await asyncio.to_thread(lambda: start(service, [_prompt(service, call, body.max_tokens)], "msg"))
        reply = MessageReply(answers, body, service.model_name)
        if body.stream:
            return EventStream(reply.events(), answers.close, settings.send_timeout_s)
        return await whole_or_gone(request, answers, reply.whole())

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: Conversation) -> Json:
        service.refuse_other_model(body.model)
        call = await with_pictures(service, lambda: body.call(service, SamplingParams()))
        prompt = await asyncio.to_thread(prompt_of, service, call)
        counted: Json = {"input_tokens": len(prompt.token_ids)}
        if body.context_management is not None:
            counted["context_management"] = {"original_input_tokens": len(prompt.token_ids)}
        return counted

    return router


def _prompt(service: Service, call: ChatCall, max_tokens: int) -> Prompt:
    """Bounded by the context: agents ask for as many tokens as their own model could make.

    This API has a reason for an end there, model_context_window_exceeded.
    """
    prompt = prompt_of(service, call)
    config, num_tokens = service.engine.config, len(prompt.token_ids)
    room = min(config.max_model_len, config.num_pages * PAGE_TOKENS) - num_tokens
    if room < 1:
        # In the words on which agents shorten their conversation and try again.
        raise ContextTooLongError(f"prompt is too long: {num_tokens} tokens > {num_tokens + room - 1} maximum.")
    return replace(prompt, sampling=replace(prompt.sampling, max_tokens=min(max_tokens, room)))


class MessageReply:
    """One answer as a message, or as the events that build one."""

    def __init__(self, answers: Answers, body: MessagesRequest, model: str) -> None:
        self._answers = answers
        self._body = body
        self._sections = Sections()
        self._blocks = _Blocks(body.hides_thinking)
        # As Anthropic writes it; some clients look at the prefix.
        message_id = answers.request_id.replace("-", "_", 1)
        self._head: Json = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._tail: Json = {}
        if body.context_management is not None:
            self._tail = {"context_management": {"applied_edits": []}}

    @property
    def _answer(self) -> Answer:
        return self._answers.answers[0]

    async def whole(self) -> Json:
        piece = await self._answer.whole()
        for _ in self._sections.push(piece.deltas):
            pass
        content = [self._blocks.whole(section) for section in self._sections.all]
        return {**self._head, "content": content, **self._end(), "usage": _usage(self._answers.usage), **self._tail}

    async def events(self) -> AsyncIterator[str]:
        """An error after the start is an event too: the status line is gone."""
        # What was cached is known at the end; the usage of message_delta then replaces this one.
        opening: Json = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._answers.usage),
        }
        yield _event({"type": "message_start", "message": {**self._head, **opening}})
        yield _event({"type": "ping"})
        try:
            async for piece in with_silences(self._answer.pieces()):
                if piece is None:
                    yield _event({"type": "ping"})
                    continue
                for told in self._sections.push(piece.deltas):
                    for body in self._blocks.events(told):
                        yield _event(body)
            for told in self._sections.close():
                for body in self._blocks.events(told):
                    yield _event(body)
            usage = _usage(self._answers.usage)
            yield _event({"type": "message_delta", "delta": self._end(), "usage": usage, **self._tail})
            yield _event({"type": "message_stop"})
        except OneboxError as error:
            yield _event(anthropic_error(500, str(error)))

    def _end(self) -> Json:
        return {"stop_reason": self._stop_reason(), "stop_sequence": self._answer.stop_string}

    def _stop_reason(self) -> str:
        answer = self._answer
        if answer.stop_string is not None:
            return "stop_sequence"
        match answer.finish_reason:
            case "length":
                is_context = answer.prompt.sampling.max_tokens != self._body.max_tokens
                return "model_context_window_exceeded" if is_context else "max_tokens"
            case "tool_calls":
                return "tool_use"
            case _:
                return "end_turn"


class _Blocks:
    """Sections as content blocks, and as the events that build them."""

    def __init__(self, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking

    def whole(self, section: Section) -> Json:
        match section.kind:
            case "reasoning":
                shown = "" if self._hides_thinking else section.text
                return {"type": "thinking", "thinking": shown, "signature": _signature(section)}
            case "content":
                return {"type": "text", "text": section.text}
            case "call":
                return {**_call_head(section), "input": json.loads(section.text)}

    def events(self, told: SectionEvent) -> Iterator[Json]:
        index = told.section.index
        match told:
            case Opened(section):
                yield {"type": "content_block_start", "index": index, "content_block": _empty(section)}
            case Grown(section, text):
                if not (section.kind == "reasoning" and self._hides_thinking):
                    yield {"type": "content_block_delta", "index": index, "delta": _delta(section, text)}
            case Closed(section):
                if section.kind == "reasoning":
                    delta = {"type": "signature_delta", "signature": _signature(section)}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
                yield {"type": "content_block_stop", "index": index}


def _empty(section: Section) -> Json:
    match section.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "content":
            return {"type": "text", "text": ""}
        case "call":
            return {**_call_head(section), "input": {}}


def _delta(section: Section, text: str) -> Json:
    match section.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "content":
            return {"type": "text_delta", "text": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _call_head(section: Section) -> Json:
    return {"type": "tool_use", "id": f"toolu_{section.key}", "name": section.name}


def _signature(section: Section) -> str:
    """Clients drop thinking that has none. It proves nothing, and nobody asks it to."""
    return hashlib.sha256(section.text.encode()).hexdigest()


def _usage(usage: Usage) -> Json:
    """In Anthropic's names: what was read from the cache is no part of input_tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "thinking_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
    }


def _event(body: Json) -> str:
    return event(body, body["type"])
