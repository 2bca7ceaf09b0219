"""POST /v1/completions: prompts as text or token ids; echo and log-probabilities, as evaluation harnesses need."""

import asyncio

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.server.answer import Answer, AnswerChunk, Answers
from onebox.server.body import JsonRoute
from onebox.server.endpoints.openai_reply import OpenAIReply
from onebox.server.logprobs import LegacyLogprobs, prompt_logprobs, shown_text
from onebox.server.reply import STREAMABLE, AnswerResponse
from onebox.server.schemas.common import Json
from onebox.server.schemas.completions import CompletionRequest
from onebox.server.service import Service
from onebox.server.settings import ServerSettings
from onebox.text.parser import Content
from onebox.text.tokenizer import Tokenizer

__all__ = ["completions_router"]


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

        submitted = service.submit(prompts, "cmpl", body.n or 1)
        return AnswerResponse(submitted, form, settings, is_stream=bool(body.stream))

    return router


class CompletionChoice:
    """One answer as a completion's choice. What is asked about the prompt comes with the first chunk."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer, prompt: str | list[int], body: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._body = body
        self._legacy = LegacyLogprobs(tokenizer)
        text = prompt if isinstance(prompt, str) else shown_text(tokenizer, prompt)
        self._echo = text if body.echo else ""
        self._is_first = True

    def whole(self, chunk: AnswerChunk) -> Json:
        body = self._fields(chunk)
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._answer.prompt_logprobs)
        return body

    def begin(self) -> None:
        """Nothing: the prompt's log-probabilities are not there yet."""
        return

    def chunk(self, chunk: AnswerChunk) -> Json | None:
        is_asked = self._body.logprobs is not None or bool(self._body.return_token_ids)
        is_shown = chunk.deltas or (chunk.token_ids and is_asked) or (self._is_first and self._echo)
        return self._fields(chunk) if is_shown else None

    def end(self) -> Json:
        return self._fields(AnswerChunk())

    def _fields(self, chunk: AnswerChunk) -> Json:
        is_first, self._is_first = self._is_first, False
        text = "".join(delta.text for delta in chunk.deltas if isinstance(delta, Content))
        body: Json = {"text": self._echo + text if is_first else text, "logprobs": self._logprobs(chunk, is_first)}
        if self._body.return_token_ids:
            body["token_ids"] = list(chunk.token_ids)
            if is_first:
                body["prompt_token_ids"] = list(self._answer.prompt.token_ids)
        return body

    def _logprobs(self, chunk: AnswerChunk, is_first: bool) -> Json | None:
        if self._body.logprobs is None:
            return None
        if not (is_first and self._body.echo):
            return self._legacy.of_answer(chunk.logprobs)
        prompt = self._legacy.of_prompt(self._answer.prompt.token_ids, self._answer.prompt_logprobs)
        answer = self._legacy.of_answer(chunk.logprobs)
        return {name: [*prompt[name], *answer[name]] for name in prompt}
