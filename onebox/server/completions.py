"""POST /v1/completions: prompts as text or token ids; echo and log-probabilities, as evaluation harnesses need."""

import asyncio
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag, model_validator

from onebox.server.answer import Answer, Piece, Prompt
from onebox.server.complete import Answers, Service, start
from onebox.server.logprobs import LegacyLogprobs, prompt_logprobs, shown_text
from onebox.server.reply import STREAMABLE, EventStream, Json, Reply, whole_or_gone
from onebox.server.schema import GenerationFields, Text, text_or_list
from onebox.server.settings import ServerSettings
from onebox.text.answer import Content
from onebox.text.tokenizer import Tokenizer

__all__ = ["CompletionRequest", "completions_router"]

_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""


def _which_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    return "<list>" if any(isinstance(item, str | list) for item in value) else "<ids>"


_Ids = list[int]
_OnePrompt = Annotated[Text | Annotated[_Ids, Tag("<list>")], Discriminator(text_or_list)]
_Prompts = Annotated[
    Text | Annotated[_Ids, Tag("<ids>")] | Annotated[list[_OnePrompt], Tag("<list>")], Discriminator(_which_prompt)
]


class CompletionRequest(GenerationFields):
    prompt: _Prompts
    """A text, token ids, or a list of both; of a list, each is answered by itself."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """16 unless told. 0 makes nothing: with echo and logprobs, the prompt is looked at."""
    echo: bool | None = None
    """The text begins with the prompt, and logprobs with the prompt's."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Of the prompt's tokens, in vLLM's shape; not in a stream."""

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed; use echo with logprobs, or no stream")
        return self

    @property
    def token_limit(self) -> int:
        return max(_DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens, 1)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [item for item in self.prompt if isinstance(item, str | list)]
        return texts or [[item for item in self.prompt if isinstance(item, int)]]

    def begin(self, service: Service) -> Answers:
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        sampling = self.sampling(
            service.defaults, logprobs=self.logprobs, prompt_logprobs=max(asked, default=None), grammar=self.grammar
        )
        prompts = [
            Prompt(
                service.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt),
                sampling,
                self.stops,
                is_only_read=self.max_tokens == 0,
                priority=self.priority or 0,
                cache_prompt=self.cache_prompt is not False,
            )
            for prompt in self.prompts
        ]
        return start(service, prompts, "cmpl", self.n or 1)


def completions_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", responses=STREAMABLE)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.refuse_other_model(body.model)
        answers = await asyncio.to_thread(body.begin, service)
        texts = [text for text in body.prompts for _ in range(answers.n)]
        reply = Reply(
            answers,
            [
                CompletionChoice(service.tokenizer, answer, text, body)
                for answer, text in zip(answers.answers, texts, strict=True)
            ],
            service.model_name,
            "text_completion",
            "text_completion",
            body.includes_usage,
            body.has_continuous_usage,
        )
        if body.stream:
            return EventStream(reply.events(), answers.close, settings.send_timeout_s)
        return await whole_or_gone(request, answers, reply.whole())

    return router


class CompletionChoice:
    """One answer as a completion's choice. What is said of the prompt comes with the first piece."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer, prompt: str | list[int], body: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._body = body
        self._legacy = LegacyLogprobs(tokenizer)
        text = prompt if isinstance(prompt, str) else shown_text(tokenizer, prompt)
        self._echo = text if body.echo else ""
        self._is_first = True

    def whole(self, piece: Piece) -> Json:
        body = self._piece(piece)
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._answer.prompt_logprobs)
        return body

    def opening(self) -> None:
        """Nothing: the prompt's log-probabilities are not there yet."""
        return

    def chunk(self, piece: Piece) -> Json | None:
        is_asked = self._body.logprobs is not None or bool(self._body.return_token_ids)
        is_shown = piece.deltas or (piece.token_ids and is_asked) or (self._is_first and self._echo)
        return self._piece(piece) if is_shown else None

    def ending(self) -> Json:
        return self._piece(Piece())

    def _piece(self, piece: Piece) -> Json:
        is_first, self._is_first = self._is_first, False
        text = "".join(delta.text for delta in piece.deltas if isinstance(delta, Content))
        body: Json = {"text": self._echo + text if is_first else text, "logprobs": self._logprobs(piece, is_first)}
        if self._body.return_token_ids:
            body["token_ids"] = list(piece.token_ids)
            if is_first:
                body["prompt_token_ids"] = list(self._answer.prompt.token_ids)
        return body

    def _logprobs(self, piece: Piece, is_first: bool) -> Json | None:
        if self._body.logprobs is None:
            return None
        if not (is_first and self._body.echo):
            return self._legacy.of_answer(piece.logprobs)
        prompt = self._legacy.of_prompt(self._answer.prompt.token_ids, self._answer.prompt_logprobs)
        answer = self._legacy.of_answer(piece.logprobs)
        return {name: [*prompt[name], *answer[name]] for name in prompt}
