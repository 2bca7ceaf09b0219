"""Launch commands that people posted for vLLM run with its name replaced, and say what has no meaning here."""

import json
import shutil

import httpx
import pytest

from tests.server.launching import launched

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
