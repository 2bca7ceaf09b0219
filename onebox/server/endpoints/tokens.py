"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
from typing import Any

from fastapi import APIRouter

from onebox.server.body import JsonRoute
from onebox.server.logprobs import shown_text, token_text
from onebox.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from onebox.server.service import Service

__all__ = ["tokens_router"]


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text, or of a conversation as the chat template renders it"""
        service.refuse_other_model(body.model)
        token_ids = await _token_ids(service, body)
        strs = [token_text(service.tokenizer, i) for i in token_ids] if body.return_token_strs else None
        limit = service.engine.config.max_model_len
        return {"count": len(token_ids), "max_model_len": limit, "tokens": list(token_ids), "token_strs": strs}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Text of token ids"""
        service.refuse_other_model(body.model)
        return {"prompt": await asyncio.to_thread(shown_text, service.tokenizer, body.tokens)}

    return router


async def _token_ids(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    if body.messages is None:
        return await asyncio.to_thread(service.tokenizer.encode, body.prompt or "")
    chat = await asyncio.to_thread(body.chat_input)
    return (await service.prompts.of_chat(chat)).token_ids
