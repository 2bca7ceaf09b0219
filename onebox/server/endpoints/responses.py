"""POST /v1/responses: an answer as a list of items, streamed as typed events."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.engine.api import SamplingParams
from onebox.server.answer import Answer, AnswerChunk, Answers
from onebox.server.body import JsonRoute
from onebox.server.errors import FieldError, error_body, error_status
from onebox.server.pieces import JsonParts
from onebox.server.prompt import Prompt
from onebox.server.reply import STREAMABLE, AnswerResponse
from onebox.server.schemas.common import Json
from onebox.server.schemas.responses import ResponsesRequest, sealed
from onebox.server.sections import AnswerSection, AnswerSections, SectionEvent
from onebox.server.service import Service
from onebox.server.settings import ServerSettings
from onebox.server.sse import COMMENT, sse_event
from onebox.server.usage import Usage
from onebox.spec.errors import OneboxError

__all__ = ["responses_router"]


def responses_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses", responses=STREAMABLE)
    async def responses(body: ResponsesRequest) -> Response:
        """OpenAI's Responses, as agents use them; nothing is stored between requests"""
        service.refuse_other_model(body.model)
        prompt = await _prompt(service, body)

        def form(answers: Answers) -> ResponseReply:
            return ResponseReply(answers, body, service.model_name)

        return AnswerResponse(
            service.submit([prompt], "resp", is_stream=bool(body.stream)), form, settings, is_stream=bool(body.stream)
        )

    return router


async def _prompt(service: Service, body: ResponsesRequest) -> Prompt:
    """A refused message is reported at the field `input`, where it came from."""
    chat = await asyncio.to_thread(body.chat_input, service.defaults)
    try:
        return await service.prompts.of_chat(chat)
    except FieldError as error:
        is_message = error.param.startswith("messages.")
        raise FieldError(str(error), "input" if is_message else error.param) from None


class ResponseReply:
    """One answer as a response object, or as the events that build one."""

    heartbeat = COMMENT

    def __init__(self, answers: Answers, body: ResponsesRequest, model: str) -> None:
        self.answers = answers
        self._sections = AnswerSections()
        self._items = _Items(body.has_sealed_reasoning)
        self._num_events = 0
        self._head = {
            # As OpenAI writes it; some clients look at the prefix.
            "id": answers.request_id.replace("-", "_", 1),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **_sendable(_echo(body, self._answer.prompt.sampling)),
        }

    @property
    def _answer(self) -> Answer:
        return self.answers.answers[0]

    def whole(self, chunks: Sequence[AnswerChunk]) -> Json:
        self._sections.add(chunks[0].deltas)
        return self._final()

    def begin(self) -> Iterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, {"response": self._response("in_progress", [], None)})

    def chunk(self, _: int, chunk: AnswerChunk) -> Iterator[str]:
        yield from self._section_events(self._sections.push(chunk.deltas), "completed")

    def end_answer(self, _: int) -> Iterator[str]:
        yield from self._section_events(self._sections.close(), self._last_status())

    def end(self) -> Iterator[str]:
        final = self._final()
        yield self._event(f"response.{final['status']}", {"response": final})

    def fail(self, error: OneboxError) -> Iterator[str]:
        code = "rate_limit_exceeded" if error_status(error) == 429 else "server_error"
        details = {"code": code, "message": error_body(error)["error"]["message"]}
        failed = self._response("failed", self._output("incomplete"), None, error=details)
        yield self._event("response.failed", {"response": failed})

    def _section_events(self, events: Iterator[SectionEvent], status: str) -> Iterator[str]:
        for event in events:
            for name, fields in self._items.events(event, status):
                yield self._event(name, fields)

    def _event(self, name: str, fields: Json) -> str:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse_event(body, name)

    def _last_status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _final(self) -> Json:
        status = self._last_status()
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, self._output(status), _usage(self.answers.usage), incomplete_details=details)

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
        return {**self._head, **state, "output": JsonParts(output), "usage": usage}


def _echo(body: ResponsesRequest, sampling: SamplingParams) -> Json:
    """The request's settings, with defaults filled in."""
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


def _sendable(fields: Json) -> Json:
    """JSON can spell lone surrogates, which cannot be encoded as UTF-8."""
    sendable: Json = json.loads(json.dumps(fields, ensure_ascii=False).encode(errors="replace"))
    return sendable


class _Items:
    """Sections as output items, and as the events that build them."""

    def __init__(self, has_sealed_reasoning: bool) -> None:
        self._has_sealed_reasoning = has_sealed_reasoning

    def whole(self, section: AnswerSection, status: str) -> Json:
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

    def events(self, event: SectionEvent, status: str) -> Iterator[tuple[str, Json]]:
        """Names and fields of events. `status` is the one of an item that ends."""
        section = event.section
        place: Json = {"item_id": _item_id(section), "output_index": section.index}
        if section.kind != "call":
            place["content_index"] = 0
        match event.change:
            case "opened":
                yield from self._opening(section, place)
            case "grown":
                yield f"response.{_FLOWS[section.kind]}.delta", {**place, "delta": event.text, **_logprobs(section)}
            case "closed":
                yield from self._ending(section, place, status)

    def _opening(self, section: AnswerSection, place: Json) -> Iterator[tuple[str, Json]]:
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

    def _ending(self, section: AnswerSection, place: Json, status: str) -> Iterator[tuple[str, Json]]:
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


def _item_id(section: AnswerSection) -> str:
    return f"{_TYPES[section.kind][0]}_{section.key}"


def _head(section: AnswerSection, status: str) -> Json:
    return {"id": _item_id(section), "type": _TYPES[section.kind][1], "status": status}


def _call_head(section: AnswerSection) -> Json:
    return {"call_id": f"call_{section.key}", "name": section.name}


def _part(section: AnswerSection) -> Json:
    if section.kind == "reasoning":
        return {"type": "reasoning_text", "text": section.text}
    return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": []}


def _logprobs(section: AnswerSection) -> Json:
    """The API has the field for content; always empty, since requests cannot ask for them here."""
    return {"logprobs": []} if section.kind == "content" else {}


def _usage(usage: Usage) -> Json:
    """In this API's names; drafts of speculative decoding are predictions, as in chat completions."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": usage.cached_details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **usage.draft_details,
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
