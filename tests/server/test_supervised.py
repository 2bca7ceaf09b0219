"""The server outlives its engine: requests fail with a reason, and the next ones are served."""

import asyncio
import json
import os
import signal

import httpx
import pytest

from onebox.engine.api import CheckpointStarter, EngineOptions, EngineProcess, RestartPolicy, TokenInfo
from onebox.server.app import create_app
from onebox.server.service import Service
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from tests.server.conftest import listening, wait_until

NUM_STREAMS = 4
LONG = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def supervised(checkpoint, tokenizer):
    """(URL, engine): the application over the tiny random model in a process of its own, with six places in all."""
    defaults = GenerationDefaults.load(checkpoint)
    options = EngineOptions(max_model_len=4000, kv_cache_memory_bytes=32 << 20, max_num_seqs=4, max_num_waiting=2)
    opening = CheckpointStarter(checkpoint, options, TokenInfo(defaults.eos_token_ids), num_threads=1)
    with EngineProcess(opening, policy=RestartPolicy(first_wait_s=1)) as engine:
        engine.wait_ready()
        service = Service(engine, tokenizer, ChatTemplate.load(checkpoint), defaults, "tiny")
        with listening(create_app(service)) as url:
            yield url, engine


async def read_until_killed(url, engine):
    """Opens streams, kills the engine once all of them run, and reads them to their ends: the events of each."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        running = asyncio.Semaphore(0)

        async def read():
            async with client.stream("POST", "/v1/completions", json=LONG) as response:
                lines = []
                async for line in response.aiter_lines():
                    if len(lines) == 2:
                        running.release()
                    lines += [line] if line else []
                return lines

        streams = [asyncio.ensure_future(read()) for _ in range(NUM_STREAMS)]
        for _ in streams:
            await running.acquire()
        os.kill(engine.pid, signal.SIGKILL)
        return await asyncio.gather(*streams)


def test_an_engine_killed_under_load_fails_its_streams_clearly_and_serves_again(supervised):
    url, engine = supervised
    assert httpx.get(f"{url}/health").status_code == 200
    ends = asyncio.run(asyncio.wait_for(read_until_killed(url, engine), 120))
    for lines in ends:
        *_, last, mark = lines if lines[-1] == "data: [DONE]" else [*lines, ""]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "The engine died before this request was done: its process was killed by SIGKILL."
        assert mark in ("data: [DONE]", "")
    wait_until(lambda: not engine.stats().is_alive)
    assert httpx.get(f"{url}/health").status_code == 503
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "is restarting; try again in a moment." in refused.json()["error"]["message"]
    wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
    served = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2, "ignore_eos": True})
    assert served.json()["usage"]["completion_tokens"] == 2


def test_a_full_queue_is_429_with_a_time_to_come_back_and_leaving_frees_the_places(supervised):
    url, engine = supervised

    async def overload():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            streams = [asyncio.ensure_future(client.post("/v1/completions", json=LONG)) for _ in range(6)]
            while len(engine._open) < 6:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/completions", json=LONG)
            for stream in streams:
                stream.cancel()
            return refused

    refused = asyncio.run(asyncio.wait_for(overload(), 120))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "Of 6 places for requests 6 are taken" in refused.json()["error"]["message"]
    wait_until(lambda: not engine._open)
    wait_until(lambda: (engine.stats().num_running, engine.stats().num_waiting) == (0, 0))
