"""The application in process and over sockets, on a scripted engine, the tiny random model, or one that sees."""

import asyncio
import json
import threading
import time
from contextlib import ExitStack, contextmanager

import anthropic
import httpx
import openai
import pytest
import uvicorn

from onebox.engine.api import (
    Engine,
    EngineConfig,
    EngineOptions,
    LogprobRows,
    TokenInfo,
    TokenLogprob,
    plan_engine,
    start_engine,
)
from onebox.server.app import create_app
from onebox.server.fetch import FetchLimits
from onebox.server.media import Media, MediaLimits
from onebox.server.run import bind
from onebox.server.service import Service
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from onebox.text.vocabulary import token_table
from tests.engine.scripted import ScriptedRunner


class LogprobRunner(ScriptedRunner):
    """With log-probabilities of what it says and of its prompts."""

    def _chunk(self, chunk):
        result = super()._chunk(chunk)
        following = [*chunk.token_ids[1:], *([] if chunk.following is None else [chunk.following])]
        rows = [self._logprob(token_id) for token_id in following]
        told = LogprobRows.pack(rows) if chunk.prompt_logprobs is not None else ()
        return result._replace(logprobs=self._told(chunk.draw, result), prompt_logprobs=told)

    def _rows(self, rows):
        result = super()._rows(rows)
        return result._replace(logprobs=self._told(rows.draw, result))

    def _told(self, draw, result):
        is_asked = draw is not None and draw.sampling.logprobs is not None
        return tuple(map(self._logprob, result.token_ids)) if is_asked else ()

    def _logprob(self, token_id):
        return TokenLogprob(token_id, -0.5, 1, ((token_id, -0.5), (token_id + 1, -float("inf"))))


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
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
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


@pytest.fixture
def served(scripted):
    """Like `scripted`, but on a port of this machine: (that client, the URL)."""
    with ExitStack() as stack:

        def make(text, settings=None, **limits):
            server = scripted(text, **{"max_model_len": 3000, "num_pages": 300, **limits})
            url = stack.enter_context(listening(create_app(server.service, settings)))
            # Before the port is closed, which waits for open streams.
            stack.callback(server.runner.gate.set)
            return server, url

        yield make


def official_clients(served, open_client):
    """Makes official clients of servers that answer with a given text; `.server` is the same server in process."""
    with ExitStack() as stack:

        def make(text, settings=None, **limits):
            server, url = served(text, settings, **limits)
            client = stack.enter_context(open_client(url))
            client.server = server
            return client

        yield make


@pytest.fixture
def openai_client(served):
    yield from official_clients(
        served, lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    )


@pytest.fixture
def anthropic_client(served):
    yield from official_clients(
        served, lambda url: anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
    )


def start_model(directory, tokenizer, **options):
    """(engine, defaults) of a checkpoint on the CPU."""
    defaults = GenerationDefaults.load(directory)
    eos_token_ids = defaults.eos_token_ids
    vocabulary = TokenInfo(eos_token_ids, tokenizer.message_token_ids, token_table(tokenizer, eos_token_ids))
    options = EngineOptions(kv_cache_memory_bytes=16 << 20, **options)
    return start_engine(plan_engine(directory, options, vocabulary), vocabulary), defaults


@pytest.fixture(scope="session")
def tiny(checkpoint, tokenizer):
    """A client of the tiny random model."""
    engine, defaults = start_model(checkpoint, tokenizer, max_model_len=1200)
    with engine:
        yield Client(Service(engine, tokenizer, ChatTemplate.load(checkpoint), defaults, "tiny"))


@pytest.fixture(scope="session")
def vision_checkpoint(tmp_path_factory):
    """A tiny random model with a vision tower and its processor files."""
    from onebox.model.random_text import text_files
    from tests.model.test_vision import case, save
    from tests.text.test_patches import write_processors

    target = tmp_path_factory.mktemp("vision")
    save(target, case()[1])
    write_processors(target)
    for name, text in text_files().items():
        (target / name).write_text(text)
    return target


@pytest.fixture(scope="session")
def vision_engine(vision_checkpoint, tokenizer):
    engine, _ = start_model(vision_checkpoint, tokenizer, device="cpu", max_model_len=700, max_num_batched_tokens=64)
    with engine:
        yield engine


@pytest.fixture
def vision_client(vision_checkpoint, vision_engine, tokenizer):
    """A client of that model, with small limits for images."""
    template, defaults = ChatTemplate.load(vision_checkpoint), GenerationDefaults.load(vision_checkpoint)
    limits = MediaLimits(max_images=3, max_videos=1, fetch=FetchLimits(max_bytes=200_000, timeout_s=5))
    media = Media.open(vision_checkpoint, limits, has_tower=True)
    return Client(Service(vision_engine, tokenizer, template, defaults, "tiny", media=media))


def wait_until(condition):
    """Waits for what must come; the limit is only there so that a defect does not wait for ever."""
    limit = time.monotonic() + 120
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
