"""A stream that is silent for long shows a sign of life, and is otherwise as it was."""

import asyncio
import gc

import httpx
import pytest

from onebox.server.heartbeat import with_silences
from tests.server.test_anthropic import talking as talking


async def counted(gate, fails=False):
    yield 1
    await gate.wait()
    yield 2
    if fails:
        raise ValueError("it broke")


def test_a_silence_is_told_and_nothing_is_lost():
    async def read():
        gate, seen = asyncio.Event(), []
        async for item in with_silences(counted(gate), silence_s=0.001):
            seen.append(item)
            if seen.count(None) == 3:
                gate.set()
        return seen

    seen = asyncio.run(read())
    assert [item for item in seen if item is not None] == [1, 2]
    assert seen[1:4] == [None] * 3


def test_an_error_comes_after_all_that_came_before_it():
    async def read():
        gate = asyncio.Event()
        gate.set()
        items = with_silences(counted(gate, fails=True))
        assert [await anext(items), await anext(items)] == [1, 2]
        await anext(items)

    with pytest.raises(ValueError, match="it broke"):
        asyncio.run(read())


def test_whoever_stops_reading_ends_the_source():
    ended = []

    async def endless():
        try:
            while True:
                await asyncio.sleep(0)
                yield 1
        finally:
            ended.append(True)

    async def read():
        items = with_silences(endless())
        await anext(items)
        await items.aclose()
        await asyncio.sleep(0.01)

    asyncio.run(read())
    assert ended


def test_an_error_that_nobody_waits_for_is_not_logged(caplog):
    async def read():
        gate = asyncio.Event()
        gate.set()
        items = with_silences(counted(gate, fails=True))
        await anext(items)
        await asyncio.sleep(0.01)
        await items.aclose()

    asyncio.run(read())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_agent_that_waits_for_a_long_prompt_is_sent_pings(talking, monkeypatch):
    monkeypatch.setattr("onebox.server.heartbeat.SILENCE_S", 0.01)
    client = talking("ok")
    client.server.runner.gate.clear()
    names = []
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    # The official client keeps pings to itself.
    with httpx.stream("POST", f"{client.base_url}/v1/messages", json=body) as response:
        for line in response.iter_lines():
            names += [line.removeprefix("event: ")] if line.startswith("event: ") else []
            if names.count("ping") == 3:
                client.server.runner.gate.set()
    assert names[:4] == ["message_start", "ping", "ping", "ping"]
    assert names[-1] == "message_stop"
