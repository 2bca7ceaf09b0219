"""What clients do beside asking: stored conversations, answers in the background, lookups, an answer's control."""

import asyncio
import json
import random
import uuid
from typing import Any

from benchmarks.soak.clients import judge
from benchmarks.soak.http import Address, Reply, Sent, call
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.scenarios import CHAT, MESSAGES, RESPONSES, draw

__all__ = ["send_further"]

_OK = frozenset({200})
_OK_OR_GONE = frozenset({200, 404})
"""An answer that the server's memory or its engine has lost meanwhile, or that has ended."""


async def send_further(random_: random.Random, address: Address, ledger: Ledger) -> None:
    await random_.choice((_converse, _work_in_background, _look_up, _end_thinking))(random_, address, ledger)


async def _converse(random_: random.Random, address: Address, ledger: Ledger) -> None:
    """A stored conversation goes on as the same one sent whole."""
    head = {"max_output_tokens": 24, "temperature": 0, "reasoning": {"effort": "none"}}
    asked = f"Remember {random_.randrange(10**6)}. {draw(random_).kind}?"
    first = await _ask(address, ledger, "response, stored", {**head, "input": asked})
    if first is None:
        return
    follow = {"role": "user", "content": "And now say it once more."}
    went_on = {**head, "input": [follow], "previous_response_id": first["id"], "truncation": "auto"}
    second = await _ask(address, ledger, "response, going on", went_on, _OK_OR_GONE)
    earlier = [{"role": "user", "content": asked}, *first["output"]]
    whole = await _ask(address, ledger, "response, sent whole", {**head, "input": [*earlier, follow]})
    if second and whole:
        ledger.num_compared += 1
        texts = [[part for item in answer["output"] for part in _texts(item)] for answer in (second, whole)]
        if texts[0] != texts[1]:
            ledger.fail("wrong answer", f"a stored conversation went on with {texts[0]!r}, the same whole {texts[1]!r}")
    for method in ("GET", "DELETE", "GET"):
        sent = Sent(f"{RESPONSES}/{first['id']}", b"", method, limit_s=60)
        judge(ledger, f"response, {method}", sent, await call(address, sent), _OK_OR_GONE)


def _texts(item: dict[str, Any]) -> list[Any]:
    return [item.get("name"), item.get("arguments"), *(part["text"] for part in item.get("content") or ())]


async def _ask(
    address: Address, ledger: Ledger, kind: str, body: dict[str, Any], allowed: frozenset[int] = _OK
) -> dict[str, Any] | None:
    sent = Sent(RESPONSES, json.dumps(body).encode())
    reply = await call(address, sent)
    answer = judge(ledger, kind, sent, reply, allowed)
    return None if answer is None else dict(reply.json())


async def _work_in_background(random_: random.Random, address: Address, ledger: Ledger) -> None:
    """Begun, asked for, and cancelled or waited for; now and then forgotten."""
    body = {"input": "Count from 1 to 40.", "max_output_tokens": random_.randint(8, 60), "background": True}
    started = await _ask(address, ledger, "response, background", body)
    if started is None:
        return
    path, is_cancelled = f"{RESPONSES}/{started['id']}", random_.random() < 0.5
    for _ in range(random_.randint(0, 20)):
        await asyncio.sleep(0.2)
        sent = Sent(path, b"", "GET", limit_s=60)
        reply = await call(address, sent)
        judge(ledger, "response, background, GET", sent, reply, _OK_OR_GONE)
        if reply.status != 200 or reply.json()["status"] not in ("queued", "in_progress"):
            return
    if is_cancelled:
        sent = Sent(f"{path}/cancel", b"", limit_s=60)
        # Twice at once: 400 where it has ended.
        replies = await asyncio.gather(*(call(address, sent) for _ in range(2)))
        for reply in replies:
            judge(ledger, "response, background, cancel", sent, reply, _OK_OR_GONE | {400})


async def _look_up(random_: random.Random, address: Address, ledger: Ledger) -> None:
    scenario = draw(random_)
    if scenario.path not in (CHAT, MESSAGES):
        return
    path = "/v1/cache/lookup" if scenario.path == CHAT else "/v1/messages/cache_lookup"
    names = ("model", "messages", "tools", "tool_choice")
    body = {name: value for name, value in scenario.body.items() if name in names}
    sent = Sent(path, json.dumps(body).encode(), limit_s=60)
    judge(ledger, "lookup", sent, await call(address, sent), _OK, _check_lookup)


def _check_lookup(reply: Reply) -> str | None:
    found = reply.json()
    is_possible = 0 <= found["cached_tokens"] <= found["num_tokens"]
    return None if is_possible else f"{found['cached_tokens']} of {found['num_tokens']} tokens are cached"


async def _end_thinking(random_: random.Random, address: Address, ledger: Ledger) -> None:
    """From another connection, while the answer is computed, or after its end."""
    request_id = f"soak-{uuid.UUID(int=random_.getrandbits(128)).hex}"
    body = {"messages": [{"role": "user", "content": "Think about the sea."}], "max_tokens": 160, "stream": True}
    asked = Sent(CHAT, json.dumps(body).encode(), headers={"x-request-id": request_id})
    running = asyncio.ensure_future(call(address, asked))
    try:
        await asyncio.sleep(random_.random())
        control = {"id": request_id, "action": "reasoning_end"}
        sent = Sent("/v1/chat/completions/control", json.dumps(control).encode(), limit_s=60)
        judge(ledger, "control", sent, await call(address, sent), _OK_OR_GONE)
    finally:
        reply = await running
    judge(ledger, "chat, thinking ended", asked, reply)
