"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.server.logprobs import shown_text, token_text
from onebox.server.pieces import JsonResponse, JsonRows
from onebox.server.schemas.common import Json
from onebox.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from onebox.server.service import Service

__all__ = ["tokens_router"]


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation as the chat template renders it"""
        service.refuse_other_model(body.model)
        token_ids = await _token_ids(service, body)
        limit = service.engine.config.max_model_len

        def reply() -> Json:
            strs = JsonRows(token_text(service.tokenizer, i) for i in token_ids) if body.return_token_strs else None
            return {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": strs}

        return JsonResponse(reply)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids"""
        service.refuse_other_model(body.model)
        text = await asyncio.to_thread(shown_text, service.tokenizer, body.tokens)
        return JsonResponse(lambda: {"prompt": text})

    return router


async def _token_ids(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    if body.messages is None:
        return await asyncio.to_thread(service.tokenizer.encode, body.prompt or "")
    chat = await asyncio.to_thread(body.chat_input)
    return (await service.prompts.of_chat(chat)).token_ids
