"""Over real sockets: the official client against the tiny model, clients that leave, and the command itself."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import openai
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
    assert (reason, chunk.usage) == (whole.choices[0].finish_reason, whole.usage)
    assert message.content or message.reasoning_content


def test_the_official_client_understands_refusals(client):
    with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
        client.completions.create(model="tiny", prompt="x", logit_bias={"1": 1})
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="x")
    assert [model.id for model in client.models.list()] == ["tiny"]


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
    assert engine.stats().completion_tokens < 300


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_the_random_model_and_stops_cleanly(stop, tmp_path):
    command = [sys.executable, "-m", "onebox.cli.main", "serve", "--port", "0", "--max-model-len", "2000"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Ready"):
                break
        said = "".join(lines)
        assert "its words mean nothing" in said
        base = re.search(r"tiny-random at (http\S+)", said).group(1)
        with httpx.stream(
            "POST", f"{base}/completions", json={"prompt": "Hi", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(stop)
            rest = "".join(lines)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "Stopped.\n", "")
    assert "The engine was closed before this request was done" in rest


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
