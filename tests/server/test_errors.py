"""Every refusal has OpenAI's shape, the status that fits, and a sentence with the name or the numbers in it."""

import pytest

from onebox.engine.api import EngineRestartingError
from onebox.server.schemas.chat import ChatRequest
from onebox.server.schemas.completions import CompletionRequest
from tests.server.conftest import events

UNSUPPORTED = {
    "best_of": 1,
    "suffix": "x",
    "functions": [],
    "function_call": "auto",
    "prediction": {"type": "content", "content": "x"},
    "audio": {},
    "verbosity": "low",
    "web_search_options": {},
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "include_stop_str_in_output": True,
    "chat_template": "x",
    "unheard_of": 1,
}


def refused(response, status, param=None, code=None, kind="invalid_request_error"):
    """The message of a refusal, after its shape was checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, code)
    assert error["message"].endswith(".")
    return error["message"]


@pytest.fixture
def client(scripted):
    return scripted("ok", fails_on=99)


@pytest.mark.parametrize("field", UNSUPPORTED)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_field_that_would_not_be_honoured_is_refused_by_name(client, field, endpoint):
    response = getattr(client, endpoint)(**{field: UNSUPPORTED[field]})
    assert f"{field} is not supported" in refused(response, 400, field)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 73}, "n", "73 answers are asked for at once; this server has 72 places"),
        ({"store": True}, "store", "False"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"384": 1}}, "logit_bias", "logit_bias names token id 384"),
        ({"stop_token_ids": [384]}, "stop_token_ids", "stop_token_ids names token id 384"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens is 4"),
        ({"top_logprobs": 3}, None, "without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'none'"),
        ({"thinking_budget": -1}, "thinking_budget", "greater than or equal to 0"),
        ({"thinking_budget": 5, "max_reasoning_tokens": 6}, None, "names of one limit and differ"),
        ({"chat_template_kwargs": {"thinking_budget": "x"}}, None, "whole number"),
        ({"tools": [{"type": "web"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tool_choice": "required"}, None, "there are no tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "exactly with the type json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "give one"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_regex": "("}, "guided_regex", "cannot be used"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "cannot be used"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "cannot be used"),
        ({"modalities": ["audio"]}, "modalities.0", "'text'"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": "x" * 1025}, "stop", "at most 1024 characters"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": ["a", 5]}, "stop.1", "valid string"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not supported"),
        ({"stream_options": {"include_usage": True}}, None, "without stream"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, None, "two names of one limit"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'user', 'assistant' or 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages.0", "needs content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0", "name is not supported"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages.0", "only an assistant"),
        ({"messages": [{"role": "tool", "content": None, "tool_call_id": "x"}]}, "messages.0", "needs content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "text": ""}]}]},
            "messages.0.content.0",
            "text, image_url, video_url",
        ),
        ({"messages": [{"role": "user", "content": "", "reasoning_content": "x"}]}, "messages.0", "only an assistant"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, None, "no question"),
        ({"chat_template_kwargs": {"thinking": 1}}, None, "chat_template_kwargs.thinking"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages.0.content", "half of a surrogate pair"),
        ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs", "half of a surrogate pair"),
        ({"\ud800": 1}, None, "valid string"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_with_its_place(client, fields, param, says):
    assert says in refused(client.chat(**fields), 400, param)


def test_null_means_absent(client):
    fields = ChatRequest.model_fields.keys() - {"messages"}
    assert client.chat(**dict.fromkeys(fields)).status_code == 200
    fields = CompletionRequest.model_fields.keys() - {"prompt"}
    assert client.complete(**dict.fromkeys(fields)).status_code == 200


def test_bodies_that_are_no_requests_are_refused(client):
    def post(content):
        return client.request("POST", "/v1/completions", content=content, headers={"content-type": "application/json"})

    assert "not valid JSON" in refused(post(b'{"prompt": '), 400)
    assert "prompt is missing" in refused(post(b"{}"), 400, "prompt")
    assert "body is missing" in refused(post(b""), 400)
    assert "dictionary" in refused(post(b"[1]"), 400)
    assert "NaN is not a JSON number" in refused(post(b'{"prompt": "a", "temperature": NaN}'), 400)
    refused(post(b'{"prompt": ' + b"[" * 100_000), 400)


def test_an_empty_or_impossible_prompt_is_refused(client):
    assert "empty" in refused(client.complete(""), 400)
    assert "token id 384" in refused(client.complete([1, 384]), 400)


def test_what_exceeds_the_context_is_told_with_both_numbers(client):
    message = refused(client.complete("x" * 400), 400, "prompt", code="context_length_exceeded")
    assert "400 tokens and the context holds 400" in message
    message = refused(
        client.complete("x" * 300, max_tokens=200, stream=True), 400, "prompt", code="context_length_exceeded"
    )
    assert "300 tokens and 200 more are asked for, 500 in all; the context holds 400" in message


def test_another_model_is_not_found(client):
    message = refused(client.chat(model="gpt-4"), 404, "model", "model_not_found")
    assert "'gpt-4' is not served here; 'tiny' is" in message


def test_other_paths_and_methods_are_refused_in_the_same_shape(client):
    assert "GET /v1/nothing" in refused(client.request("GET", "/v1/nothing"), 404)
    assert "GET /v1/completions" in refused(client.request("GET", "/v1/completions"), 405)


def test_a_refusal_does_not_send_back_what_it_refuses(client):
    """A model's name, a path, a field's name: some of it tells which it was."""
    large = "x" * 50_000
    message = {"model": large, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    for response in (
        client.chat(model=large),
        client.chat(**{large: 1}),
        client.request("POST", "/v1/messages", json_body=message),
        client.request("GET", f"/{large}"),
    ):
        assert 400 <= response.status_code < 500
        assert len(response.content) < 2500
        assert "x" * 50 in response.text or "model: String should have at most 512 characters" in response.text
        assert response.json()["error"]["message"].endswith(".")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_a_time_to_come_back(scripted, stream):
    from onebox.engine.api import Request

    client = scripted("ok", max_num_seqs=1, max_num_waiting=0)
    client.runner.gate.clear()
    handle = client.service.engine.submit(Request("first", (1,)))
    response = client.chat(stream=stream)
    assert "Of 1 places for requests 1 are taken" in refused(response, 429, code="queue_full", kind="rate_limit_error")
    assert int(response.headers["retry-after"]) >= 1
    client.runner.gate.set()
    list(handle)
    assert client.chat(stream=stream).status_code == 200


def test_a_failure_in_the_model_is_500_or_an_event_and_the_next_request_works(client):
    message = refused(client.complete([99]), 500, kind="server_error")
    assert "a scripted failure" in message
    *_, last = events(client.complete([99], stream=True))
    assert last["error"]["message"] == message
    assert client.complete([1]).status_code == 200


def test_a_stopped_engine_is_503(client):
    client.service.engine.close()
    refused(client.complete(), 503, code="engine_stopped", kind="server_error")


def test_an_engine_that_restarts_is_503_with_a_time_to_come_back(client, monkeypatch):
    def restarting(*_):
        raise EngineRestartingError("The engine is restarting.")

    monkeypatch.setattr(client.service.engine, "submit_copies", restarting)
    response = client.complete()
    refused(response, 503, code="engine_restarting", kind="server_error")
    assert int(response.headers["retry-after"]) >= 1


def test_a_mistake_of_ours_is_500_without_details(client, monkeypatch, caplog):
    monkeypatch.setattr(client.service.tokenizer, "encode", None)
    assert "TypeError" not in refused(client.complete(), 500, kind="server_error")
    assert "POST /v1/completions failed" in caplog.text
