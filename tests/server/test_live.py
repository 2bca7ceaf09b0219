"""Over real sockets: the official client against the tiny model, clients that leave, and the command itself."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from onebox.server.run import bind
from onebox.spec.errors import OneboxError
from tests.server.conftest import listening, wait_until

QUESTION = [{"role": "user", "content": "What is 6 × 7?"}]


@pytest.fixture(scope="module")
def url(tiny):
    with listening(tiny.app) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_gets_the_same_bytes_streamed_and_whole(client):
    options = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 80}
    whole = client.chat.completions.create(**options)
    reasoning = content = ""
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            content += chunk.choices[0].delta.content or ""
            reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            reason = chunk.choices[0].finish_reason
    message = whole.choices[0].message
    assert content.encode() == message.content.encode()
    assert reasoning.encode() == (message.reasoning_content or "").encode()
    assert (reason, chunk.usage.total_tokens) == (whole.choices[0].finish_reason, whole.usage.total_tokens)
    assert message.content or message.reasoning_content


def test_the_official_client_understands_refusals(client):
    with pytest.raises(openai.BadRequestError, match="suffix is not supported") as error:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert error.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="context holds 1200") as error:
        client.completions.create(model="tiny", prompt="x", max_tokens=1200)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="x")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_the_official_client_calls_tools_and_streams_them(client):
    pick = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
    options = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [{"type": "function", "function": {"name": "pick", "parameters": pick}}],
        "tool_choice": {"type": "function", "function": {"name": "pick"}},
        "reasoning_effort": "none",
        "seed": 4,
    }
    (whole,) = client.chat.completions.create(**options).choices[0].message.tool_calls
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (whole.function.name, whole.type) == ("pick", "function")
    assert json.loads(whole.function.arguments)["side"] in ("left", "right")
    assert streamed.function.arguments == whole.function.arguments


class Verdict(pydantic.BaseModel):
    side: Literal["left", "right"]
    is_sure: bool


def test_the_official_client_parses_answers_into_its_own_models(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Verdict, reasoning_effort="none", seed=4
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_the_official_client_reads_logprobs_choices_and_echo(client):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, n=2, seed=1, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2, 2, 2]
    answer = client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=2, echo=True, logprobs=1)
    for prompt, choice in zip(("ab", "c"), answer.choices, strict=True):
        assert choice.text.startswith(prompt)
        assert len(choice.logprobs.tokens) == len(prompt) + 2
        assert choice.logprobs.token_logprobs[0] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_its_slot(scripted, stream):
    client = scripted("x" * 300, max_num_seqs=1)
    engine = client.service.engine
    client.runner.gate.clear()
    with listening(client.app) as url:
        address = (httpx.URL(url).host, httpx.URL(url).port)
        body = json.dumps({"prompt": "Hi", "max_tokens": 300, "stream": stream})
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        with socket.create_connection(address) as connection:
            connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: engine._open)
        wait_until(lambda: engine._aborted or not engine._open)
        client.runner.gate.set()
        wait_until(lambda: not engine._open)
    assert engine.stats().totals.completion_tokens < 300


@contextmanager
def serving(checkpoint, *flags):
    """`onebox serve` as a process of its own: (the process, the API's address)."""
    command = [sys.executable, "-m", "onebox.cli.main", "serve", str(checkpoint), "--port", "0", *flags]
    with subprocess.Popen(
        [*command, "--max-model-len", "2000", "--kv-cache-memory-bytes", "16000000"],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            ready = next(line for line in process.stdout if line.startswith("Ready"))
            yield process, re.search(r"at (http\S+/v1)", ready).group(1)
        finally:
            process.kill()


def long_answer(base):
    body = {"prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{base}/completions", json=body, timeout=120)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_answers_finish_and_takes_no_new_ones(checkpoint, stop):
    with serving(checkpoint, "--shutdown-timeout", "100") as (process, base), long_answer(base) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(stop)
        wait_until(lambda: httpx.get(base.removesuffix("/v1") + "/health").status_code == 503)
        refused = httpx.post(f"{base}/completions", json={"prompt": "Hi"})
        rest = "".join(lines)
        out, err = process.communicate(timeout=60)
    assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
    assert rest.endswith("data: [DONE]")
    assert '"finish_reason": "length"' in rest
    assert (process.returncode, out, err) == (0, "Stopped.\n", "")


def test_a_second_signal_stops_at_once(checkpoint):
    with serving(checkpoint) as (process, base), long_answer(base) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(base.removesuffix("/v1") + "/health").status_code == 503)
        process.send_signal(signal.SIGTERM)
        rest = ""
        with contextlib.suppress(httpx.RemoteProtocolError):
            rest = "".join(lines)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "Stopped.\n")
    assert '"finish_reason": "length"' not in rest


def test_the_server_and_the_door_to_the_engine_load_no_torch():
    check = "import sys, onebox.server.app, onebox.engine.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_port_in_use_is_one_sentence():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OneboxError, match=rf"Port {port} on 127\.0\.0\.1 cannot be had .*--port") as error:
            bind("127.0.0.1", port)
    assert error.value.exit_code == 1
