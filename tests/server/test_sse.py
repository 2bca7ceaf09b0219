"""One stream under all dialects: items keep their order, silence sends heartbeats, and no client is disturbed."""

import asyncio
import contextlib
import gc
from contextlib import contextmanager

import anthropic
import openai
import pytest

from onebox.server.app import create_app
from onebox.server.settings import ServerSettings
from onebox.server.sse import COMMENT, EventStream, merged
from tests.server.conftest import listening

QUESTION = [{"role": "user", "content": "Hi"}]
PING = 'event: ping\ndata: {"type": "ping"}\n\n'
NEVER_S = 3600


async def counted(gate, fails=False):
    yield 1
    await gate.wait()
    yield 2
    if fails:
        raise ValueError("it broke")


def open_gate():
    gate = asyncio.Event()
    gate.set()
    return gate


def test_silence_gives_heartbeats_and_no_item_is_lost():
    async def read():
        gate, seen = asyncio.Event(), []
        async for item in merged([counted(gate)], 0.001):
            seen.append(item)
            if seen.count(None) == 3:
                gate.set()
        return seen

    seen = asyncio.run(asyncio.wait_for(read(), 60))
    assert [item for item in seen if item is not None] == [(0, 1), (0, 2), (0, None)]
    assert seen[1:4] == [None] * 3


def test_items_of_several_streams_come_with_the_place_of_their_stream():
    async def read():
        return [item async for item in merged([counted(open_gate()), counted(open_gate())], NEVER_S)]

    seen = asyncio.run(read())
    for place in (0, 1):
        assert [item for item in seen if item[0] == place] == [(place, 1), (place, 2), (place, None)]


def test_a_stream_is_not_read_ahead_of_its_reader():
    async def read():
        given = []

        async def numbers():
            for number in range(3):
                given.append(number)
                yield number

        async for _, number in merged([numbers()], NEVER_S):
            await asyncio.sleep(0)
            assert number is None or given[-1] == number

    asyncio.run(read())


def test_an_error_comes_after_all_items_before_it():
    async def read():
        items = merged([counted(open_gate(), fails=True)], NEVER_S)
        assert [await anext(items), await anext(items)] == [(0, 1), (0, 2)]
        await anext(items)

    with pytest.raises(ValueError, match="it broke"):
        asyncio.run(read())


def test_a_reader_that_stops_ends_its_streams():
    async def read():
        ended = asyncio.Event()

        async def endless():
            try:
                while True:
                    await asyncio.sleep(0)
                    yield 1
            finally:
                ended.set()

        items = merged([endless()], NEVER_S)
        await anext(items)
        await items.aclose()
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(read())


def test_an_error_after_the_reader_has_stopped_is_not_logged(caplog):
    async def failing(failed):
        failed.set()
        raise ValueError("it broke")
        yield

    async def read():
        failed = asyncio.Event()
        items = merged([counted(open_gate()), failing(failed)], NEVER_S)
        await anext(items)
        await failed.wait()
        await items.aclose()

    asyncio.run(read())
    gc.collect()
    assert "never retrieved" not in caplog.text


class Tap:
    """An application in front of another that records what it sends; three heartbeats open the engine's gate."""

    def __init__(self, server, heartbeat):
        self.sent = ""
        self._app = create_app(server.service, ServerSettings(heartbeat_s=0.01))
        self._heartbeat = heartbeat
        self._gate = server.runner.gate
        self._gate.clear()

    async def __call__(self, scope, receive, send):
        async def record(message):
            await send(message)
            self.sent += message.get("body", b"").decode()
            if self.sent.count(self._heartbeat) >= 3:
                self._gate.set()

        await self._app(scope, receive, record)


@contextmanager
def openai_of(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(url):
    options = {"model": "tiny", "messages": QUESTION, "reasoning_effort": "none", "stream": True}
    with openai_of(url) as client:
        return "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options))


def completion(url):
    with openai_of(url) as client:
        chunks = client.completions.create(model="tiny", prompt="Hi", stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)


def response(url):
    options = {"model": "tiny", "input": "Hi", "reasoning": {"effort": "none"}}
    with openai_of(url) as client, client.responses.stream(**options) as stream:
        return stream.get_final_response().output_text


def message(url):
    options = {"model": "tiny", "max_tokens": 5, "messages": QUESTION}
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
        client.messages.stream(**options) as stream,
    ):
        return stream.get_final_text()


@pytest.mark.parametrize(
    ("ask", "heartbeat", "is_first"),
    [(chat, COMMENT, True), (completion, COMMENT, True), (response, COMMENT, False), (message, PING, False)],
)
def test_heartbeats_during_a_long_prefill_do_not_disturb_the_official_client(scripted, ask, heartbeat, is_first):
    tap = Tap(scripted("ok"), heartbeat)
    with listening(tap) as url:
        assert ask(url) == "ok"
    before, found, _ = tap.sent.partition('"o"')
    assert found
    assert before.count(heartbeat) >= 3
    # Clients that measure take the first data of chats and completions for the end of the prompt.
    assert tap.sent.startswith(heartbeat * 3) == is_first


def test_several_choices_share_one_stream_with_heartbeats(scripted):
    tap, texts = Tap(scripted("ok"), COMMENT), {0: "", 1: ""}
    with listening(tap) as url, openai_of(url) as client:
        for chunk in client.completions.create(model="tiny", prompt="Hi", n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "ok", 1: "ok"}
    assert tap.sent.startswith(COMMENT * 3)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_a_stream_whose_client_is_gone_leaves_no_reader_behind(spec_version):
    ended = []

    async def endless():
        try:
            while True:
                yield "data: x\n\n"
        finally:
            ended.append(True)

    async def events():
        async with contextlib.aclosing(merged([endless(), endless()], heartbeat_s=60)) as items:
            async for item in items:
                yield item[1]

    async def leave_in_the_middle():
        sent = []

        async def send(message):
            sent.append(message)
            if len(sent) > 3:
                raise OSError

        async def receive():
            await asyncio.Event().wait()

        # Before version 2.4 the error of a lost connection is the server's own to handle.
        with contextlib.suppress(OSError, ExceptionGroup):
            await EventStream(events())({"type": "http", "asgi": {"spec_version": spec_version}}, receive, send)
        return len(asyncio.all_tasks())

    assert asyncio.run(asyncio.wait_for(leave_in_the_middle(), 60)) <= 2
    assert ended == [True, True]
