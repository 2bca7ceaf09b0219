"""The JSON that goes out, in OpenAI's shapes: whole answers, stream chunks, usage."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from onebox.engine.api import Counts
from onebox.server.complete import Answer
from onebox.server.errors import error_body
from onebox.spec.errors import OneboxError
from onebox.text.reasoning import Split

__all__ = ["ChatShape", "CompletionShape", "Shape", "event_stream", "whole_reply"]

Json = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes its single choice."""

    whole_object: str
    chunk_object: str

    def whole(self, text: Split) -> Json: ...
    def opening(self) -> list[Json]: ...
    def piece(self, text: Split) -> Json: ...


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: Split) -> Json:
        message = {"role": "assistant", "content": text.content, "reasoning_content": text.reasoning or None}
        return {"message": message}

    def opening(self) -> list[Json]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def piece(self, text: Split) -> Json:
        fields = {"reasoning_content": text.reasoning, "content": text.content}
        return {"delta": {name: value for name, value in fields.items() if value}}


class CompletionShape:
    whole_object = chunk_object = "text_completion"

    def whole(self, text: Split) -> Json:
        return {"text": text.content}

    def opening(self) -> list[Json]:
        return []

    def piece(self, text: Split) -> Json:
        return {"text": text.content}


async def whole_reply(answer: Answer, shape: Shape, model_name: str) -> Json:
    """The whole answer in one object."""
    text = await answer.whole()
    head = _head(answer, shape.whole_object, model_name)
    return {**head, "choices": [_choice(shape.whole(text), answer.finish_reason)], "usage": _usage(answer.counts)}


async def event_stream(answer: Answer, shape: Shape, model_name: str, *, includes_usage: bool) -> AsyncIterator[str]:
    """The answer as server-sent events. An error after the start is an event too: the status line is gone."""
    head = _head(answer, shape.chunk_object, model_name)
    if includes_usage:
        head["usage"] = None
    try:
        for choice in shape.opening():
            yield _event({**head, "choices": [_choice(choice)]})
        async for piece in answer.pieces():
            yield _event({**head, "choices": [_choice(shape.piece(piece))]})
        yield _event({**head, "choices": [_choice(shape.piece(Split("", "")), answer.finish_reason)]})
        if includes_usage:
            yield _event({**head, "choices": [], "usage": _usage(answer.counts)})
    except OneboxError as error:
        yield _event(error_body(error))
    yield "data: [DONE]\n\n"


def _head(answer: Answer, kind: str, model_name: str) -> Json:
    return {"id": answer.request_id, "object": kind, "created": int(time.time()), "model": model_name}


def _choice(body: Json, finish_reason: str | None = None) -> Json:
    return {"index": 0, **body, "logprobs": None, "finish_reason": finish_reason}


def _usage(counts: Counts) -> Json:
    prompt, completion = counts.prompt_tokens, counts.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
