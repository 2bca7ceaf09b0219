"""`onebox bench` against a server that we did not write: vLLM's CPU build, which it starts, times, measures and stops.

Needs vLLM's own environment: `make vllm-test` makes it and runs this.
"""

import shlex
import socket
from pathlib import Path

import pytest

from onebox.bench.record import Role, read_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
POCKET = ROOT / "onebox" / "pocket" / "model"
pytestmark = pytest.mark.vllm


def launching(port: int) -> str:
    settings = [
        f"PYTHONPATH={HERE / 'shim'}",
        "VLLM_CPU_KVCACHE_SPACE=1",
        "VLLM_ENABLE_V1_MULTIPROCESSING=0",
        "HF_HUB_OFFLINE=1",
    ]
    flags = {
        "--model": POCKET,
        "--served-model-name": "pocket",
        "--port": port,
        "--host": "127.0.0.1",
        "--dtype": "bfloat16",
        "--max-model-len": 2048,
        "--max-num-seqs": 4,
        "--distributed-executor-backend": "uni",
        "--default-chat-template-kwargs": '{"enable_thinking": false}',
    }
    words = ["env", *settings, PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    words += [word for flag in flags.items() for word in flag]
    return shlex.join(map(str, [*words, "--enforce-eager", "--language-model-only"]))


def test_vllm_is_started_measured_and_stopped_as_onebox_is(run_cli, tmp_path):
    assert PYTHON.exists(), f"{PYTHON} is not there: `make vllm-test` makes vLLM's environment first"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    record = tmp_path / "vllm.json"
    options = ("--workloads", "qa,docai-kie,rag-8k,vision", "--mixes", "uniform_short", "--count", "8", "--runs", "2")
    place = ("--url", f"127.0.0.1:{port}", "--output", record)
    result = run_cli("bench", "run", *options, *place, "--launch", launching(port))
    assert result.code == 0, result.out + result.err
    run = read_run(record)
    assert (run.server.kind, run.server.tokenizer, run.server.gives_token_ids) == ("vllm", "vllm", True)
    assert run.server.max_model_len == 2048
    assert list(run.startup_s)[-3:] == ["listening", "healthy", "first token"]
    qa, kie, rag, vision, mix = run.workloads
    assert vision.skipped == "the server takes no images"
    assert {request.prompt_tokens for request in qa.requests} == {64}
    assert {request.prompt_tokens for request in kie.requests} == {512}
    assert {request.prompt_tokens for request in rag.requests} == {2048 - 256}
    assert "the context holds 2,048" in rag.notes[0]
    assert mix.figures["completed"] == 8
    # Tokens are those that came, not the chunks that brought them.
    for request in qa.measured + kie.measured:
        assert 0 <= request.completion_tokens - sum(request.arrival_tokens) <= 2
    assert all(request.first_s for request in qa.requests if request.role is Role.COLD)
