"""Agents and clients that people use, unchanged and with their defaults, against `onebox serve` (docs/clients.md).

They need an environment of their own: `make conformance-test` makes it.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.server.launching import started

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-conformance"
POCKET = ROOT / "onebox" / "pocket" / "model"
pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, file with its log): the agents' own prompts have up to 25,000 tokens of this tokenizer."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    limits = ("--max-model-len", "32768", "--kv-cache-memory-bytes", "400000000")
    with log.open("w") as file, started(POCKET, "--served-model-name", "pocket", *limits, stderr=file) as (_, url):
        yield url, log


def said(command, home, **variables):
    """What a client printed; its home is empty, so that it has its defaults."""
    assert Path(command[0]).exists(), f"{command[0]} is not there: `make conformance-test` makes it first"
    environment = {**os.environ, "HOME": str(home), "OPENAI_API_KEY": "none", **variables}
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def last_line(log):
    return [line for line in log.read_text().splitlines() if "request_log" in line][-1]


def test_codex_with_its_default_model_and_tools(server, tmp_path):
    url, log = server
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(
        f'model_provider = "onebox"\n[model_providers.onebox]\nname = "onebox"\nbase_url = "{url}/v1"\n'
        'wire_api = "responses"\n'
    )
    command = [CLIENTS / "npm/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "Say hi"]
    assert said(command, tmp_path).strip()
    assert "POST /v1/responses 200" in last_line(log)
    assert "is an alias of pocket" in last_line(log)
    assert said([*command[:2], "-m", "pocket", *command[2:]], tmp_path).strip()
    assert "'web_search' were left out" in last_line(log)


def test_claude_code_without_a_models_name(server, tmp_path):
    url, log = server
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    assert said([CLIENTS / "npm/node_modules/.bin/claude", "-p", "Say hi"], tmp_path, **variables).strip()
    assert "POST /v1/messages 200" in last_line(log)


def test_llm(server, tmp_path):
    url, _ = server
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: onebox\n  model_name: pocket\n  api_base: {url}/v1\n  can_stream: true\n"
    )
    command = [CLIENTS / "bin/llm", "-m", "onebox", "-o", "max_tokens", "200", "Say hi"]
    assert said(command, tmp_path, LLM_USER_PATH=str(tmp_path)).strip()


@pytest.mark.parametrize(
    "program",
    [
        "import litellm; print(litellm.completion(model='openai/pocket', api_base=URL, api_key='none', max_tokens=50, "
        "messages=[{'role': 'user', 'content': 'Hi'}]).choices[0].message.content)",
        "from langchain_openai import ChatOpenAI; print(ChatOpenAI(model='pocket', base_url=URL, api_key='none', "
        "max_tokens=50).invoke('Hi').content)",
    ],
    ids=["litellm", "langchain"],
)
def test_libraries(server, tmp_path, program):
    url, _ = server
    assert said([CLIENTS / "bin/python", "-c", f"URL = '{url}/v1'\n{program}"], tmp_path).strip()


def test_aider(server, tmp_path):
    url, log = server
    (tmp_path / "hi.py").write_text("print('hi')\n")
    flags = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable")
    command = [CLIENTS / "aider/bin/aider", "--model", "openai/pocket", "--openai-api-base", f"{url}/v1", *flags]
    said([*command, "--message", "Say hi", "hi.py"], tmp_path)
    assert "POST /v1/chat/completions 200" in last_line(log)
