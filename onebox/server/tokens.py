"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
from typing import Annotated, Any, Self

from fastapi import APIRouter
from pydantic import Field, model_validator

from onebox.engine.api import SamplingParams
from onebox.server.complete import Service
from onebox.server.generate import ChatCall, prompt_of, with_pictures
from onebox.server.logprobs import shown_text, token_text
from onebox.server.messages import FunctionTool, Message
from onebox.server.schema import Strict

__all__ = ["DetokenizeRequest", "TokenizeRequest", "tokens_router"]


class TokenizeRequest(Strict):
    """Of a text, or of a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Without effect: the family's tokenizers add none."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is None and (self.tools is not None or self.chat_template_kwargs is not None):
            raise ValueError("tools and chat_template_kwargs go with messages")
        return self

    async def token_ids(self, service: Service) -> tuple[int, ...]:
        if self.messages is None:
            return await asyncio.to_thread(service.tokenizer.encode, self.prompt or "")
        call = await with_pictures(service, self._call)
        return (await asyncio.to_thread(prompt_of, service, call)).token_ids

    def _call(self) -> ChatCall:
        return ChatCall(
            [message.for_template() for message in self.messages or ()],
            SamplingParams(),
            tools=[tool.for_template() for tool in self.tools or ()],
            template_options=self.chat_template_kwargs or {},
        )


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.refuse_other_model(body.model)
        token_ids = await body.token_ids(service)
        strs = [token_text(service.tokenizer, i) for i in token_ids] if body.return_token_strs else None
        limit = service.engine.config.max_model_len
        return {"count": len(token_ids), "max_model_len": limit, "tokens": list(token_ids), "token_strs": strs}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.refuse_other_model(body.model)
        return {"prompt": await asyncio.to_thread(shown_text, service.tokenizer, body.tokens)}

    return router
