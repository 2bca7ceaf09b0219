"""POST /v1/cache/lookup: what is cached of a prompt, for routers that choose between servers."""

import asyncio

from fastapi import APIRouter

from onebox.server.body import JsonRoute
from onebox.server.prompt import Prompt
from onebox.server.schemas.cache import CacheLookupReply, LookupRequest, PromptLookupRequest
from onebox.server.service import Service

__all__ = ["cache_router", "lookup_reply"]


def cache_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/cache/lookup")
    async def lookup(body: LookupRequest) -> CacheLookupReply:
        """The longest cached prefix of a prompt or a chat, in tokens, and its tier; nothing is computed or loaded"""
        service.refuse_other_model(body.model)
        if isinstance(body, PromptLookupRequest):
            (prompt,) = await service.prompts.of_completion(body.completion_input())
        else:
            prompt = await service.prompts.of_chat(await asyncio.to_thread(body.chat_prompt))
        return await lookup_reply(service, prompt)

    return router


async def lookup_reply(service: Service, prompt: Prompt) -> CacheLookupReply:
    """Of the prompt, as it would be submitted."""
    found = await service.lookup(prompt)
    return CacheLookupReply(
        num_tokens=len(prompt.token_ids),
        cached_tokens=found.cached_tokens,
        tier=found.tier,
        memory_tokens=found.memory_tokens,
        disk_tokens=found.disk_tokens,
    )
