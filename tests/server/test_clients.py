"""Agents and clients that people use, unchanged and with their defaults, against `onebox serve` (docs/clients.md).

They need environments of their own: `make conformance-test` makes them. Each chats with the pocket model; those with
tools also do a task with a model that is certain to call one (`agent.py`), and what the tool did is looked at.
"""

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.server.agent import agent_server, tool_call
from tests.server.conftest import wait_until
from tests.server.launching import started

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-conformance"
NPM = CLIENTS / "npm" / "node_modules" / ".bin"
POCKET = ROOT / "onebox" / "pocket" / "model"
TASK = "Write 4217 into made.txt"
COMMAND = "echo 4217 > made.txt"
DONE = "The file is written."
LIMIT_S = 900
"""Prompts of 25,000 tokens on a busy machine."""
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
    done = subprocess.run(
        list(map(str, command)),
        env=environment(home, **variables),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def environment(home, **variables):
    ours = {"HOME": str(home), "PWD": str(home), "OPENAI_API_KEY": "none"}
    return {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **ours, **variables}


def last_line(log):
    return [line for line in log.read_text().splitlines() if "request_log" in line][-1]


def check_task(runner, home, output):
    """The client ran the tool once, told its model the result and showed what the model said to that."""
    assert (home / "made.txt").read_text() == "4217\n"
    assert DONE in output
    results = [prompt for prompt in runner.prompts if "<tool_response>" in prompt.rpartition("<|im_start|>user\n")[2]]
    assert len(results) == 1


# Codex CLI


def codex(url, home, *arguments):
    (home / ".codex").mkdir(exist_ok=True)
    (home / ".codex" / "config.toml").write_text(
        f'model_provider = "onebox"\n[model_providers.onebox]\nname = "onebox"\nbase_url = "{url}/v1"\n'
        'wire_api = "responses"\n'
    )
    return said([NPM / "codex", "exec", "--skip-git-repo-check", *arguments], home)


def test_codex_with_its_default_model_and_tools(server, tmp_path):
    url, log = server
    assert codex(url, tmp_path, "Say hi").strip()
    assert "POST /v1/responses 200" in last_line(log)
    assert "is an alias of pocket" in last_line(log)
    assert codex(url, tmp_path, "-m", "pocket", "Say hi").strip()
    assert "'web_search' were left out" in last_line(log)


def test_codex_runs_a_command(tmp_path):
    with agent_server(tool_call("exec_command", cmd=COMMAND), DONE) as (runner, url):
        output = codex(url, tmp_path, "--dangerously-bypass-approvals-and-sandbox", TASK)
    check_task(runner, tmp_path, output)


# Claude Code


CLAUDE = {"ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


def claude(url, home, *arguments):
    return said([NPM / "claude", "-p", *arguments], home, ANTHROPIC_BASE_URL=url, **CLAUDE)


def test_claude_code_without_a_models_name(server, tmp_path):
    """Its first words are enough: behind 25,000 tokens of instructions the pocket model may not find an end."""
    url, log = server
    flags = ("--output-format", "stream-json", "--include-partial-messages", "--verbose")
    command = [str(NPM / "claude"), "-p", *flags, "Say hi"]
    told = environment(tmp_path, ANTHROPIC_BASE_URL=url, **CLAUDE)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=told, cwd=tmp_path, text=True, **pipes) as process:
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            assert any('"text_delta"' in line for line in process.stdout), "it ended without a word"
        finally:
            limit.cancel()
            process.kill()
    wait_until(lambda: "POST /v1/messages 200" in log.read_text())


def test_claude_code_runs_a_command(tmp_path):
    with agent_server(tool_call("Bash", command=COMMAND, description="Write"), DONE) as (runner, url):
        output = claude(url, tmp_path, "--allowedTools", "Bash", "--", TASK)
    check_task(runner, tmp_path, output)


# opencode


def opencode(url, home, *arguments):
    # It finds its settings above $PWD, or in the home's .config/opencode.
    models = {"pocket": {"limit": {"context": 32768, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1"}, "models": models}
    settings = {"provider": {"onebox": provider}, "model": "onebox/pocket"}
    (home / "opencode.json").write_text(json.dumps(settings))
    return said([NPM / "opencode", "run", *arguments], home, OPENCODE_DISABLE_AUTOUPDATE="1")


def test_opencode(server, tmp_path):
    url, log = server
    assert opencode(url, tmp_path, "Say hi").strip()
    assert "POST /v1/chat/completions 200" in last_line(log)


def test_opencode_runs_a_command(tmp_path):
    with agent_server(tool_call("bash", command=COMMAND, description="Write"), DONE) as (runner, url):
        output = opencode(url, tmp_path, TASK)
    check_task(runner, tmp_path, output)


# aider, which edits without tools


def aider(url, home, message):
    flags = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable")
    command = [CLIENTS / "aider/bin/aider", "--model", "openai/pocket", "--openai-api-base", f"{url}/v1", *flags]
    return said([*command, "--message", message, "hi.py"], home)


def test_aider(server, tmp_path):
    url, log = server
    (tmp_path / "hi.py").write_text("print('hi')\n")
    aider(url, tmp_path, "Say hi")
    assert "POST /v1/chat/completions 200" in last_line(log)


def test_aider_edits_a_file(tmp_path):
    (tmp_path / "hi.py").write_text("print('hi')\n")
    with agent_server("", "Here it is:\n\nhi.py\n```\nprint('bye')\n```\n") as (_, url):
        aider(url, tmp_path, "Say bye instead")
    assert (tmp_path / "hi.py").read_text() == "print('bye')\n"


# llm


def llm(url, home, *arguments):
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: onebox\n  model_name: pocket\n  api_base: {url}/v1\n  can_stream: true\n  supports_tools: true\n"
    )
    command = [CLIENTS / "bin/llm", "-m", "onebox", "-o", "max_tokens", "200", *arguments]
    return said(command, home, LLM_USER_PATH=str(home))


def test_llm(server, tmp_path):
    url, _ = server
    assert llm(url, tmp_path, "Say hi").strip()


def test_llm_calls_a_function(tmp_path):
    source = "def write(text: str) -> str:\n    open('made.txt', 'w').write(text + '\\n')\n    return 'ok'\n"
    with agent_server(tool_call("write", text="4217"), DONE) as (runner, url):
        output = llm(url, tmp_path, "--functions", source, TASK)
    check_task(runner, tmp_path, output)


# LiteLLM and langchain: what a program writes


LITELLM_CHAT = """
import litellm
messages = [{"role": "user", "content": "Hi"}]
asked = {"model": "openai/pocket", "api_base": URL, "api_key": "none", "max_tokens": 50}
print("".join(c.choices[0].delta.content or "" for c in litellm.completion(messages=messages, stream=True, **asked)))
"""
LANGCHAIN_CHAT = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="pocket", base_url=URL, api_key="none", max_tokens=50)
print("".join(chunk.text for chunk in model.stream("Hi")))
"""
WRITE = """
def write(text: str) -> str:
    "Write a text into made.txt."
    open("made.txt", "w").write(text + "\\n")
    return "ok"
"""
LITELLM_TASK = """
import json, litellm
parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
tools = [{"type": "function", "function": {"name": "write", "parameters": parameters}}]
asked = {"model": "openai/pocket", "api_base": URL, "api_key": "none", "tools": tools}
messages = [{"role": "user", "content": "Write 4217 into made.txt"}]
first = litellm.completion(messages=messages, **asked).choices[0].message
(call,) = first.tool_calls
result = write(**json.loads(call.function.arguments))
messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
print(litellm.completion(messages=messages, **asked).choices[0].message.content)
"""
LANGCHAIN_TASK = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="pocket", base_url=URL, api_key="none").bind_tools([tool(write)])
messages = [("user", "Write 4217 into made.txt")]
messages.append(model.invoke(messages))
(call,) = messages[-1].tool_calls
messages.append(tool(write).invoke(call))
print(model.invoke(messages).content)
"""


def run_program(url, home, program):
    return said([CLIENTS / "bin/python", "-c", f"URL = '{url}/v1'\n{program}"], home)


@pytest.mark.parametrize("program", [LITELLM_CHAT, LANGCHAIN_CHAT], ids=["litellm", "langchain"])
def test_a_library_streams_an_answer(server, tmp_path, program):
    assert run_program(server[0], tmp_path, program).strip()


@pytest.mark.parametrize("program", [LITELLM_TASK, LANGCHAIN_TASK], ids=["litellm", "langchain"])
def test_a_library_calls_a_tool(tmp_path, program):
    with agent_server(tool_call("write", text="4217"), DONE) as (runner, url):
        output = run_program(url, tmp_path, WRITE + program)
    check_task(runner, tmp_path, output)
