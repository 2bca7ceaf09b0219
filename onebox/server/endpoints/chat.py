"""POST /v1/chat/completions."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.server.answer import AnswerChunk, Answers
from onebox.server.body import JsonRoute
from onebox.server.endpoints.openai_reply import OpenAIReply
from onebox.server.logprobs import chat_logprobs
from onebox.server.reply import STREAMABLE, AnswerResponse
from onebox.server.schemas.chat import ChatRequest
from onebox.server.schemas.common import Json
from onebox.server.service import Service
from onebox.server.settings import ServerSettings
from onebox.text.parser import Content, Delta, Reasoning
from onebox.text.tokenizer import Tokenizer
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart

__all__ = ["chat_router"]


def chat_router(service: Service, settings: ServerSettings) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", responses=STREAMABLE)
    async def chat_completions(body: ChatRequest) -> Response:
        """OpenAI's chats: streaming, tools, thinking, structured output, images, log-probabilities"""
        service.refuse_other_model(body.model)
        chat = await asyncio.to_thread(body.chat_input, service.defaults)
        prompt = await service.prompts.of_chat(chat)

        def form(answers: Answers) -> OpenAIReply:
            choices = [ChatChoice(service.tokenizer, body) for _ in answers.answers]
            extra: Json = {"prompt_token_ids": list(prompt.token_ids)} if body.return_token_ids else {}
            objects = ("chat.completion", "chat.completion.chunk")
            return OpenAIReply(answers, choices, body, service.model_name, objects, extra)

        is_stream = bool(body.stream)
        submitted = service.submit([prompt], "chatcmpl", body.n or 1, is_stream=is_stream)
        return AnswerResponse(submitted, form, settings, is_stream=is_stream)

    return router


class ChatChoice:
    """One answer as a chat's choice."""

    def __init__(self, tokenizer: Tokenizer, body: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = bool(body.logprobs)
        self._has_token_ids = bool(body.return_token_ids)
        self._held: list[AnswerChunk] = []
        """Tokens without text to show yet."""

    def whole(self, chunk: AnswerChunk) -> Json:
        fields = _fields(chunk.deltas)
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in fields.get("tool_calls", [])]
        reasoning = fields.get("reasoning")
        message: Json = {"role": "assistant", "content": fields.get("content", None if calls else "")}
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **self._beside(chunk)}

    def begin(self) -> Iterable[Json]:
        yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, chunk: AnswerChunk) -> Json | None:
        # Ids wait for text: clients that count them look only at chunks that show some.
        self._held.append(chunk)
        if not (chunk.deltas or (chunk.token_ids and self._has_logprobs)):
            return None
        chunk, self._held = AnswerChunk.join(self._held), []
        return {"delta": _fields(chunk.deltas), **self._beside(chunk)}

    def end(self) -> Json:
        held = AnswerChunk.join(self._held)
        return {"delta": {}, "logprobs": None, **({"token_ids": list(held.token_ids)} if self._has_token_ids else {})}

    def _beside(self, chunk: AnswerChunk) -> Json:
        beside: Json = {"logprobs": chat_logprobs(self._tokenizer, chunk.logprobs) if self._has_logprobs else None}
        if self._has_token_ids:
            beside["token_ids"] = list(chunk.token_ids)
        return beside


def _fields(deltas: Sequence[Delta]) -> Json:
    """Deltas as the fields of a chunk's delta; those of a whole answer are the fields of its message."""
    texts: dict[str, list[str]] = {}
    arguments: dict[int, list[str]] = {}
    calls: dict[int, Json] = {}
    for delta in deltas:
        match delta:
            case Reasoning(text):
                texts.setdefault("reasoning", []).append(text)
            case Content(text):
                texts.setdefault("content", []).append(text)
            case ToolCallStart(index, name):
                call_id = f"call_{secrets.token_hex(12)}"
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": {"name": name}}
                arguments.setdefault(index, [])
            case ToolCallArguments(index, text):
                calls.setdefault(index, {"index": index, "function": {}})
                arguments.setdefault(index, []).append(text)
    for index, call in calls.items():
        call["function"]["arguments"] = "".join(arguments[index])
    fields: Json = {name: "".join(parts) for name, parts in texts.items()}
    if "reasoning" in fields:
        fields["reasoning_content"] = fields["reasoning"]
    return {**fields, "tool_calls": [*calls.values()]} if calls else fields
