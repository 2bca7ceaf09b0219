"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, an answer as a list of blocks."""

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.engine.api import ContextTooLongError, EngineConfig
from onebox.server.answer import Answer, AnswerChunk, Answers
from onebox.server.anthropic_errors import AnthropicErrorReply, anthropic_error
from onebox.server.body import JsonRoute
from onebox.server.endpoints.cache import lookup_reply
from onebox.server.errors import error_body, error_status
from onebox.server.pieces import JsonParts
from onebox.server.prompt import ChatInput, Prompt
from onebox.server.record import note
from onebox.server.reply import STREAMABLE, AnswerResponse
from onebox.server.schemas.anthropic import CountTokensRequest, MessagesLookupRequest, MessagesRequest
from onebox.server.schemas.cache import CacheLookupReply
from onebox.server.schemas.common import Json
from onebox.server.sections import AnswerSection, AnswerSections, SectionEvent
from onebox.server.service import Service
from onebox.server.settings import ServerSettings
from onebox.server.sse import sse_event
from onebox.server.truncation import context_room
from onebox.server.usage import Usage
from onebox.spec.errors import OneboxError

__all__ = ["messages_router"]

_REFUSAL: dict[str, Any] = {"model": AnthropicErrorReply, "description": "A refusal or a failure."}


def messages_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses={"4XX": _REFUSAL, "5XX": _REFUSAL})

    @router.post("/v1/messages", responses=STREAMABLE)
    async def messages(body: MessagesRequest) -> Response:
        """Anthropic's Messages, as agents use them: streaming, tools, thinking, images"""
        prompt = _bounded(await _prompt(service, body), body.max_tokens, service.engine.config)

        def form(answers: Answers) -> MessageReply:
            return MessageReply(answers, body, service.model_name)

        is_stream = bool(body.stream)
        return AnswerResponse(service.submit([prompt], "msg", is_stream=is_stream), form, settings, is_stream=is_stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Json:
        """Tokens that a request to `/v1/messages` would read"""
        chat = await _chat(service, body)
        with service.prompts.media.files() as files:
            num_tokens = len((await service.prompts.count_chat(chat, files)).token_ids)
        counted: Json = {"input_tokens": num_tokens}
        if body.context_management is not None:
            counted["context_management"] = {"original_input_tokens": num_tokens}
        return counted

    @router.post("/v1/messages/cache_lookup")
    async def cache_lookup(body: MessagesLookupRequest) -> CacheLookupReply:
        """The same as `/v1/cache/lookup` for a request to `/v1/messages`"""
        return await lookup_reply(service, await _prompt(service, body))

    return router


async def _chat(service: Service, body: CountTokensRequest) -> ChatInput:
    service.refuse_other_model(body.model)
    return await asyncio.to_thread(body.chat_input, service.defaults)


async def _prompt(service: Service, body: CountTokensRequest) -> Prompt:
    return await service.prompts.of_chat(await _chat(service, body))


def _bounded(prompt: Prompt, max_tokens: int, config: EngineConfig) -> Prompt:
    """With a token limit that fits the context: agents ask for as many tokens as their own model could generate.

    This API has a stop reason for an end there, model_context_window_exceeded.
    """
    num_tokens = len(prompt.token_ids)
    room = context_room(config) - num_tokens
    if room < 1:
        # In the words on which agents shorten their conversation and try again.
        raise ContextTooLongError(f"prompt is too long: {num_tokens} tokens > {num_tokens + room - 1} maximum.")
    if max_tokens > room:
        note(f"max_tokens {max_tokens} was lowered to {room}, which the context leaves")
    return replace(prompt, sampling=replace(prompt.sampling, max_tokens=min(max_tokens, room)))


class MessageReply:
    """One answer as a message, or as the events that build one."""

    def __init__(self, answers: Answers, body: MessagesRequest, model: str) -> None:
        self.answers = answers
        self.heartbeat = _event({"type": "ping"})
        self._max_tokens = body.max_tokens
        self._sections = AnswerSections()
        self._blocks = _Blocks(body.hides_thinking)
        # As Anthropic writes it; some clients look at the prefix.
        message_id = answers.request_id.replace("-", "_", 1)
        self._head: Json = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        has_management = body.context_management is not None
        self._tail: Json = {"context_management": {"applied_edits": []}} if has_management else {}

    @property
    def _answer(self) -> Answer:
        return self.answers.answers[0]

    def whole(self, chunks: Sequence[AnswerChunk]) -> Json:
        self._sections.add(chunks[0].deltas)
        # The API has no form for a call without its end, so it is left out; the stop reason says why it is missing.
        sections = self._sections.all[:-1] if self._answer.ends_in_call else self._sections.all
        content = JsonParts(self._blocks.whole(section) for section in sections)
        return {**self._head, "content": content, **self._end(), "usage": _usage(self.answers.usage), **self._tail}

    def begin(self) -> Iterator[str]:
        # What was cached is known at the end; the usage of message_delta then replaces this one.
        start: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self.answers.usage)}
        yield _event({"type": "message_start", "message": {**self._head, **start}})
        yield self.heartbeat

    def chunk(self, _: int, chunk: AnswerChunk) -> Iterator[str]:
        yield from self._section_events(self._sections.push(chunk.deltas))

    def end_answer(self, _: int) -> Iterator[str]:
        yield from self._section_events(self._sections.close())

    def end(self) -> Iterator[str]:
        usage = _usage(self.answers.usage)
        yield _event({"type": "message_delta", "delta": self._end(), "usage": usage, **self._tail})
        yield _event({"type": "message_stop"})

    def fail(self, error: OneboxError) -> Iterator[str]:
        yield _event(anthropic_error(error_status(error), error_body(error)["error"]["message"]))

    def _section_events(self, events: Iterator[SectionEvent]) -> Iterator[str]:
        for event in events:
            yield from map(_event, self._blocks.events(event))

    def _end(self) -> Json:
        return {"stop_reason": self._stop_reason(), "stop_sequence": self._answer.stop_string}

    def _stop_reason(self) -> str:
        answer = self._answer
        if answer.stop_string is not None:
            return "stop_sequence"
        match answer.finish_reason:
            case "length":
                is_context = answer.prompt.sampling.max_tokens != self._max_tokens
                return "model_context_window_exceeded" if is_context else "max_tokens"
            case "tool_calls":
                return "tool_use"
            case _:
                return "end_turn"


class _Blocks:
    """Sections as content blocks, and as the events that build them."""

    def __init__(self, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking

    def whole(self, section: AnswerSection) -> Json:
        match section.kind:
            case "reasoning":
                shown = "" if self._hides_thinking else section.text
                return {"type": "thinking", "thinking": shown, "signature": _signature(section)}
            case "content":
                return {"type": "text", "text": section.text}
            case "call":
                return {**_call_head(section), "input": json.loads(section.text)}

    def events(self, event: SectionEvent) -> Iterator[Json]:
        section, index = event.section, event.section.index
        match event.change:
            case "opened":
                yield {"type": "content_block_start", "index": index, "content_block": _empty(section)}
            case "grown":
                if not (section.kind == "reasoning" and self._hides_thinking):
                    yield {"type": "content_block_delta", "index": index, "delta": _delta(section, event.text)}
            case "closed":
                if section.kind == "reasoning":
                    delta = {"type": "signature_delta", "signature": _signature(section)}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
                yield {"type": "content_block_stop", "index": index}


def _empty(section: AnswerSection) -> Json:
    match section.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "content":
            return {"type": "text", "text": ""}
        case "call":
            return {**_call_head(section), "input": {}}


def _delta(section: AnswerSection, text: str) -> Json:
    match section.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "content":
            return {"type": "text_delta", "text": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _call_head(section: AnswerSection) -> Json:
    return {"type": "tool_use", "id": f"toolu_{section.key}", "name": section.name}


def _signature(section: AnswerSection) -> str:
    """Clients drop thinking without a signature. It is a checksum and proves nothing."""
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
            **usage.draft_details,
        },
    }


def _event(body: Json) -> str:
    return sse_event(body, body["type"])
