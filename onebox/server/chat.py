"""POST /v1/chat/completions."""

import asyncio
import secrets
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from onebox.server.answer import Answer, Piece
from onebox.server.complete import Service
from onebox.server.generate import ChatCall, Effort, start_chat, with_pictures
from onebox.server.logprobs import chat_logprobs
from onebox.server.messages import FunctionTool, Message, ToolChoiceField, tool_choice_of
from onebox.server.reply import STREAMABLE, EventStream, Json, Reply, whole_or_gone
from onebox.server.schema import GenerationFields
from onebox.server.settings import ServerSettings
from onebox.text.answer import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from onebox.text.tokenizer import Tokenizer

__all__ = ["ChatRequest", "chat_router"]

_Budget = Annotated[int, Field(ge=0)]
_BUDGETS = ("thinking_budget", "max_reasoning_tokens", "thinking_token_budget")


class ChatRequest(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Of every token of the answer, reasoning included."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=512)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    """A thinking budget by name: minimal 512, low 2048, medium 8192, high 32768 tokens, xhigh and max without limit;
    none turns thinking off."""
    thinking_budget: _Budget | None = None
    """Tokens of reasoning after which it is closed and the answer goes on; 0 turns thinking off. Goes before
    reasoning_effort. May also stand in chat_template_kwargs."""
    max_reasoning_tokens: _Budget | None = None
    """Another name of thinking_budget."""
    thinking_token_budget: _Budget | None = None
    """vLLM's name of thinking_budget."""
    enable_thinking: bool | None = None
    """Short for chat_template_kwargs.enable_thinking."""
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit and differ; give one")
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if len(set(self._budgets())) > 1:
            raise ValueError(f"{', '.join(_BUDGETS)} are names of one limit and differ; give one")
        return self

    @model_validator(mode="after")
    def _alternatives_of_something(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; set logprobs to true")
        return self

    @model_validator(mode="after")
    def _a_choice_of_something(self) -> Self:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice asks for a call and there are no tools; give some")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def call(self, service: Service) -> ChatCall:
        """The request as `generate.py` takes it."""
        options = dict(self.chat_template_kwargs or {})
        options.pop("thinking_budget", None)
        if self.enable_thinking is not None:
            options.setdefault("enable_thinking", self.enable_thinking)
        return ChatCall(
            messages=[message.for_template() for message in self.messages],
            sampling=self.sampling(service.defaults, logprobs=(self.top_logprobs or 0) if self.logprobs else None),
            tools=[tool.for_template() for tool in self.tools or ()],
            tool_choice=tool_choice_of(self.tool_choice),
            has_parallel_calls=self.parallel_tool_calls is not False,
            grammar=self.grammar,
            template_options=options,
            effort=self.reasoning_effort,
            thinking_budget=next(iter(self._budgets()), None),
            stops=self.stops,
            n=self.n or 1,
            priority=self.priority or 0,
            cache_prompt=self.cache_prompt is not False,
        )

    def _budgets(self) -> list[int]:
        inner = (self.chat_template_kwargs or {}).get("thinking_budget")
        if inner is not None and (not isinstance(inner, int) or isinstance(inner, bool) or inner < 0):
            raise ValueError("chat_template_kwargs.thinking_budget must be a whole number from 0 up")
        return [budget for budget in (inner, *(getattr(self, name) for name in _BUDGETS)) if budget is not None]


def chat_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=STREAMABLE)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service.refuse_other_model(body.model)
        call = await with_pictures(service, lambda: body.call(service))
        # Rendering and encoding a long conversation takes a while, and the loop has other clients.
        answers = await asyncio.to_thread(start_chat, service, call, "chatcmpl")
        prompt_ids = list(answers.answers[0].prompt.token_ids)
        reply = Reply(
            answers,
            [ChatChoice(service.tokenizer, answer, body) for answer in answers.answers],
            service.model_name,
            "chat.completion",
            "chat.completion.chunk",
            body.includes_usage,
            body.has_continuous_usage,
            {"prompt_token_ids": prompt_ids} if body.return_token_ids else None,
        )
        if body.stream:
            return EventStream(reply.events(), answers.close, settings.send_timeout_s)
        return await whole_or_gone(request, answers, reply.whole())

    return router


class ChatChoice:
    """One answer as a chat's choice."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer, body: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._has_logprobs = bool(body.logprobs)
        self._has_token_ids = bool(body.return_token_ids)
        self._held = Piece()
        """What has come without anything to show."""

    def whole(self, piece: Piece) -> Json:
        said = _fields(piece.deltas)
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in said.get("tool_calls", [])]
        reasoning = said.get("reasoning")
        message: Json = {"role": "assistant", "content": said.get("content", None if calls else "")}
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **self._beside(piece)}

    def opening(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, piece: Piece) -> Json | None:
        # Ids wait for text: clients that count them look only at chunks that show some.
        piece = Piece.join([self._held, piece])
        is_shown = piece.deltas or (piece.token_ids and self._has_logprobs)
        self._held = Piece() if is_shown else piece
        return {"delta": _fields(piece.deltas), **self._beside(piece)} if is_shown else None

    def ending(self) -> Json:
        ids = {"token_ids": list(self._held.token_ids)} if self._has_token_ids else {}
        return {"delta": {}, "logprobs": None, **ids}

    def _beside(self, piece: Piece) -> Json:
        beside: Json = {"logprobs": chat_logprobs(self._tokenizer, piece.logprobs) if self._has_logprobs else None}
        if self._has_token_ids:
            beside["token_ids"] = list(piece.token_ids)
        return beside


def _fields(deltas: tuple[Delta, ...]) -> Json:
    """Deltas as the fields of a chunk's delta; those of a whole answer are the fields of its message."""
    fields: Json = {}
    calls: dict[int, Json] = {}
    for delta in deltas:
        match delta:
            case Reasoning(text):
                fields["reasoning_content"] = fields["reasoning"] = fields.get("reasoning", "") + text
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case ToolCallStart(index, name):
                call_id = f"call_{secrets.token_hex(12)}"
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return {**fields, "tool_calls": [*calls.values()]} if calls else fields
