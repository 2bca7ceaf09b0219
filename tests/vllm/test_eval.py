"""`onebox eval` holds onebox against vLLM's CPU build on the same weights: two engines, one model, no difference.

Needs vLLM's own environment: `make vllm-test` makes it and runs this.
"""

import json
import shlex
import socket
import subprocess
import time

import httpx
import pytest

from tests.vllm.test_bench import POCKET, PYTHON, launching

pytestmark = pytest.mark.vllm
PATIENCE_S = 600


@pytest.fixture
def vllm_url():
    assert PYTHON.exists(), f"{PYTHON} is not there: `make vllm-test` makes vLLM's environment first"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
    with subprocess.Popen(
        shlex.split(launching(port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while not is_healthy(url):
                assert process.poll() is None, "vLLM ended before it served"
                assert time.monotonic() < end, "vLLM did not come up"
                time.sleep(1)
            yield url
        finally:
            process.terminate()


def is_healthy(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


def test_onebox_and_vllm_are_one_model(run_cli, vllm_url, tmp_path):
    output = tmp_path / "eval.json"
    checks = ("--checks", "schema,keys,likelihood", "--count", "6", "--lengths", "512,4096", "--repeats", "1")
    result = run_cli("eval", POCKET, vllm_url, *checks, "--output", output)
    assert result.code == 0, result.out + result.err
    found = json.loads(output.read_text())
    first, second = (side["server"]["kind"] for side in found["sides"])
    assert (first, second) == ("onebox", "vllm")
    # vLLM was started with 2,048 tokens of context, onebox with all that the model has.
    assert list(found["sides"][1]["skipped"]) == ["keys at 4,096 tokens"]
    comparison = found["comparison"]
    assert comparison["outcome"] == "no difference seen"
    assert comparison["pairs"][-1]["num_pairs"] == 6 + 3
    assert comparison["texts"]["other_tokens"] == 0
    assert comparison["texts"]["divergence"]["high"] < 0.005
    assert comparison["texts"]["same_likeliest"]["low"] > 0.95
