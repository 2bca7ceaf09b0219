import asyncio
import json
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from onebox.engine.api import Engine, EngineConfig, EngineOptions, TokenInfo, plan_engine, start_engine
from onebox.server.app import create_app
from onebox.server.complete import Service
from onebox.server.run import bind
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from onebox.text.vocabulary import token_table
from tests.engine.scripted import ScriptedRunner


class Client:
    """The application in process. `requests` are those that reached the engine."""

    def __init__(self, service, settings=None):
        self.service = service
        self.app = create_app(service, settings)
        self.requests = []
        submit_all = service.engine.submit_all
        service.engine.submit_all = lambda requests: (self.requests.extend(requests), submit_all(requests))[1]

    @property
    def sampling(self):
        return [request.sampling for request in self.requests]

    def request(self, method, path, *, json_body=None, **options):
        if json_body is not None:
            options = {"content": json.dumps(json_body), "headers": {"content-type": "application/json"}}

        async def send():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://onebox") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def chat(self, text="Hi", **fields):
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.request("POST", "/v1/chat/completions", json_body=body)

    def complete(self, prompt="Hi", **fields):
        return self.request("POST", "/v1/completions", json_body={"prompt": prompt, **fields})


def events(response):
    """The JSON of a stream's events; the end mark is checked and left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="session")
def make_service(checkpoint, tokenizer):
    template, defaults = ChatTemplate.load(checkpoint), GenerationDefaults.load(checkpoint)

    def make(runner, **limits):
        limits = {"max_model_len": 400, "num_pages": 60, "eos_token_ids": defaults.eos_token_ids, **limits}
        engine = Engine(runner, EngineConfig(**limits), token_table(tokenizer, defaults.eos_token_ids))
        return Service(engine, tokenizer, template, defaults, "tiny")

    return make


@pytest.fixture
def scripted(make_service, tokenizer):
    """A client of an engine that says the given text and ends its turn; `client.runner` can be held at its gate."""
    made = []

    def make(text, fails_on=None, **limits):
        runner = ScriptedRunner(tokenizer.encode(text + "<|im_end|>"), fails_on)
        client = Client(make_service(runner, **limits))
        client.runner = runner
        made.append(client)
        return client

    yield make
    for client in made:
        client.runner.gate.set()
        client.service.engine.close()


@pytest.fixture(scope="session")
def tiny(checkpoint, tokenizer):
    """A client of the tiny random model."""
    template, defaults = ChatTemplate.load(checkpoint), GenerationDefaults.load(checkpoint)
    eos_token_ids = defaults.eos_token_ids
    vocabulary = TokenInfo(eos_token_ids, tokenizer.message_token_ids, token_table(tokenizer, eos_token_ids))
    options = EngineOptions(max_model_len=1200, kv_cache_memory_bytes=16 << 20)
    engine = start_engine(plan_engine(checkpoint, options, vocabulary), vocabulary)
    with engine:
        yield Client(Service(engine, tokenizer, template, defaults, "tiny"))


def wait_until(condition):
    """Waits for what must come; the limit is only there so that a defect does not wait for ever."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.005)


@contextmanager
def listening(app):
    """The application on a free port of this machine, over real sockets; gives its URL."""
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
