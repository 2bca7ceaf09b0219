"""Fixed prompts whose answers two servers must share, token for token, before one takes the other's place."""

import asyncio
from typing import Any

import httpx

from onebox.spec.errors import MismatchError, OneboxError

__all__ = ["SMOKE_PROMPTS", "ask_smoke", "refuse_other_answers"]

_MAX_TOKENS = 32
_NUM_ALONE = 2
_SMOKE_S = 600.0
_LONG = " ".join(f"Line {number} of the list names item {number * 7919 % 1000}." for number in range(1, 25))

SMOKE_PROMPTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the capital of Hungary?"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Write a function that reverses a list."}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Give the colour and the number of wheels of a red car."}],
            "response_format": {"type": "json_object"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Answer in one word."},
                {"role": "user", "content": "Hányadik napja a hétnek a szerda?"},
            ]
        },
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{_LONG} Which item is in line 20?"}]}),
    ("/v1/completions", {"prompt": "The quick brown fox"}),
)


async def ask_smoke(http: httpx.AsyncClient, url: str) -> list[Any]:
    """The answers' token ids and texts: of some prompts alone, and of all of them together."""
    alone = [await _ask(http, url, *prompt) for prompt in SMOKE_PROMPTS[:_NUM_ALONE]]
    together = await asyncio.gather(*(_ask(http, url, *prompt) for prompt in SMOKE_PROMPTS))
    return [*alone, *together]


def refuse_other_answers(name: str, old: list[Any], new: list[Any]) -> None:
    """Refuses a new server that answers otherwise than the old one."""
    for number, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after:
            path, body = (*SMOKE_PROMPTS[:_NUM_ALONE], *SMOKE_PROMPTS)[number]
            asked = body.get("prompt") or body["messages"][-1]["content"]
            raise MismatchError(
                f"The new {name} answers {path} {asked[-60:]!r} otherwise than the old one: {after!r} instead of "
                f"{before!r}. It takes no traffic."
            )


async def _ask(http: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> Any:
    body = {**body, "temperature": 0, "seed": 0, "max_tokens": _MAX_TOKENS, "return_token_ids": True}
    try:
        response = await http.post(f"{url}{path}", json=body, timeout=_SMOKE_S)
        response.raise_for_status()
        choice = response.json()["choices"][0]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise OneboxError(
            f"{url}{path} did not answer a fixed prompt ({str(error) or type(error).__name__})."
        ) from None
    message = choice.get("message") or {}
    return [choice["token_ids"], message.get("content", choice.get("text")), message.get("reasoning_content")]
