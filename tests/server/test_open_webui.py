"""Open WebUI, unchanged, as a chat program in front of `onebox serve`; `make conformance-test` installs it."""

import json
import os
import subprocess
import time
import uuid
from pathlib import Path

import httpx
import pytest

from onebox.server.run import bind
from tests.server.launching import started

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".venv-conformance" / "open-webui" / "bin" / "open-webui"
START_LIMIT_S, ANSWER_LIMIT_S = 400, 120
# Without accounts, and nothing fetched: no update, no embedding model, no packages of tools.
SETTINGS = {
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "false",
    "WEBUI_AUTH": "false",
    "RAG_EMBEDDING_ENGINE": "openai",
    "OFFLINE_MODE": "true",
    "ANONYMIZED_TELEMETRY": "false",
}
TOOL = '''
class Tools:
    def get_weather(self, city: str) -> str:
        """
        Get the current weather of a city.
        :param city: the city
        """
        return '{"weather": "sunny", "temperature": 21}'
'''
pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def webui(tmp_path_factory):
    """A client of Open WebUI, signed in, whose one connection is the served pocket model."""
    assert PROGRAM.exists(), f"{PROGRAM} is not there: `make conformance-test` makes it first"
    data = tmp_path_factory.mktemp("webui")
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with started(ROOT / "onebox" / "pocket" / "model", "--served-model-name", "pocket") as (_, url):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | SETTINGS
        environment |= {"HOME": str(data), "DATA_DIR": str(data), "OPENAI_API_BASE_URL": f"{url}/v1"}
        command = [str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", str(port)]
        with (
            (data / "log").open("w") as log,
            subprocess.Popen(command, env=environment, cwd=data, stderr=log) as process,
        ):
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_LIMIT_S) as client:
                    wait_for(lambda: is_up(client, process, data / "log"), START_LIMIT_S)
                    signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
                    client.headers["Authorization"] = f"Bearer {signed_in['token']}"
                    yield client
            finally:
                process.kill()


def wait_for(condition, limit_s):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.2)


def is_up(client, process, log):
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_open_webui_lists_the_model_and_streams_its_answer(webui):
    assert [model["id"] for model in webui.get("/api/models").json()["data"]] == ["pocket"]
    body = {"model": "pocket", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    with webui.stream("POST", "/api/chat/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert len([delta for delta in deltas if delta.get("content")]) > 1
    assert "".join(delta.get("content") or "" for delta in deltas).strip()


def test_open_webui_runs_a_tool_that_the_model_calls(webui):
    tool = {"id": "weather", "name": "weather", "content": TOOL, "meta": {"description": "Weather"}}
    webui.post("/api/v1/tools/create", json=tool).raise_for_status()
    chat_id, answer_id = new_chat(webui, "What is the weather in Rome?")
    body = {
        "model": "pocket",
        "stream": True,
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tool_ids": ["weather"],
        "params": {"function_calling": "native"},
        "chat_id": chat_id,
        "id": answer_id,
        "session_id": "a-page",
    }
    webui.post("/api/chat/completions", json=body).raise_for_status()

    def message():
        return webui.get(f"/api/v1/chats/{chat_id}").json()["chat"]["history"]["messages"][answer_id]

    wait_for(lambda: message().get("done"), ANSWER_LIMIT_S)
    parts = {part["type"]: part for part in message()["output"]}
    call = parts["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Rome"})
    assert parts["function_call_output"]["call_id"] == call["call_id"]
    assert parts["reasoning"]["content"][0]["text"].strip()
    assert "sunny" in message()["content"]


def new_chat(webui, question):
    """(id of a conversation, id of its answer, which is still empty), as the page makes them."""
    asked, answer = str(uuid.uuid4()), str(uuid.uuid4())
    messages = [
        {"id": asked, "parentId": None, "childrenIds": [answer], "role": "user", "content": question},
        {"id": answer, "parentId": asked, "childrenIds": [], "role": "assistant", "content": "", "model": "pocket"},
    ]
    history = {"messages": {message["id"]: message for message in messages}, "currentId": answer}
    chat = {"title": "A chat", "models": ["pocket"], "messages": messages, "history": history}
    return webui.post("/api/v1/chats/new", json={"chat": chat}).json()["id"], answer
