"""An answer of the Responses API: one object, or the typed events that build it."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from onebox.engine.api import SamplingParams
from onebox.server.answer import Answer, AnswerChunk, Answers
from onebox.server.endpoints.response_items import ResponseItems
from onebox.server.errors import error_body, error_status
from onebox.server.pieces import JsonParts, json_text
from onebox.server.schemas.common import Json
from onebox.server.schemas.responses import ResponsesRequest
from onebox.server.schemas.responses_tools import OfferedTool
from onebox.server.sections import AnswerSections, SectionEvent
from onebox.server.sse import COMMENT, sse_event, sse_text
from onebox.server.usage import Usage
from onebox.spec.errors import OneboxError

__all__ = ["Echo", "ResponseReply"]


Keep = Callable[[Json], None]
_USABLE = ("function", "custom", "namespace")


class Echo(NamedTuple):
    """What an answer needs of its request, which is not held any longer. Its size is the client's choice."""

    fields: Json
    """The settings, which the answer repeats."""
    text: str
    """Their JSON without the braces: three events of a stream have it, and others wait for the loop."""
    offered: Sequence[OfferedTool]
    has_sealed_reasoning: bool

    @classmethod
    def of_request(cls, body: ResponsesRequest, sampling: SamplingParams) -> "Echo":
        """To be called beside the event loop."""
        fields = _sendable(_echo(body, sampling))
        return cls(fields, json_text(fields)[1:-1], body.offered, body.has_sealed_reasoning)


class ResponseReply:
    """One answer as a response object, or as the events that build one."""

    heartbeat = COMMENT

    def __init__(
        self,
        answers: Answers,
        echo: Echo,
        model: str,
        keep: Keep | None = None,
        num_dropped: int = 0,
    ) -> None:
        """`keep` is called with the final response, beside the event loop, before it is sent.

        `num_dropped` items were left out of the prompt.
        """
        self.answers = answers
        # As OpenAI writes it; some clients look at the prefix.
        self.response_id = answers.request_id.replace("-", "_", 1)
        self.final: Json | None = None
        """Once it is known."""
        self.keep = keep
        self._sections = AnswerSections()
        self._items = ResponseItems(echo.has_sealed_reasoning, echo.offered)
        self._num_events = 0
        self._head = {
            "id": self.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "store": keep is not None,
        }
        self._echo = echo
        if echo.fields["truncation"] == "auto":
            self._head["truncated_items"] = num_dropped

    @property
    def _answer(self) -> Answer:
        return self.answers.answers[0]

    def whole(self, chunks: Sequence[AnswerChunk]) -> Json:
        self._sections.add(chunks[0].deltas)
        final = self._response(self._final_state())
        if self.keep:
            self.keep(final)
        return final

    def unfinished(self, status: str, error: OneboxError | None = None) -> Json:
        """As it is while it is computed, or where it ended without an answer."""
        return self._response(self._unfinished_state(status, error))

    def _unfinished_state(self, status: str, error: OneboxError | None) -> Json:
        return self._state(status, self._output("incomplete"), None, error=_error(error) if error else None)

    def begin(self) -> Iterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield self._response_event(name, self._state("in_progress", [], None))

    def chunk(self, _: int, chunk: AnswerChunk) -> Iterator[str]:
        yield from self._section_events(self._sections.push(chunk.deltas), "completed")

    def end_answer(self, _: int) -> Iterator[str]:
        yield from self._section_events(self._sections.close(), self._last_status())

    def end(self) -> Iterator[str]:
        state = self._final_state()
        self.final = self._response(state)
        yield self._response_event(f"response.{state['status']}", state)

    def fail(self, error: OneboxError) -> Iterator[str]:
        yield self._response_event("response.failed", self._unfinished_state("failed", error))

    def _section_events(self, events: Iterator[SectionEvent], status: str) -> Iterator[str]:
        for event in events:
            for name, fields in self._items.events(event, status):
                yield self._event(name, fields)

    def _event(self, name: str, fields: Json) -> str:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse_event(body, name)

    def _response_event(self, name: str, state: Json) -> str:
        """An event with the whole response, of which the echo is written already."""
        body = {"type": name, "sequence_number": self._num_events, "response": {**self._head, **state}}
        self._num_events += 1
        return sse_text(f"{json_text(body)[:-2]}, {self._echo.text}}}}}", name)

    def _last_status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _final_state(self) -> Json:
        status = self._last_status()
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._state(status, self._output(status), _usage(self.answers.usage), incomplete_details=details)

    def _output(self, last_status: str) -> list[Json]:
        sections = self._sections.all
        statuses = ["completed"] * (len(sections) - 1) + [last_status]
        return [self._items.whole(section, status) for section, status in zip(sections, statuses, strict=False)]

    def _response(self, state: Json) -> Json:
        return {**self._head, **self._echo.fields, **state}

    def _state(
        self,
        status: str,
        output: list[Json],
        usage: Json | None,
        *,
        error: Json | None = None,
        incomplete_details: Json | None = None,
    ) -> Json:
        """What changes of a response."""
        state = {"status": status, "error": error, "incomplete_details": incomplete_details}
        return {**state, "output": JsonParts(output), "usage": usage}


def _echo(body: ResponsesRequest, sampling: SamplingParams) -> Json:
    """The request's settings, with defaults filled in."""
    given = body.model_dump(include={"text", "tool_choice", "tools"}, exclude_none=True, by_alias=True)
    text = {"format": {"type": "text"}, **given.get("text", {})}
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        # Lowered to what the context leaves.
        "max_output_tokens": body.max_output_tokens and sampling.max_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "temperature": sampling.temperature,
        "text": text,
        "tool_choice": given.get("tool_choice", "auto"),
        # Those that the model was told of.
        "tools": [tool for tool in given.get("tools", []) if tool["type"] in _USABLE],
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _error(error: OneboxError) -> Json:
    code = "rate_limit_exceeded" if error_status(error) == 429 else "server_error"
    return {"code": code, "message": error_body(error)["error"]["message"]}


def _sendable(fields: Json) -> Json:
    """JSON can spell lone surrogates, which cannot be encoded as UTF-8."""
    sendable: Json = json.loads(json.dumps(fields, ensure_ascii=False).encode(errors="replace"))
    return sendable


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
