"""An answer of the Responses API: one object, or the typed events that build it."""

import json
import time
from collections.abc import Callable, Iterator, Sequence

from onebox.engine.api import SamplingParams
from onebox.server.answer import Answer, AnswerChunk, Answers
from onebox.server.endpoints.response_items import ResponseItems
from onebox.server.errors import error_body, error_status
from onebox.server.pieces import JsonParts
from onebox.server.schemas.common import Json
from onebox.server.schemas.responses import ResponsesRequest
from onebox.server.sections import AnswerSections, SectionEvent
from onebox.server.sse import COMMENT, sse_event
from onebox.server.usage import Usage
from onebox.spec.errors import OneboxError

__all__ = ["ResponseReply"]


Keep = Callable[[Json], None]
_USABLE = ("function", "custom", "namespace")


class ResponseReply:
    """One answer as a response object, or as the events that build one."""

    heartbeat = COMMENT

    def __init__(
        self, answers: Answers, body: ResponsesRequest, model: str, keep: Keep | None = None, num_dropped: int = 0
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
        self._items = ResponseItems(body.has_sealed_reasoning, body.offered)
        self._num_events = 0
        self._head = {
            "id": self.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **_sendable(_echo(body, self._answer.prompt.sampling)),
            "store": keep is not None,
        }
        if body.truncation == "auto":
            self._head["truncated_items"] = num_dropped

    @property
    def _answer(self) -> Answer:
        return self.answers.answers[0]

    def whole(self, chunks: Sequence[AnswerChunk]) -> Json:
        self._sections.add(chunks[0].deltas)
        final = self._final()
        if self.keep:
            self.keep(final)
        return final

    def unfinished(self, status: str, error: OneboxError | None = None) -> Json:
        """As it is while it is computed, or where it ended without an answer."""
        return self._response(status, self._output("incomplete"), None, error=_error(error) if error else None)

    def begin(self) -> Iterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, {"response": self._response("in_progress", [], None)})

    def chunk(self, _: int, chunk: AnswerChunk) -> Iterator[str]:
        yield from self._section_events(self._sections.push(chunk.deltas), "completed")

    def end_answer(self, _: int) -> Iterator[str]:
        yield from self._section_events(self._sections.close(), self._last_status())

    def end(self) -> Iterator[str]:
        final = self.final = self._final()
        yield self._event(f"response.{final['status']}", {"response": final})

    def fail(self, error: OneboxError) -> Iterator[str]:
        yield self._event("response.failed", {"response": self.unfinished("failed", error)})

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
