"""Tool calls through the API: parsed, typed, streamed as they are told whole, and forced where that is asked for."""

import json

import pytest

from tests.engine.scripted import ScriptedRunner
from tests.server.conftest import Client, events
from tests.server.test_errors import refused

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
        "strict": True,
    },
}
PING = {"type": "function", "function": {"name": "ping"}}


def written(name, **arguments):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def collected(chunks):
    """A stream's message, put together as clients do."""
    message = {"content": "", "reasoning": "", "calls": {}}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            known = message["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            known["id"] += call.get("id", "")
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
    return message


ANSWERS = {
    "one": "I look.\n</think>\n\n" + written("get_weather", city="Zürich 🙂", days=3),
    "two": "</think>\n\nBoth:\n" + written("get_weather", city='a "b"\n<c>', days=3) + "\n" + written("ping"),
    "inside reasoning": "First " + written("ping") + "\nthen I go on.\n</think>\n\nDone.",
}


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_calls_are_parsed_and_the_stream_joins_to_the_whole(scripted, text):
    client = scripted(text, max_model_len=2000)
    whole = client.chat(tools=[WEATHER, PING]).json()["choices"][0]
    chunks = events(client.chat(tools=[WEATHER, PING], stream=True))
    message, streamed = whole["message"], collected(chunks)
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning"] == (message["reasoning"] or "")
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in streamed["calls"].values()] == told
    assert [name for name, _ in told] == [line[10:-1] for line in text.splitlines() if line.startswith("<function=")]
    ids = [call["id"] for call in (*message["tool_calls"], *streamed["calls"].values())]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)


def test_arguments_are_typed_by_the_schema(scripted):
    (choice,) = scripted(ANSWERS["one"], max_model_len=2000).chat(tools=[WEATHER]).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich 🙂", "days": 3}
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "I look."


def test_the_tools_and_a_calls_history_reach_the_prompt(scripted):
    client = scripted("ok", max_model_len=3000)
    call = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": '{"x": [1]}'}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "ping", "content": "pong"},
    ]
    body = client.chat(messages=messages, tools=[PING], return_token_ids=True).json()
    prompt = client.service.tokenizer.decode(body["prompt_token_ids"])
    assert '"name": "ping"' in prompt
    assert "<function=ping>\n<parameter=x>\n[1]\n</parameter>" in prompt
    assert "<tool_response>\npong\n</tool_response>" in prompt


def test_arguments_in_the_history_that_are_no_object_are_refused(scripted):
    call = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "[1]"}}
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}]
    assert "messages.1.tool_calls.0" in refused(scripted("ok").chat(messages=messages), 400)


def test_with_tool_choice_none_the_model_does_not_see_the_tools_and_calls_are_text(scripted):
    client = scripted(written("ping"))
    body = client.chat(tools=[PING], tool_choice="none", return_token_ids=True, **QUIET).json()
    assert "ping" not in client.service.tokenizer.decode(body["prompt_token_ids"])
    assert body["choices"][0]["message"]["content"] == written("ping")
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_answer_ends_before_the_second(scripted, stream):
    client = scripted(written("ping") + "\n" + written("ping") + "x" * 90, max_model_len=2000)
    options = {"tools": [PING], "parallel_tool_calls": False, "tool_choice": "auto", **QUIET}
    response = client.chat(**options, stream=stream)
    if stream:
        *_, last = chunks = events(response)
        calls, reason = collected(chunks)["calls"], last["choices"][0]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
    assert (len(calls), reason) == (1, "tool_calls")


def choice_of(response, *, stream):
    """(tool calls as name and arguments, content, finish_reason)."""
    if stream:
        chunks = events(response)
        message, reason = collected(chunks), chunks[-1]["choices"][0]["finish_reason"]
        calls = [(call["name"], call["arguments"]) for call in message["calls"].values()]
        return calls, message["content"], reason
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return calls, message["content"] or "", choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_off_by_the_limit_is_not_told_as_a_complete_one(scripted, stream):
    text = written("ping") + "\n" + written("get_weather", city="Rome", days=3)
    client = scripted(text, max_model_len=2000)
    num_tokens = len(client.service.tokenizer.encode(text))
    fields = {"tools": [WEATHER, PING], "stream": stream, **QUIET}
    reasons = set()
    for limit in [*range(1, num_tokens, 3), num_tokens, num_tokens + 1]:
        calls, content, reason = choice_of(client.chat(max_tokens=limit, **fields), stream=stream)
        reasons.add(reason)
        assert calls[:1] in ([], [("ping", "{}")])
        for name, arguments in calls[1:]:
            assert name == "get_weather"
            is_complete = limit >= num_tokens
            assert arguments == '{"city": "Rome", "days": 3}' if is_complete else arguments[-1] != "}"
        assert content == ""
    assert reasons == {"length", "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["Rome", "<function", "\n</parameter>", "tool_call", "days", "ping"])
def test_stop_strings_are_not_searched_in_calls(scripted, stop, stream):
    client = scripted("Rom\n" + written("get_weather", city="Rome", days=3) + written("ping"), max_model_len=2000)
    response = client.chat(tools=[WEATHER, PING], stop=[stop], stream=stream, **QUIET)
    assert choice_of(response, stream=stream) == (
        [("get_weather", '{"city": "Rome", "days": 3}'), ("ping", "{}")],
        "Rom",
        "tool_calls",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_behind_a_call_ends_the_answer_with_the_call(scripted, stream):
    client = scripted(written("ping") + "\nSo END and " + written("ping"), max_model_len=2000)
    response = client.chat(tools=[PING], stop=["END"], stream=stream, **QUIET)
    assert choice_of(response, stream=stream) == ([("ping", "{}")], "So ", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_off_by_a_stop_token_is_not_told_as_a_complete_one(scripted, stream):
    client = scripted(written("get_weather", city="Rome", days=3), max_model_len=2000)
    (letter,) = client.service.tokenizer.encode("R")
    response = client.chat(tools=[WEATHER], stop_token_ids=[letter], stream=stream, **QUIET)
    assert choice_of(response, stream=stream) == ([("get_weather", '{"city": "')], "", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_spelled_in_ordinary_tokens_is_text(make_service, tokenizer, stream):
    quoted = json.dumps({"text": written("ping")})
    spelled = tokenizer.encode_rendered(tokenizer.shield.cover(quoted))
    service = make_service(ScriptedRunner([*spelled, *tokenizer.encode("<|im_end|>")]), max_model_len=2000)
    client = Client(service)
    with service.engine:
        response = client.chat(tools=[PING], stream=stream, **QUIET)
        assert choice_of(response, stream=stream) == ([], quoted, "stop")


SMALL = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"side": {"enum": ["left", "right"]}, "sure": {"type": "boolean"}},
            "required": ["side", "sure"],
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_random_model_that_must_call_calls_with_fitting_arguments(tiny, choice, stream):
    options = {"tools": [SMALL, PING] if choice != "required" else [SMALL], "tool_choice": choice, **QUIET}
    response = tiny.chat(**options, parallel_tool_calls=False, max_tokens=150, seed=1, stream=stream)
    if stream:
        chunks = events(response)
        (call,) = collected(chunks)["calls"].values()
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        (body,) = response.json()["choices"]
        (call,) = [made["function"] for made in body["message"]["tool_calls"]]
        reason = body["finish_reason"]
    arguments = json.loads(call["arguments"])
    assert (call["name"], reason) == ("pick", "tool_calls")
    assert arguments["side"] in ("left", "right")
    assert arguments["sure"] in (True, False)


@pytest.mark.parametrize("name", ["", " ", "a>b", "<b", "a\nb", "x" * 257, " a", "a ", "<think>", "<|im_end|>"])
def test_a_property_that_cannot_be_written_in_a_call_is_refused_by_name(scripted, name):
    schemas = [
        {"type": "object", "properties": {"ok": {}, name: {"type": "string"}}},
        {"$ref": "#/$defs/All", "$defs": {"All": {"properties": {name: {}}}}},
    ]
    for schema in schemas:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        sentence = refused(scripted("ok").chat(tools=[tool]), 400, "tools")
        assert f"The tool 'f' has a property named {name[:64]!r}" in sentence


def test_other_names_of_properties_are_called_with(scripted):
    names = {"größe": "1", "a b": "2", "x" * 256: "3", "$ref": "4", "a=b": "5", "'": "6"}
    nested = {"type": "object", "properties": {"a>b": {}, "": {}}}
    schema = {"type": "object", "properties": {**{name: {"type": "integer"} for name in names}, "at": nested}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    client = scripted(written("f", **names, at='{"a>b": 1, "": 2}'), max_model_len=4000, num_pages=300)
    (choice,) = client.chat(tools=[tool], **QUIET).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    expected = {**{name: int(value) for name, value in names.items()}, "at": {"a>b": 1, "": 2}}
    assert json.loads(call["function"]["arguments"]) == expected


def test_two_tools_of_one_name_are_refused(scripted):
    for choice in ("auto", "none", "required"):
        sentence = refused(scripted("ok").chat(tools=[PING, WEATHER, PING], tool_choice=choice), 400, "tools")
        assert "tools.2 is named 'ping' like one before it" in sentence


def test_a_choice_that_cannot_be_is_refused_with_its_field(scripted):
    client = scripted("ok")
    named = {"type": "function", "function": {"name": "pong"}}
    assert "'pong', which is not among" in refused(client.chat(tools=[PING], tool_choice=named), 400, "tool_choice")
    both = {"tools": [PING], "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert "exclude each other" in refused(client.chat(**both), 400, "tool_choice")
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}
    assert "'f' are no JSON schema" in refused(client.chat(tools=[wrong], tool_choice="required"), 400, "tools")


THOUGHT = "Let me see.\n</think>\n\nIt is 42 — 世界 🙂."


def joined(chunks, field):
    return "".join(c["choices"][0]["delta"].get(field) or "" for c in chunks if c["choices"])


def test_a_chat_answer_has_openais_shape(scripted):
    body = scripted(THOUGHT).chat(model="tiny").json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "It is 42 — 世界 🙂.",
        "reasoning_content": "Let me see.",
        "reasoning": "Let me see.",
    }
    assert (choice["index"], choice["finish_reason"], body["object"]) == (0, "stop", "chat.completion")
    assert (body["model"], body["id"][:9]) == ("tiny", "chatcmpl-")
    made = len(THOUGHT.encode()) - len("</think>") + 2
    assert body["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": made,
        "total_tokens": 23 + made,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": len("Let me see.\n") + 1,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_a_stream_joins_to_the_whole_answer(scripted):
    client = scripted(THOUGHT)
    whole = client.chat().json()
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks, "content") == whole["choices"][0]["message"]["content"]
    for name in ("reasoning_content", "reasoning"):
        assert joined(chunks, name) == whole["choices"][0]["message"][name]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(scripted):
    assert all("usage" not in chunk for chunk in events(scripted("x").chat(stream=True)))


def test_without_thinking_all_is_content(scripted):
    message = scripted("Yes.").chat(**QUIET).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": None, "reasoning": None}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_limits_end_an_answer_by_length(scripted, limit):
    body = scripted("abcdef").chat(**{limit: 3}, **QUIET).json()
    assert body["choices"][0]["message"]["content"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


def test_history_and_parts_reach_the_prompt(scripted):
    client = scripted("ok")
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "Q"}]},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "user", "content": "Q2"},
    ]
    assert client.request("POST", "/v1/chat/completions", json_body={"messages": messages}).status_code == 200
    fed = [token for chunk in client.runner.chunks for token in chunk.token_ids]
    prompt = client.service.tokenizer.decode(fed)
    assert prompt.startswith("system\nS\nuser\nQ\nassistant\nA\nuser\nQ2\nassistant\n<think>\n")


def test_what_an_answer_held_may_come_back_as_history(scripted):
    client = scripted(THOUGHT)
    message = client.chat().json()["choices"][0]["message"]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {**message, "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "And?"},
    ]
    assert client.chat(messages=messages).status_code == 200
    # As LiteLLM sends it: it repeats what it does not know.
    copied = {"refusal": None, "reasoning": message["reasoning"], "reasoning_content": message["reasoning"]}
    plain = client.requests[-1].prompt
    messages[2]["provider_specific_fields"] = copied
    assert client.chat(messages=messages).status_code == 200
    assert client.requests[-1].prompt == plain
    messages[2]["provider_specific_fields"] = {"citations": []}
    assert client.chat(messages=messages).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(scripted, stream):
    client = scripted(THOUGHT)
    made = list(client.service.tokenizer.encode(THOUGHT))
    response = client.chat(return_token_ids=True, stream=stream)
    if stream:
        chunks = events(response)
        prompt_ids = chunks[0]["prompt_token_ids"]
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
        token_ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    else:
        prompt_ids, token_ids = response.json()["prompt_token_ids"], response.json()["choices"][0]["token_ids"]
    assert token_ids == made
    assert client.service.tokenizer.decode(prompt_ids) == "user\nHi\nassistant\n<think>\n"


def test_the_random_model_answers_the_same_streamed_and_whole(tiny):
    for way in ({"temperature": 0}, {"seed": 12}):
        whole = tiny.chat(max_tokens=60, **way).json()
        chunks = events(tiny.chat(max_tokens=60, stream=True, **way))
        message = whole["choices"][0]["message"]
        assert joined(chunks, "content") == message["content"]
        assert joined(chunks, "reasoning_content") == (message["reasoning_content"] or "")
        assert message["content"] or message["reasoning_content"]
