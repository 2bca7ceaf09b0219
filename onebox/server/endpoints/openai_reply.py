"""OpenAI's envelope around choices, which chat and completions share: one JSON object, or chunks and [DONE]."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from onebox.server.answer import AnswerChunk, Answers
from onebox.server.errors import error_body
from onebox.server.pieces import JsonParts
from onebox.server.schemas.common import GenerationFields, Json
from onebox.server.sse import COMMENT, sse_event
from onebox.server.usage import Usage
from onebox.spec.errors import OneboxError

__all__ = ["ChoiceForm", "OpenAIReply"]

_DONE = "data: [DONE]\n\n"


class ChoiceForm(Protocol):
    """How an endpoint writes one answer as a choice: whole, or chunk by chunk."""

    def whole(self, chunk: AnswerChunk) -> Json: ...

    def begin(self) -> Iterable[Json]:
        """Before the first chunk."""
        ...

    def chunk(self, chunk: AnswerChunk) -> Json | None:
        """None: the chunk has nothing to show yet."""
        ...

    def end(self) -> Json: ...


class OpenAIReply:
    """One request's answers as choices."""

    heartbeat = COMMENT

    def __init__(
        self,
        answers: Answers,
        choices: Sequence[ChoiceForm],
        body: GenerationFields,
        model: str,
        objects: tuple[str, str],
        extra: Json | None = None,
    ) -> None:
        """`objects` names a whole answer and a chunk.

        `extra` are fields beside the choices, of the whole answer or of a stream's first chunk.
        """
        self.answers = answers
        self._choices = choices
        self._body = body
        self._model = model
        self._objects = objects
        self._extra = extra or {}
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, chunks: Sequence[AnswerChunk]) -> Json:
        choices = (
            {"index": place, **choice.whole(chunk), "finish_reason": answer.finish_reason}
            for place, (choice, chunk, answer) in enumerate(
                zip(self._choices, chunks, self.answers.answers, strict=True)
            )
        )
        head = self._head(self._objects[0])
        return {**head, "choices": JsonParts(choices), "usage": _usage(self.answers.usage), **self._extra}

    def begin(self) -> Iterator[str]:
        """Nothing: clients that measure take the first chunk for the end of the prompt."""
        yield from ()

    def chunk(self, place: int, chunk: AnswerChunk) -> Iterator[str]:
        yield from self._begin_choice(place)
        if (shown := self._choices[place].chunk(chunk)) is not None:
            yield self._event(place, shown)

    def end_answer(self, place: int) -> Iterator[str]:
        yield from self._begin_choice(place)
        yield self._event(place, self._choices[place].end(), self.answers.answers[place].finish_reason)

    def end(self) -> Iterator[str]:
        if self._body.includes_usage:
            usage = _usage(self.answers.usage)
            yield sse_event({**self._head(self._objects[1]), "choices": [], "usage": usage})
        yield _DONE

    def fail(self, error: OneboxError) -> Iterator[str]:
        yield sse_event(error_body(error))
        yield _DONE

    def _begin_choice(self, place: int) -> Iterator[str]:
        if place not in self._begun:
            self._begun.add(place)
            for part in self._choices[place].begin():
                yield self._event(place, part)

    def _head(self, kind: str) -> Json:
        return {"id": self.answers.request_id, "object": kind, "created": self._created, "model": self._model}

    def _event(self, place: int, choice: Json, finish_reason: str | None = None) -> str:
        choices = [{"index": place, **choice, "finish_reason": finish_reason}]
        body = {**self._head(self._objects[1]), **self._extra, "choices": choices}
        self._extra = {}
        if self._body.has_continuous_usage:
            body["usage"] = _plain_usage(*self.answers.num_tokens)
        elif self._body.includes_usage:
            body["usage"] = None
        return sse_event(body)


def _plain_usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _usage(usage: Usage) -> Json:
    """In OpenAI's names; drafts of speculative decoding are its predictions."""
    return {
        **_plain_usage(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": usage.cached_details,
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            **usage.draft_details,
        },
    }
