"""Stored responses: they go on, are retrieved, deleted and cancelled, by their owner alone. Agents' tools, aliases."""

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import openai
import pytest

from onebox.server import conversations
from onebox.server.app import create_app
from onebox.server.keys import plain_keys
from onebox.server.pieces import json_text
from onebox.server.response_store import OpenEntry, ResponseStore, StoredConversation, StoreLimits
from onebox.server.settings import ServerSettings
from tests.server.conftest import wait_until
from tests.server.endpoints.test_chat import THOUGHT, written
from tests.server.endpoints.test_responses import TOOLS, ask, post, prompt_of
from tests.server.test_errors import refused


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_goes_on_behind_a_stored_answer_as_if_it_had_been_sent(openai_client, is_stream):
    client = openai_client("I look.\n</think>\n\n" + written("get_weather", city="Rome"))
    if is_stream:
        with client.responses.stream(model="tiny", input="How is Rome?", tools=TOOLS) as stream:
            first = stream.get_final_response()
    else:
        first = ask(client, "How is Rome?", tools=TOOLS, instructions="Forget me.")
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
    second = ask(client, [result], tools=TOOLS, previous_response_id=first.id, instructions="Be brief.")
    stored = prompt_of(client.server)
    user = {"role": "user", "content": "How is Rome?"}
    ask(client, [user, *first.output, result], tools=TOOLS, instructions="Be brief.", store=False)
    assert prompt_of(client.server) == stored
    assert "Forget me." not in stored
    assert (second.previous_response_id, second.store) == (first.id, True)
    ask(client, "And now?", previous_response_id=second.id)
    assert "How is Rome?" in prompt_of(client.server)


def test_a_stored_answer_is_retrieved_as_it_was_sent_and_deleted(openai_client):
    client = openai_client(THOUGHT)
    first = ask(client, metadata={"a": "b"})
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    with client.responses.stream(model="tiny", input="Hi") as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    client.responses.delete(first.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="There is no response 'resp_"):
            use(first.id)
    with pytest.raises(openai.NotFoundError):
        ask(client, "go on", previous_response_id=first.id)
    assert client.responses.retrieve(streamed.id).id == streamed.id


def test_what_is_not_to_be_stored_is_not(openai_client, scripted):
    client = openai_client("Hi")
    first = ask(client, store=False)
    assert first.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    off = scripted("Hi")
    off.app = create_app(off.service, ServerSettings(responses=StoreLimits(max_bytes=0)))
    assert post(off).json()["store"] is False
    assert "--responses-bytes 0" in refused(post(off, store=True), 400, "store")
    assert "not at all" in refused(post(off, previous_response_id="resp_1"), 404, code="response_not_found")


def test_answers_belong_to_the_key_that_they_were_made_with(served):
    _, url = served("Hi", ServerSettings(api_keys=tuple(plain_keys(["sk-one", "sk-two"]))))

    def call(method, path, key, **options):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, f"{url}/v1/responses{path}", headers=headers, **options)

    made = call("POST", "", "sk-one", json={"input": "Hi"}).json()["id"]
    going_on = {"input": "Hi", "previous_response_id": made}
    assert call("GET", f"/{made}", "sk-two").status_code == 404
    assert call("DELETE", f"/{made}", "sk-two").status_code == 404
    assert call("POST", f"/{made}/cancel", "sk-two").status_code == 404
    assert call("POST", "", "sk-two", json=going_on).status_code == 404
    assert call("POST", "", "sk-one", json=going_on).status_code == 200
    assert call("GET", f"/{made}", "sk-one").status_code == 200


def test_a_stored_answer_is_no_stream(scripted):
    client = scripted("Hi")
    path = f"/v1/responses/{post(client, input='Hi').json()['id']}"
    assert client.request("GET", path).status_code == 200
    assert "returned whole" in refused(client.request("GET", f"{path}?stream=true"), 400, "stream")


def test_an_answer_in_the_background_is_retrieved_when_it_is_done(openai_client):
    client = openai_client(THOUGHT)
    client.server.runner.gate.clear()
    begun = ask(client, background=True)
    assert (begun.status, begun.output, begun.background) == ("queued", [], True)
    assert client.responses.retrieve(begun.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="not done yet"):
        ask(client, previous_response_id=begun.id)
    client.server.runner.gate.set()
    wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == "It is 42 — 世界 🙂."
    with pytest.raises(openai.BadRequestError, match="Only a response in the background"):
        client.responses.cancel(begun.id)


def test_an_answer_in_the_background_is_cancelled_and_computed_no_further(openai_client):
    client = openai_client("x" * 2000)
    client.server.runner.gate.clear()
    begun = ask(client, background=True)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    client.server.runner.gate.set()
    stats = client.server.service.engine.stats
    wait_until(lambda: stats().num_running + stats().num_waiting == 0)
    assert stats().totals.completion_tokens < 2000


def test_a_background_request_that_is_refused_is_refused_at_once(scripted):
    client = scripted("Hi", max_model_len=100)
    refused(post(client, input="x" * 200, background=True), 400, "input", "context_length_exceeded")


def test_a_failure_in_the_background_is_told_when_it_is_retrieved(openai_client, tokenizer):
    client = openai_client("ok", fails_on=tokenizer.encode("é")[0])
    begun = ask(client, "é", background=True)
    wait_until(lambda: client.responses.retrieve(begun.id).status == "failed")
    assert client.responses.retrieve(begun.id).error.code == "server_error"


def test_an_answer_that_is_cancelled_twice_at_once_is_not_lost(openai_client, monkeypatch):
    client = openai_client("x" * 2000)
    client.server.runner.gate.clear()
    begun = ask(client, background=True)
    put, storing, may_store = ResponseStore.put_open, threading.Event(), threading.Event()

    def put_slowly(*arguments):
        storing.set()
        may_store.wait(10)
        return put(*arguments)

    monkeypatch.setattr(ResponseStore, "put_open", put_slowly)

    def cancel():
        try:
            return client.responses.cancel(begun.id).status
        except openai.BadRequestError:
            return "too late"

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cancel)
        assert storing.wait(10)
        second = threads.submit(cancel)
        wait([first, second], timeout=0.3)
        may_store.set()
        assert first.result() == "cancelled"
        assert second.result() in ("cancelled", "too late")


def test_an_earlier_answer_that_no_request_may_hold_is_refused(scripted, monkeypatch):
    client = scripted("Hi")
    bad = {"type": "function_call", "call_id": "1", "name": "n" * 200, "arguments": "{}"}
    read = ResponseStore.read

    def read_with_bad(self, *which):
        kept, num_bytes = read(self, *which)
        return kept._replace(items=[*kept.items, bad]), num_bytes

    monkeypatch.setattr(ResponseStore, "read", read_with_bad)
    made = post(client).json()["id"]
    assert "cannot be sent back" in refused(post(client, previous_response_id=made), 400, "previous_response_id")


def test_what_short_requests_bring_into_memory_is_bounded_and_given_back(scripted, monkeypatch):
    monkeypatch.setattr(conversations, "_MAX_HELD_BYTES", 3000)
    client = scripted("Hi", max_model_len=3000, num_pages=300)
    small, large = (post(client, input=[{"role": "user", "content": "x" * size}]).json()["id"] for size in (10, 2500))
    for _ in range(8):
        assert post(client, previous_response_id=small).status_code == 200
        assert client.request("GET", f"/v1/responses/{small}").status_code == 200
        for reply in (post(client, previous_response_id=large), client.request("GET", f"/v1/responses/{large}")):
            assert "Stored conversations" in refused(reply, 429, code="server_busy", kind="rate_limit_error")
    metadata = {"a": "x" * 2500}
    assert post(client, background=True, metadata=metadata).status_code == 429


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_large_echo_is_written_beside_the_event_loop(scripted, monkeypatch, is_stream):
    """Sizes of what the loop's thread writes, whatever the client's settings are."""
    sizes = []

    def sized(value):
        text = json_text(value)
        if threading.current_thread() is threading.main_thread():
            sizes.append(len(text))
        return text

    for module in ("pieces", "sse", "endpoints.response_reply"):
        monkeypatch.setattr(f"onebox.server.{module}.json_text", sized)
    metadata = {str(number): "é" for number in range(5000)}
    reply = post(scripted("Hi"), metadata=metadata, stream=is_stream)
    assert reply.status_code == 200
    if is_stream:
        told = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        assert [event["response"]["metadata"] == metadata for event in told if "response" in event] == [True] * 3
        assert sizes
    assert max(sizes, default=0) < 4000


# The store's bounds.

ID = "resp_{:032x}"


def conversation(text="x"):
    return StoredConversation({"text": text}, [])


def test_beyond_a_bound_the_oldest_go():
    store = ResponseStore(StoreLimits(max_entries=3))
    for number in range(5):
        assert store.put(ID.format(number), "me", conversation(str(number)))
    assert len(store) == 3
    assert store.get(ID.format(4), "me").response == {"text": "4"}
    with pytest.raises(Exception, match="no response"):
        store.get(ID.format(1), "me")


@pytest.mark.parametrize("on_disk", [False, True])
def test_bytes_are_bounded_and_what_is_too_large_is_not_kept(tmp_path, on_disk):
    store = ResponseStore(StoreLimits(max_bytes=8 << 10), tmp_path / "kept" if on_disk else None)
    noise = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))
    for number in range(20):
        assert store.put(ID.format(number), "me", conversation(f"{number}{noise}"))
    assert 0 < store.num_bytes <= 8 << 10
    assert 0 < len(store) < 20
    assert not store.put(ID.format(99), "me", conversation("".join(map(chr, range(0x4E00, 0x8000)))))
    if on_disk:
        held = [path.stat().st_size for path in (tmp_path / "kept").iterdir()]
        assert len(held) == len(store)
        assert sum(held) <= 8 << 10
    for number in range(20 - len(store), 20):
        store.delete(ID.format(number), "me")
    assert (store.num_bytes, len(store)) == (0, 0)


def test_what_a_full_disk_does_not_take_is_kept_in_memory(tmp_path, monkeypatch):
    store = ResponseStore(StoreLimits(), tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("onebox.server.response_store.tempfile.mkstemp", full)
        assert store.put(ID.format(1), "me", conversation("kept"))
        patch.setattr("onebox.server.response_store._SPARE_BYTES", 0)
        assert not store.put(ID.format(2), "me", conversation("lost"))
    assert store.put(ID.format(3), "me", conversation("written"))
    assert [store.get(ID.format(number), "me").response["text"] for number in (1, 3)] == ["kept", "written"]
    assert len(list(tmp_path.iterdir())) == 1
    for number in (1, 3):
        store.delete(ID.format(number), "me")
    assert (store.num_bytes, len(store), list(tmp_path.iterdir())) == (0, 0, [])


def test_a_conversation_is_bounded_by_its_text_too(scripted):
    """Repeated text takes next to nothing while it is stored, and all of its size when it is read."""
    store = ResponseStore(StoreLimits(max_bytes=64 << 10))
    assert store.put(ID.format(1), "me", StoredConversation({}, [{"text": "x" * 30_000}]))
    for kept in (StoredConversation({}, [{"text": "x" * 4000}] * 10), conversation("x" * 40_000)):
        assert not store.put(ID.format(2), "me", kept)
    assert len(store) == 1
    client = scripted("Hi")
    client.app = create_app(client.service, ServerSettings(responses=StoreLimits(max_bytes=6000)))
    items = [{"role": "user", "content": "x" * 1000}] * 4 + [{"role": "user", "content": "Hi"}]
    assert post(client, input=items, truncation="auto").json()["store"] is False
    assert "too large" in refused(post(client, input=items, truncation="auto", background=True), 400, "background")


def test_an_answer_that_is_stored_twice_counts_once():
    store = ResponseStore(StoreLimits())
    begun = OpenEntry([], store.limits)
    for status in ("completed", "cancelled"):
        assert store.put_open(ID.format(1), "me", begun, [{"a": status}], {"status": status})
    assert store.get(ID.format(1), "me") == ({"status": "cancelled"}, [{"a": "cancelled"}])
    store.delete(ID.format(1), "me")
    assert (store.num_bytes, len(store)) == (0, 0)


def test_what_is_too_old_is_gone(monkeypatch):
    store = ResponseStore(StoreLimits(max_age_s=100))
    now = 1000.0
    monkeypatch.setattr("onebox.server.response_store.time.time", lambda: now)
    store.put(ID.format(1), "me", conversation())
    now = 1099.0
    assert store.get(ID.format(1), "me")
    now = 1101.0
    with pytest.raises(Exception, match="no response"):
        store.get(ID.format(1), "me")
    assert len(store) == 0


def test_a_directory_keeps_them_over_a_restart_for_this_user_alone(tmp_path):
    directory = tmp_path / "a" / "kept"
    store = ResponseStore(StoreLimits(), directory)
    for number in range(3):
        store.put(ID.format(number), "me", conversation(f"text {number}"))
    (directory / "other.txt").write_text("not ours")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.glob("resp_*")} == {0o600}
    (directory / f"{ID.format(2)}.response").write_bytes(b'{"owner": "me", "created_at": 9e9}\ndamaged')
    again = ResponseStore(StoreLimits(max_entries=2), directory)
    assert len(again) == 2
    assert again.get(ID.format(1), "me").response == {"text": "text 1"}
    for wrong in (ID.format(0), ID.format(2), "resp_../../etc/passwd", "other"):
        with pytest.raises(Exception, match="no response"):
            again.get(wrong, "me")
    assert (directory / "other.txt").exists()


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot be written"):
        ResponseStore(StoreLimits(), tmp_path / "file")


# Tools as agents send them.

EXEC = {"type": "custom", "name": "exec", "description": "Runs JavaScript.", "format": {"type": "text"}}
AGENT_TOOLS = [
    {"type": "namespace", "name": "functions", "tools": [EXEC]},
    {"type": "namespace", "name": "clock", "description": "Time.", "tools": [{"type": "function", "name": "sleep"}]},
    {"type": "web_search", "external_web_access": False},
]


@pytest.mark.parametrize("among_items", [False, True])
def test_an_agents_tools_are_mapped_and_those_that_cannot_be_used_are_told(scripted, caplog, among_items):
    caplog.set_level("INFO", "onebox")
    client = scripted(
        "ok</think>" + written("clock__sleep", ms=5) + written("exec", input="1 < 2\n"), max_model_len=3000
    )
    item = {"type": "additional_tools", "role": "developer", "tools": AGENT_TOOLS}
    tools = {"input": [item, {"role": "user", "content": "Hi"}]} if among_items else {"tools": AGENT_TOOLS}
    body = post(client, **tools).json()
    prompt = prompt_of(client)
    assert "Runs JavaScript." in prompt
    assert '"name": "clock__sleep"' in prompt
    assert "web_search" not in prompt
    assert "web_search" not in json.dumps(body["tools"])
    assert "tools of the type 'web_search' were left out" in caplog.text
    _, sleep, run = body["output"]
    assert (sleep["type"], sleep["name"], sleep["namespace"]) == ("function_call", "sleep", "clock")
    assert (run["type"], run["name"], run["input"]) == ("custom_tool_call", "exec", "1 < 2\n")
    results = [
        {"type": "function_call_output", "call_id": sleep["call_id"], "output": "slept"},
        {"type": "custom_tool_call_output", "call_id": run["call_id"], "output": "true"},
    ]
    again = post(client, input=[{"role": "user", "content": "Hi"}, *body["output"], *results], tools=AGENT_TOOLS)
    assert again.status_code == 200
    prompt = prompt_of(client)
    assert "<function=clock__sleep>" in prompt
    assert "<parameter=input>\n1 < 2\n" in prompt
    assert "<tool_response>\ntrue\n</tool_response>" in prompt


def test_a_custom_tools_input_is_streamed_as_text(openai_client):
    client = openai_client("ok</think>" + written("exec", input='say("hi")'))
    events = list(ask(client, tools=[EXEC], stream=True))
    kinds = [event.type for event in events]
    assert "response.function_call_arguments.delta" not in kinds
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert done.input == "".join(deltas) == 'say("hi")'
    assert events[-1].response.output[-1].input == 'say("hi")'


# Other names of the model.


def test_aliases_are_answered_under_the_models_own_name(scripted, caplog):
    from dataclasses import replace

    caplog.set_level("INFO", "onebox")
    client = scripted("Hi")
    service = replace(client.service, aliases=("second", "claude-*", "gpt-*"))
    client.app = create_app(service)
    for name in ("tiny", "second", "claude-sonnet-9", "gpt-6.1-sol"):
        assert client.chat(model=name).json()["model"] == "tiny"
        assert client.request("GET", f"/v1/models/{name}").status_code == 200
    assert client.chat(model="llama").status_code == 404
    assert [model["id"] for model in client.request("GET", "/v1/models").json()["data"]] == ["tiny", "second"]
    assert "'claude-sonnet-9' is an alias of tiny" in caplog.text


@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"\udc00": 1}, {"a": [{"b": "x\udfff"}]}])
def test_half_a_character_in_an_object_of_free_form_is_refused_not_changed(scripted, metadata):
    """JSON can spell it, and no answer could return it."""
    message = refused(post(scripted("Hi"), metadata=metadata), 400, param="metadata")
    assert "half of a surrogate pair" in message
