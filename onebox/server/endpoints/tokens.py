"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from onebox.server.body import JsonRoute
from onebox.server.errors import FieldError
from onebox.server.lanes import is_small
from onebox.server.logprobs import shown_text, token_text
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
        write = partial(_tokenized, service, token_ids, has_strs=bool(body.return_token_strs))
        return Response(await service.lanes.run(write, is_small=is_small(token_ids)), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids"""
        service.refuse_other_model(body.model)
        limit = service.prompts.max_counted_tokens
        if len(body.tokens) > limit:
            raise FieldError(f"tokens has {len(body.tokens)} ids; at most {limit} are detokenised at once.", "tokens")
        write = partial(_detokenized, service, body.tokens)
        return Response(await service.lanes.run(write, is_small=is_small(body.tokens)), media_type="application/json")

    return router


async def _token_ids(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    if body.messages is None:
        return await service.prompts.ids_of_text(body.prompt or "")
    chat = await asyncio.to_thread(body.chat_input)
    return (await service.prompts.of_chat(chat)).token_ids


# Written beside the event loop: a context's worth of ids takes a while.


def _tokenized(service: Service, token_ids: Sequence[int], *, has_strs: bool) -> bytes:
    limit = service.engine.config.max_model_len
    strs = [token_text(service.tokenizer, token_id) for token_id in token_ids] if has_strs else None
    return _json({"count": len(token_ids), "max_model_len": limit, "tokens": list(token_ids), "token_strs": strs})


def _detokenized(service: Service, token_ids: Sequence[int]) -> bytes:
    return _json({"prompt": shown_text(service.tokenizer, token_ids)})


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
