"""OpenAI's and Anthropic's own clients, where they are installed: their answers against those computed alone."""

import asyncio
import random
from typing import Any

from benchmarks.soak.clients import References
from benchmarks.soak.http import Address
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.scenarios import CHAT, MESSAGES

__all__ = ["send_by_library"]


async def send_by_library(references: References, random_: random.Random, address: Address, ledger: Ledger) -> None:
    """One request of the fixed set through a client library, with its own connection pool."""
    paths = {CHAT: _ask_openai, MESSAGES: _ask_anthropic}
    numbers = [number for number, scenario in enumerate(references.scenarios) if scenario.path in paths]
    number = random_.choice(numbers)
    scenario = references.scenarios[number]
    ask = paths[scenario.path]
    kind = f"library: {scenario.kind}"
    began = ledger.now()
    try:
        text = await ask(scenario.body, address)
    except ImportError:
        ledger.count(kind, "not installed")
        return
    except Exception as error:
        # Every library has its own tree of errors; one that a fault explains is no failure.
        is_excused = ledger.is_excused("errors", began, ledger.now()) or getattr(error, "status_code", 0) == 429
        ledger.count(kind, f"{type(error).__name__}")
        await asyncio.sleep(0.5)
        if not is_excused and not ledger.is_server_gone():
            ledger.fail("client library", f"{kind}: {type(error).__name__}: {str(error)[:300]}")
        return
    ledger.count(kind, "200")
    if number in references.answers:
        ledger.num_compared += 1
        expected = _text(references.answers[number][0])
        if text != expected:
            ledger.fail("wrong answer", f"{kind}: alone {expected!r}, by the library {text!r}")


def _text(choice: dict[str, Any]) -> str:
    if "parts" not in choice:
        return str(choice["text"])
    return "".join(part[1] for part in choice["parts"] if part[0] == "text")


async def _ask_openai(body: dict[str, Any], address: Address) -> str:
    from openai import AsyncOpenAI

    known = {"messages", "max_tokens", "temperature", "seed", "n", "stop", "tools", "tool_choice", "response_format"}
    given = {name: value for name, value in body.items() if name in known}
    extra = {name: value for name, value in body.items() if name not in known}
    url = f"http://{address.host}:{address.port}/v1"
    async with AsyncOpenAI(api_key=address.api_key or "none", base_url=url, max_retries=0, timeout=120) as client:
        reply = await client.chat.completions.create(model="pocket", **given, extra_body=extra)
        return reply.choices[0].message.content or ""


async def _ask_anthropic(body: dict[str, Any], address: Address) -> str:
    from anthropic import AsyncAnthropic

    url = f"http://{address.host}:{address.port}"
    known = {"messages", "max_tokens", "stop_sequences", "thinking", "tools", "tool_choice"}
    given = {name: value for name, value in body.items() if name in known}
    extra = {name: value for name, value in body.items() if name not in known}
    async with AsyncAnthropic(api_key=address.api_key or "none", base_url=url, max_retries=0, timeout=120) as client:
        async with client.messages.stream(**given | {"model": "pocket"}, extra_body=extra) as stream:
            message = await stream.get_final_message()
        return "".join(block.text for block in message.content if block.type == "text")
