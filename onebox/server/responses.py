"""POST /v1/responses: an answer as a list of items, streamed as typed events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from onebox.engine.api import SamplingParams
from onebox.server.answer import Answer, Usage
from onebox.server.complete import Answers, Service
from onebox.server.errors import FieldError, error_body
from onebox.server.generate import ChatCall, start_chat, with_pictures
from onebox.server.heartbeat import with_silences
from onebox.server.reply import STREAMABLE, EventStream, Json, event, whole_or_gone
from onebox.server.responses_schema import ResponsesRequest, sealed
from onebox.server.sections import Closed, Grown, Opened, Section, SectionEvent, Sections
from onebox.server.settings import ServerSettings
from onebox.spec.errors import OneboxError

__all__ = ["responses_router"]

_SILENCE = ": the answer is being prepared\n\n"
"""A comment, which clients skip."""


def responses_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", responses=STREAMABLE)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        service.refuse_other_model(body.model)
        call = await _call(service, body)
        # Rendering and encoding a long conversation takes a while, and the loop has other clients.
        answers = await asyncio.to_thread(start_chat, service, call, "resp")
        reply = ResponseReply(answers, body, service.model_name)
        if body.stream:
            return EventStream(reply.events(), answers.close, settings.send_timeout_s)
        return await whole_or_gone(request, answers, reply.whole())

    return router


async def _call(service: Service, body: ResponsesRequest) -> ChatCall:
    """A refusal of what a message holds names the input, which is where the message came from."""
    try:
        return await with_pictures(service, lambda: body.call(service))
    except FieldError as error:
        is_message = error.param.startswith("messages.")
        raise FieldError(str(error), "input" if is_message else error.param) from None


class ResponseReply:
    """One answer as a response object, or as the events that build one."""

    def __init__(self, answers: Answers, body: ResponsesRequest, model: str) -> None:
        self._answers = answers
        self._body = body
        self._sections = Sections()
        self._items = _Items(body.has_sealed_reasoning)
        self._num_events = 0
        sampling = self._answer.prompt.sampling
        self._head = {
            # As OpenAI writes it; some clients look at the prefix.
            "id": answers.request_id.replace("-", "_", 1),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **_sendable(_echo(body, sampling)),
        }

    @property
    def _answer(self) -> Answer:
        return self._answers.answers[0]

    async def whole(self) -> Json:
        piece = await self._answer.whole()
        for _ in self._sections.push(piece.deltas):
            pass
        return self._final()

    async def events(self) -> AsyncIterator[str]:
        """An error after the start is an event too: the status line is gone."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, {"response": self._response("in_progress", [], None)})
        try:
            async for piece in with_silences(self._answer.pieces()):
                if piece is None:
                    yield _SILENCE
                    continue
                for told in self._sections.push(piece.deltas):
                    for name, fields in self._items.events(told, "completed"):
                        yield self._event(name, fields)
            for told in self._sections.close():
                for name, fields in self._items.events(told, self._last_status()):
                    yield self._event(name, fields)
            final = self._final()
        except OneboxError as error:
            final = self._failed(error)
        yield self._event(f"response.{final['status']}", {"response": final})

    def _event(self, name: str, fields: Json) -> str:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(body, name)

    def _last_status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _final(self) -> Json:
        status = self._last_status()
        output = self._output(status)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, output, _usage(self._answers.usage), incomplete_details=details)

    def _failed(self, error: OneboxError) -> Json:
        told = {"code": "server_error", "message": error_body(error)["error"]["message"]}
        return self._response("failed", self._output("incomplete"), None, error=told)

    def _output(self, last_status: str) -> list[Json]:
        sections = self._sections.all
        statuses = ["completed"] * (len(sections) - 1) + [last_status]
        return [self._items.whole(section, status) for section, status in zip(sections, statuses, strict=False)]

    def _response(
        self,
        status: str,
        output: list[Json],
        usage: Json | None,
        *,
        error: Json | None = None,
        incomplete_details: Json | None = None,
    ) -> Json:
        state = {"status": status, "error": error, "incomplete_details": incomplete_details}
        return {**self._head, **state, "output": output, "usage": usage}


def _echo(body: ResponsesRequest, sampling: SamplingParams) -> Json:
    """What the request asked for, as it was understood."""
    given = body.model_dump(exclude_none=True, by_alias=True)
    text = {"format": {"type": "text"}, **given.get("text", {})}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": text,
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _sendable(told: Json) -> Json:
    """JSON can spell half surrogates, which cannot be sent back as they are."""
    sendable: Json = json.loads(json.dumps(told, ensure_ascii=False).encode(errors="replace"))
    return sendable


class _Items:
    """Sections as output items, and as the events that build them."""

    def __init__(self, has_sealed_reasoning: bool) -> None:
        self._has_sealed_reasoning = has_sealed_reasoning

    def whole(self, section: Section, status: str) -> Json:
        match section.kind:
            case "reasoning":
                held: Json = {"summary": [], "content": [_part(section)]}
                if self._has_sealed_reasoning:
                    held["encrypted_content"] = sealed(section.text)
                return {**_head(section, status), **held}
            case "content":
                return {**_head(section, status), "role": "assistant", "content": [_part(section)]}
            case "call":
                return {**_head(section, status), **_call_head(section), "arguments": section.text}

    def events(self, told: SectionEvent, status: str) -> Iterator[tuple[str, Json]]:
        """Names and fields of events. `status` is the one of an item that ends."""
        place: Json = {"item_id": _item_id(told.section), "output_index": told.section.index}
        if told.section.kind != "call":
            place["content_index"] = 0
        match told:
            case Opened(section):
                yield from self._opening(section, place)
            case Grown(section, text):
                yield f"response.{_FLOWS[section.kind]}.delta", {**place, "delta": text, **_logprobs(section)}
            case Closed(section):
                yield from self._ending(section, place, status)

    def _opening(self, section: Section, place: Json) -> Iterator[tuple[str, Json]]:
        item = _head(section, "in_progress")
        match section.kind:
            case "reasoning":
                item |= {"summary": [], "content": []}
            case "content":
                item |= {"role": "assistant", "content": []}
            case "call":
                item |= {**_call_head(section), "arguments": ""}
        yield "response.output_item.added", {"output_index": section.index, "item": item}
        if section.kind != "call":
            # The section's own text may be ahead of what was sent.
            yield "response.content_part.added", {**place, "part": {**_part(section), "text": ""}}

    def _ending(self, section: Section, place: Json, status: str) -> Iterator[tuple[str, Json]]:
        if section.kind == "call":
            done: Json = {"name": section.name, "arguments": section.text}
            yield "response.function_call_arguments.done", {**place, **done}
        else:
            yield f"response.{_FLOWS[section.kind]}.done", {**place, "text": section.text, **_logprobs(section)}
            yield "response.content_part.done", {**place, "part": _part(section)}
        yield "response.output_item.done", {"output_index": section.index, "item": self.whole(section, status)}


_FLOWS = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
"""Of a section's kind, the name in its events."""
_TYPES = {"reasoning": ("rs", "reasoning"), "content": ("msg", "message"), "call": ("fc", "function_call")}
"""Of a section's kind, the prefix of its item's id and the item's type."""


def _item_id(section: Section) -> str:
    return f"{_TYPES[section.kind][0]}_{section.key}"


def _head(section: Section, status: str) -> Json:
    return {"id": _item_id(section), "type": _TYPES[section.kind][1], "status": status}


def _call_head(section: Section) -> Json:
    return {"call_id": f"call_{section.key}", "name": section.name}


def _part(section: Section) -> Json:
    if section.kind == "reasoning":
        return {"type": "reasoning_text", "text": section.text}
    return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": []}


def _logprobs(section: Section) -> Json:
    """Where the API has the field, always empty: nobody can ask for them here."""
    return {"logprobs": []} if section.kind == "content" else {}


def _usage(usage: Usage) -> Json:
    """In this API's names; drafts of speculative decoding are predictions, as in chat completions."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
