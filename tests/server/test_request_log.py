"""One line a request: who, how much, how long, how it ended; never what was said, unless asked for."""

import json
import logging

import anthropic
import httpx
import openai
import pytest

from onebox.server.app import create_app
from onebox.server.keys import plain_keys
from onebox.server.record import request_id_of
from onebox.server.request_log import REFUSALS_PER_S, request_line
from onebox.server.settings import ServerSettings
from onebox.spec.log import JsonLines, TextLines
from tests.server.conftest import wait_until

NAME = "onebox.server.request_log"


@pytest.fixture
def lines(caplog):
    """The fields of each line so far."""
    caplog.set_level(logging.INFO, NAME)
    return lambda: [record.fields for record in caplog.records if hasattr(record, "fields")]


def test_a_line_tells_counts_times_and_ids_of_the_answer(scripted, lines):
    client = scripted("Let me see.\n</think>\n\nIt is 42.")
    reply = client.chat("a secret question", logprobs=True)
    (line,) = lines()
    usage = reply.json()["usage"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["answer_id"] == reply.json()["id"]
    assert line["id"] == reply.headers["x-request-id"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"]
    assert (line["cached_tokens"], line["drafted_tokens"], line["finish_reason"]) == (0, 0, "stop")
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"]
    assert "key" not in line


def test_nothing_of_what_was_said_is_in_a_line_or_in_the_log(scripted, caplog):
    caplog.set_level(logging.DEBUG, "onebox")
    client = scripted("The answer is violet.")
    client.chat("a secret question")
    client.chat("a secret question", stream=True, stop="violet")
    assert client.chat("a secret question", temperature="secret").status_code == 400
    text = "".join(TextLines().format(record) + JsonLines().format(record) for record in caplog.records)
    assert "POST /v1/chat/completions 400" in text
    assert not [word for word in ("secret", "violet") if word in text]


def test_texts_are_in_the_line_up_to_the_length_that_was_asked_for(make_service, tokenizer, lines):
    from tests.engine.scripted import ScriptedRunner
    from tests.server.conftest import Client

    service = make_service(ScriptedRunner(tokenizer.encode("It is 42.<|im_end|>")))
    with service.engine:
        Client(service, ServerSettings(max_logged_characters=5)).complete("What is it?")
    (line,) = lines()
    assert (line["prompts"], line["answers"]) == (["What "], ["It is"])


def test_a_refusal_has_its_line_and_an_id(scripted, lines):
    client = scripted("Hi")
    reply = client.chat(model="other")
    (line,) = lines()
    assert (line["status"], line["id"]) == (404, reply.headers["x-request-id"])
    assert "prompt_tokens" not in line


def test_requests_that_read_are_told_at_debug_alone(scripted, lines, caplog):
    client = scripted("Hi")
    client.request("GET", "/health")
    assert lines() == []
    caplog.set_level(logging.DEBUG, NAME)
    client.request("GET", "/health")
    assert [line["path"] for line in lines()] == ["/health"]


def test_refusals_beyond_a_number_a_second_are_counted_instead(scripted, lines, caplog, monkeypatch):
    monkeypatch.setattr("onebox.server.request_log.time.monotonic", lambda: 100.5)
    client = scripted("Hi")
    for _ in range(REFUSALS_PER_S + 5):
        client.request("POST", "/nowhere")
    assert len(lines()) == REFUSALS_PER_S
    monkeypatch.setattr("onebox.server.request_log.time.monotonic", lambda: 101.5)
    client.request("POST", "/nowhere")
    assert len(lines()) == REFUSALS_PER_S + 1
    assert "5 refused requests have no line here" in caplog.text


def test_a_stream_that_fails_is_a_warning_with_the_reason(scripted, tokenizer, caplog):
    caplog.set_level(logging.INFO, NAME)
    client = scripted("ok", fails_on=tokenizer.encode("é")[0])
    client.chat("é", stream=True)
    (record,) = [record for record in caplog.records if hasattr(record, "fields")]
    assert record.levelno == logging.WARNING
    assert (record.fields["status"], record.fields["error"]) == (200, "GenerationError")
    assert record.fields["finish_reason"] == "aborted"


def test_the_key_is_told_by_name(served, lines):
    keys = plain_keys(["sk-one", "sk-two"])
    _, url = served("Hi", ServerSettings(api_keys=tuple(keys)))
    body = {"prompt": "Hi", "max_tokens": 1}
    for key in ("sk-two", "wrong"):
        httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    wait_until(lambda: len(lines()) == 2)
    assert [(line["status"], line.get("key")) for line in lines()] == [(200, "key-2"), (401, None)]
    assert "sk-two" not in json.dumps(lines())


def test_an_id_is_taken_without_what_could_break_a_log_and_not_longer_than_useful(scripted):
    client = scripted("Hi")

    def returned(given):
        return client.request("GET", "/health", headers={"x-request-id": given}).headers["x-request-id"]

    assert returned("trace-1:a/b.c_d=") == "trace-1:a/b.c_d="
    assert returned('a" b{c}\x7f') == "abc"
    assert returned("x" * 5000) == "x" * 128
    assert len(returned("{}")) == 32
    assert returned("") != returned("")
    assert request_id_of("\n\r") != ""


def test_the_official_clients_show_the_id(openai_client, anthropic_client):
    ours = {"x-request-id": "mine-1"}
    reply = openai_client("Hi").chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_headers=ours
    )
    assert reply._request_id == "mine-1"
    message = anthropic_client("Hi").messages.create(
        model="tiny", max_tokens=5, messages=[{"role": "user", "content": "Hi"}], extra_headers=ours
    )
    assert message._request_id == "mine-1"
    with pytest.raises(openai.NotFoundError) as refused:
        openai_client("Hi").models.retrieve("other")
    assert refused.value.request_id
    assert anthropic.__version__


def test_a_line_has_nothing_as_python_writes_it():
    fields = {"method": "POST", "path": "/", "status": 200, "stream": True, "prompts": ["it's"], "notes": "a b"}
    assert request_line(fields) == """POST / 200 stream=true prompts=["it's"] notes="a b\""""


def test_requests_are_not_logged_where_that_is_off(scripted, lines):
    client = scripted("Hi")
    client.app = create_app(client.service, ServerSettings(logs_requests=False))
    assert client.chat().headers["x-request-id"]
    assert lines() == []
