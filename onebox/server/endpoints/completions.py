"""POST /v1/completions: prompts as text or token ids; echo and log-probabilities, as evaluation harnesses need."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.server.answer import Answer, AnswerChunk, Answers
from onebox.server.body import JsonRoute
from onebox.server.endpoints.openai_reply import OpenAIReply
from onebox.server.logprobs import LegacyLogprobs, LegacyRow, prompt_logprobs, shown_text
from onebox.server.reply import STREAMABLE, AnswerResponse
from onebox.server.schemas.common import Json
from onebox.server.schemas.completions import CompletionRequest
from onebox.server.service import Service
from onebox.server.settings import ServerSettings
from onebox.text.parser import Content
from onebox.text.tokenizer import Tokenizer

__all__ = ["completions_router"]

_PART_CHARACTERS = 64 << 10
_PART_ROWS = 64
"""Of an echoed prompt, what one event of a stream holds."""


def completions_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=STREAMABLE)
    async def completions(body: CompletionRequest) -> Response:
        """OpenAI's completions: prompts as text, token ids or lists of both; `echo`, `logprobs`, `prompt_logprobs`"""
        service.refuse_other_model(body.model)
        completion = await asyncio.to_thread(body.completion_input, service.defaults)
        prompts = await service.prompts.of_completion(completion)

        def form(answers: Answers) -> OpenAIReply:
            texts = [text for text in completion.texts for _ in range(answers.n)]
            choices = [
                CompletionChoice(service.tokenizer, answer, text, body)
                for answer, text in zip(answers.answers, texts, strict=True)
            ]
            return OpenAIReply(answers, choices, body, service.model_name, ("text_completion", "text_completion"))

        is_stream = bool(body.stream)
        submitted = service.submit(prompts, "cmpl", body.n or 1, is_stream=is_stream)
        return AnswerResponse(submitted, form, settings, is_stream=is_stream)

    return router


class CompletionChoice:
    """One answer as a completion's choice. What is asked about the prompt comes first."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer, prompt: str | list[int], body: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._prompt = prompt
        self._body = body
        self._legacy = LegacyLogprobs(tokenizer)
        self._is_first = True

    def whole(self, chunk: AnswerChunk) -> Json:
        body = self._fields(self._echo() + _text(chunk), lambda: chain(self._prompt_rows(), self._rows(chunk)), chunk)
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._answer.prompt_logprobs)
        return body

    def begin(self) -> Iterable[Json]:
        """An echoed prompt, cut into parts of bounded size."""
        rows, text = self._prompt_rows(), self._echo()
        texts = (text[start : start + _PART_CHARACTERS] for start in range(0, len(text), _PART_CHARACTERS))
        tables = iter(lambda: list(islice(rows, _PART_ROWS)), [])
        for part, table in zip_longest(texts, tables if self._has_logprobs else ()):
            yield self._fields(part or "", partial(iter, table or ()), AnswerChunk())

    def chunk(self, chunk: AnswerChunk) -> Json | None:
        is_asked = self._has_logprobs or bool(self._body.return_token_ids)
        is_shown = chunk.deltas or (chunk.token_ids and is_asked)
        return self._fields(_text(chunk), partial(self._rows, chunk), chunk) if is_shown else None

    def end(self) -> Json:
        return self._fields("", partial(iter, ()), AnswerChunk())

    @property
    def _has_logprobs(self) -> bool:
        return self._body.logprobs is not None

    def _fields(self, text: str, rows: Callable[[], Iterable[LegacyRow]], chunk: AnswerChunk) -> Json:
        is_first, self._is_first = self._is_first, False
        body: Json = {"text": text, "logprobs": self._legacy.table(rows) if self._has_logprobs else None}
        if self._body.return_token_ids:
            body["token_ids"] = list(chunk.token_ids)
            if is_first:
                body["prompt_token_ids"] = list(self._answer.prompt.token_ids)
        return body

    def _echo(self) -> str:
        if not self._body.echo:
            return ""
        return self._prompt if isinstance(self._prompt, str) else shown_text(self._tokenizer, self._prompt)

    def _prompt_rows(self) -> Iterator[LegacyRow]:
        if not self._body.echo:
            return iter(())
        return self._legacy.of_prompt(self._answer.prompt.token_ids, self._answer.prompt_logprobs)

    def _rows(self, chunk: AnswerChunk) -> Iterator[LegacyRow]:
        return self._legacy.of_answer(chunk.logprobs)


def _text(chunk: AnswerChunk) -> str:
    return "".join(delta.text for delta in chunk.deltas if isinstance(delta, Content))
