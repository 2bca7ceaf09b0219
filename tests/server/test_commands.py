"""`onebox serve` as a process: launch commands posted for vLLM run with the name replaced, and signals stop it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.engine.remote.processes import stop_threads
from tests.server.conftest import wait_until
from tests.server.launching import launched, started

# As posted (shared by users of a DGX Spark), but for the port, the host and the model's path.
COMMANDS = {
    "int4, whole context": (
        "--max-model-len 262144 --gpu-memory-utilization 0.85 --load-format fastsafetensors --enable-prefix-caching "
        "--enable-auto-tool-choice --tool-call-parser qwen3_xml --reasoning-parser qwen3 --max-num-batched-tokens 8192 "
        "--trust-remote-code --chat-template {template}"
    ),
    "nvfp4 with mtp": (
        "--served-model-name qwen35-122b-nvfp4 --max-model-len 131072 --max-num-seqs 4 --max-num-batched-tokens 8192 "
        "--gpu-memory-utilization 0.90 --kv-cache-dtype fp8 --enable-prefix-caching --trust-remote-code "
        "--enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3 "
        '--speculative-config {{"method":"mtp","num_speculative_tokens":2}} '
        '--default-chat-template-kwargs {{"enable_thinking":false}}'
    ),
    # The model card's, to which the length of the tiny model's own pages is added.
    "a million tokens": (
        '--hf-overrides {{"text_config":{{"rope_parameters":{{"mrope_interleaved":true,"mrope_section":[11,11,10],'
        '"rope_type":"yarn","rope_theta":10000000,"partial_rotary_factor":0.25,"factor":4.0,'
        '"original_max_position_embeddings":262144}}}}}} --max-model-len 1010000 --kv-cache-memory-bytes 3000000000'
    ),
}


@pytest.fixture(scope="module")
def long_checkpoint(checkpoint, tmp_path_factory):
    """The tiny model with the positions of the large one."""
    target = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(checkpoint, target)
    config = json.loads((target / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 262144
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", COMMANDS)
def test_a_posted_launch_command_serves(long_checkpoint, name):
    flags = COMMANDS[name].format(template=long_checkpoint / "chat_template.jinja").split()
    with launched(str(long_checkpoint), *flags, "--device", "cpu") as url:
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["max_model_len"] == int(flags[flags.index("--max-model-len") + 1])
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4


LIMITS = ("--max-model-len", "2000", "--kv-cache-memory-bytes", "16000000", "--log-stats-interval", "3600")
"""No line of statistics, however long an answer takes."""


def long_answer(url, max_tokens):
    body = {"prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    key = {"Authorization": "Bearer sk-one"}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=120)


@contextlib.contextmanager
def held(process):
    """The server's engine stands still."""
    tasks = Path(f"/proc/{process.pid}/task")
    children = [int(pid) for path in tasks.glob("*/children") for pid in path.read_text().split()]
    (engine,) = [pid for pid in children if b"engine.remote.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    stop_threads(engine)
    try:
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_answers_finish_and_takes_no_new_ones(checkpoint, stop):
    options = (checkpoint, *LIMITS, "--shutdown-timeout", "100", "--api-key", "sk-one", "--metrics-port", "0")
    with started(*options, stderr=subprocess.PIPE) as (process, url), long_answer(url, 400) as answer:
        lines = answer.iter_lines()
        next(lines)
        metrics_url = re.search(r"metrics for everybody at (\S+)", process.ready_line).group(1)
        with held(process):
            process.send_signal(stop)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"})
            # Scrapers see the end of it too.
            assert "vllm:num_requests_running" in httpx.get(metrics_url).text
        rest = "".join(lines)
        out, err = process.communicate(timeout=60)
    with pytest.raises(httpx.ConnectError):
        httpx.get(metrics_url)
    assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
    assert rest.endswith("data: [DONE]")
    assert '"finish_reason": "length"' in rest
    assert (process.returncode, out) == (0, "Stopped.\n")
    assert all(" INFO onebox.server.request_log: POST /v1/completions " in line for line in err.splitlines())


def test_a_second_signal_stops_at_once(checkpoint):
    with started(checkpoint, *LIMITS, stderr=subprocess.PIPE) as (process, url), long_answer(url, 1500) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.send_signal(signal.SIGTERM)
        rest = ""
        with contextlib.suppress(httpx.RemoteProtocolError):
            rest = "".join(lines)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "Stopped.\n")
    assert '"finish_reason": "length"' not in rest
