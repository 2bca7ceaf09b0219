"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
from functools import partial

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.server.body import JsonRoute
from onebox.server.errors import FieldError
from onebox.server.lanes import is_small
from onebox.server.logprobs import shown_text, token_text
from onebox.server.pieces import JsonResponse, JsonRows
from onebox.server.schemas.common import Json
from onebox.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from onebox.server.service import Service

__all__ = ["tokens_router"]


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

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
        limit = service.prompts.max_counted_tokens
        if len(body.tokens) > limit:
            raise FieldError(f"tokens has {len(body.tokens)} ids; at most {limit} are detokenised at once.", "tokens")
        vocab_size = service.engine.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise FieldError(
                f"tokens holds the id {max(body.tokens)}; the vocabulary's ids go from 0 to {vocab_size - 1}.", "tokens"
            )
        write = partial(shown_text, service.tokenizer, body.tokens)
        text = await service.lanes.run(write, is_small=is_small(body.tokens))
        return JsonResponse(lambda: {"prompt": text})

    return router


async def _token_ids(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    if body.messages is None:
        return await service.prompts.ids_of_text(body.prompt or "")
    chat = await asyncio.to_thread(body.chat_input)
    with service.prompts.media.files() as files:
        return (await service.prompts.count_chat(chat, files)).token_ids
