"""Anthropic's Messages API, mostly through the official client over real sockets."""

import base64
import json

import anthropic
import pytest

from onebox.server.keys import ApiKey
from onebox.server.schemas.anthropic import CountTokensRequest, MessagesRequest
from onebox.server.settings import ServerSettings
from tests.server import test_media as media
from tests.server.conftest import wait_until
from tests.server.endpoints.test_chat import ANSWERS, QUIET, THOUGHT, WEATHER, written
from tests.server.schemas.test_fields import VALUES

ASK = [{"role": "user", "content": "Hi"}]
THINK = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
TOOLS = [
    {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER["function"]["parameters"]},
    {"name": "ping", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}},
]


def ask(client, **fields):
    return client.messages.create(**{"model": "tiny", "max_tokens": 500, "messages": ASK, **fields})


def without_ids(content):
    return [{name: held for name, held in block.to_dict().items() if name != "id"} for block in content]


def refused(response, status, kind):
    """The message of a refusal, after its shape was checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert (body.keys(), body["type"]) == ({"type", "error"}, "error")
    assert (body["error"].keys(), body["error"]["type"]) == ({"type", "message"}, kind)
    assert body["error"]["message"].endswith(".")
    return body["error"]["message"]


def post(client, path="/v1/messages", **fields):
    body = {"model": "tiny", "max_tokens": 50, "messages": ASK, **fields}
    return client.request("POST", path, json_body={name: held for name, held in body.items() if held is not ...})


def prompt_of(server):
    """What the engine was last asked."""
    return server.service.tokenizer.decode(server.requests[-1].prompt)


def test_an_answer_has_thinking_text_and_usage(anthropic_client):
    message = ask(anthropic_client(THOUGHT), **THINK)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me see.")
    assert (text.type, text.text) == ("text", "It is 42 — 世界 🙂.")
    assert thinking.signature
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "tiny")
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens == len(THOUGHT.encode()) - len("</think>") + 2
    assert message.usage.output_tokens_details.thinking_tokens == len("Let me see.\n") + 1
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (23, 0)


@pytest.mark.parametrize("text", [THOUGHT, *ANSWERS.values()], ids=["plain", *ANSWERS])
def test_a_stream_joins_to_the_whole_answer(anthropic_client, text):
    client = anthropic_client(text)
    options = {"tools": TOOLS, **THINK}
    whole = ask(client, **options)
    with client.messages.stream(model="tiny", max_tokens=500, messages=ASK, **options) as stream:
        streamed = stream.get_final_message()
    assert without_ids(streamed.content) == without_ids(whole.content)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    used = streamed.usage.to_dict()
    assert used["input_tokens"] + used["cache_read_input_tokens"] == whole.usage.input_tokens
    assert used["output_tokens"] == whole.usage.output_tokens


def test_calls_are_blocks_in_the_order_in_which_they_were_made(anthropic_client):
    message = ask(anthropic_client(ANSWERS["inside reasoning"]), tools=TOOLS, **THINK)
    assert [block.type for block in message.content] == ["thinking", "tool_use", "thinking", "text"]
    assert message.stop_reason == "tool_use"
    first, second = [
        block for block in ask(anthropic_client(ANSWERS["two"]), tools=TOOLS).content if block.type == "tool_use"
    ]
    assert first.input == {"city": 'a "b"\n<c>', "days": 3}
    assert (second.name, second.input) == ("ping", {})
    assert first.id != second.id


def test_the_events_of_a_stream_come_in_anthropics_order(anthropic_client):
    client = anthropic_client("A.\n</think>\n\n" + written("ping"))
    events = list(ask(client, stream=True, tools=TOOLS, **THINK))
    kinds = [event.type for event in events if event.type != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "input_json_delta"]
    for index in (0, 1):
        own = [event.type for event in events if getattr(event, "index", None) == index]
        assert (own[0], own[-1]) == ("content_block_start", "content_block_stop")
        assert set(own[1:-1]) == {"content_block_delta"}


def test_history_comes_back_as_the_client_holds_it(anthropic_client):
    client = anthropic_client("I look.\n</think>\n\n" + written("ping"))
    first = ask(client, tools=TOOLS, **THINK)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "pong"}]}
    failed = {**result, "content": "no line", "is_error": True}
    later = {"type": "text", "text": "Go on."}
    messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result, failed]}]
    ask(client, messages=[*messages, {"role": "user", "content": [later]}], tools=TOOLS, **THINK)
    prompt = prompt_of(client.server)
    assert "<tool_call>\n<function=ping>\n</function>\n</tool_call>" in prompt
    assert "<tool_response>\npong\n</tool_response>" in prompt
    assert "<tool_response>\nError: no line\n</tool_response>" in prompt
    assert prompt.endswith("</tool_response>\nuser\nGo on.\nassistant\n<think>\n")


def test_thinking_between_calls_is_kept_for_the_model(anthropic_client):
    client = anthropic_client("I look.\n</think>\n\n" + written("ping"))
    first = ask(client, tools=TOOLS, **THINK)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id}
    messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    ask(client, messages=messages, tools=TOOLS, **THINK)
    assert "<think>\nI look.\n</think>" in prompt_of(client.server)


def test_an_agents_request_works_and_its_changing_header_does_not_reach_the_prompt(anthropic_client):
    client = anthropic_client("Done.")
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=ab12;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "Be brief. " * 20, "cache_control": {"type": "ephemeral"}},
    ]
    tools = [{**TOOLS[0], "name": f"tool_{place}", "type": "custom"} for place in range(6)]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "<note>a</note>"}, {"type": "text", "text": "Do it."}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "tool_1", "input": {"city": "a"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]},
        {"role": "system", "content": "A reminder."},
    ]
    extra = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    options = {"system": system, "tools": tools, "messages": messages, "metadata": {"user_id": "u"}}
    message = ask(
        client, **options, thinking={"type": "adaptive"}, output_config={"effort": "max"}, max_tokens=32000,
        extra_body=extra, extra_query={"beta": "true"},
    )  # fmt: skip
    assert message.context_management == {"applied_edits": []}
    prompt = prompt_of(client.server)
    assert "cch=" not in prompt
    assert prompt.index('"name": "tool_5"') < prompt.index("You help.\n\nBe brief.") < prompt.index("A reminder.")
    assert prompt.endswith("<think>\n")


def test_more_tokens_than_the_context_holds_are_as_many_as_it_holds_and_told(anthropic_client, caplog):
    caplog.set_level("INFO", "onebox")
    client = anthropic_client("x" * 500, max_model_len=100)
    message = ask(client, max_tokens=32000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 100
    # The request's line is written after its reply.
    wait_until(lambda: "max_tokens 32000 was lowered to" in caplog.text)
    assert ask(client, max_tokens=5).stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(anthropic_client, stream):
    client = anthropic_client("one two END three")
    options = {"model": "tiny", "max_tokens": 50, "messages": ASK, "stop_sequences": ["nope", "END"]}
    if stream:
        with client.messages.stream(**options) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**options)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert message.content[0].text == "one two "


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, False),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"output_config": {"effort": "low"}}, True),
        (THINK, True),
    ],
)
def test_thinking_is_on_where_it_is_asked_for(scripted, fields, thinks):
    client = scripted("ok")
    assert post(client, **fields).status_code == 200
    assert prompt_of(client).endswith("<think>\n") == thinks


def test_the_budget_closes_the_thinking(anthropic_client):
    client = anthropic_client("x" * 400)
    thinking, text = ask(client, thinking={"type": "enabled", "budget_tokens": 20}, max_tokens=200).content
    assert thinking.thinking.startswith("x" * 20 + "\n\nConsidering the limited time")
    assert text.text.startswith("xx")


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_thinking_is_a_block_without_text(anthropic_client, stream):
    thinking = {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}
    client = anthropic_client(THOUGHT)
    if stream:
        with client.messages.stream(model="tiny", max_tokens=500, messages=ASK, thinking=thinking) as events:
            message = events.get_final_message()
    else:
        message = ask(client, thinking=thinking)
    assert [(block.type, getattr(block, "thinking", None)) for block in message.content] == [
        ("thinking", ""),
        ("text", None),
    ]


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "pick"}],
)
def test_a_random_model_that_must_call_calls_with_fitting_input(tiny, choice):
    schema = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
    tools = [{"name": "pick", "input_schema": schema}]
    body = post(tiny, tools=tools, tool_choice=choice, max_tokens=150, temperature=1.0, top_k=20).json()
    (call,) = body["content"]
    assert (call["type"], call["name"], body["stop_reason"]) == ("tool_use", "pick", "tool_use")
    assert call["input"]["side"] in ("left", "right")


def test_a_random_model_is_held_to_the_output_format(tiny):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    config = {"format": {"type": "json_schema", "schema": schema}}
    body = post(tiny, output_config=config, max_tokens=200).json()
    assert json.loads(body["content"][0]["text"]).keys() == {"ok"}


def test_an_image_is_seen_as_in_a_chat(vision_client):
    vision_client.chat([media.text_part("See:"), media.image_part(media.PICTURE)], max_tokens=1, **QUIET)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(media.PICTURE).decode()}
    blocks = [{"type": "text", "text": "See:"}, {"type": "image", "source": source}]
    messages = [{"role": "user", "content": blocks}]
    counted = post(vision_client, "/v1/messages/count_tokens", messages=messages, max_tokens=...).json()["input_tokens"]
    assert post(vision_client, messages=messages, max_tokens=1).status_code == 200
    chat, message = vision_client.requests
    assert message.prompt == chat.prompt
    assert len(message.prompt) == counted
    assert (message.vision.images.patches == chat.vision.images.patches).all()


def test_a_model_without_a_tower_refuses_images(scripted):
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    response = post(scripted("ok"), messages=[{"role": "user", "content": [result]}])
    assert "reads text only" in refused(response, 400, "invalid_request_error")


def test_a_choice_of_none_keeps_the_tools_from_the_model(scripted):
    client = scripted(written("ping"))
    body = post(client, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=200).json()
    assert "ping" not in prompt_of(client)
    assert body["content"] == [{"type": "text", "text": written("ping")}]


def test_tokens_are_counted_as_a_request_reads_them(anthropic_client):
    client = anthropic_client("ok")
    options = {"model": "tiny", "messages": ASK, "system": "S", "tools": TOOLS, **THINK}
    counted = client.messages.count_tokens(**options).input_tokens
    assert counted == ask(client, **options).usage.input_tokens > 100


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": ...}, "max_tokens is missing."),
        ({"unheard_of": 1}, "unheard_of is not supported"),
        ({"messages": []}, "messages: "),
        ({"messages": [*ASK, {"role": "assistant", "content": "I"}]}, "not continued here"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0: the type must be"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing."),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "holds no thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "'x', which is not among the tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: name is given exactly"),
        ({"thinking": {"type": "enabled"}}, "thinking: budget_tokens is given exactly"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "schema"),
    ],
)
def test_refusals_have_anthropics_shape_and_name_the_field(scripted, fields, says):
    assert says in refused(post(scripted("ok"), **fields), 400, "invalid_request_error")


def test_the_official_client_understands_refusals(anthropic_client):
    client = anthropic_client(
        "ok", ServerSettings(api_keys=(ApiKey("test", "none"),), max_body_bytes=4000), max_model_len=100
    )
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        ask(client, model="other")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 2\d\d tokens > 99 maximum"):
        ask(client, system="x" * 200)
    with pytest.raises(anthropic.RequestTooLargeError, match="longer than 4000 bytes"):
        ask(client, system="x" * 5000)
    with pytest.raises(anthropic.AuthenticationError) as error:
        ask(client.with_options(api_key="wrong"))
    assert error.value.body["error"]["type"] == "authentication_error"
    assert ask(client).content[0].text == "ok"


def test_overload_is_told_with_the_time_to_wait(anthropic_client):
    client = anthropic_client("ok", max_num_seqs=1, max_num_waiting=0)
    client.server.runner.gate.clear()
    with ask(client, stream=True), pytest.raises(anthropic.RateLimitError) as error:
        ask(client)
    assert int(error.value.response.headers["retry-after"]) >= 1


def test_a_failure_after_the_start_is_an_error_event(anthropic_client, tokenizer):
    client = anthropic_client("ok", fails_on=tokenizer.encode("é")[0])
    with pytest.raises(anthropic.APIStatusError) as error:
        list(ask(client, messages=[{"role": "user", "content": "é"}], stream=True))
    assert error.value.body["error"]["type"] == "api_error"
    assert "a scripted failure" in error.value.body["error"]["message"]


def test_a_client_that_leaves_frees_its_slot(anthropic_client):
    client = anthropic_client("x" * 2000)
    client.server.runner.gate.clear()
    stream = ask(client, max_tokens=2000, stream=True)
    stream.close()
    client.server.runner.gate.set()
    wait_until(lambda: client.server.service.engine.stats().num_running == 0)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_no_value_of_any_field_is_a_failure(tiny, path):
    model = MessagesRequest if path == "/v1/messages" else CountTokensRequest
    base = {} if path == "/v1/messages" else {"max_tokens": ...}
    for field in model.model_fields:
        for value in VALUES:
            response = post(tiny, path, **{**base, "max_tokens": base.get("max_tokens", 1), field: value})
            assert response.status_code < 500, (field, value, response.text)
            assert response.status_code == 200 or response.json()["error"]["message"].endswith(".")


@pytest.mark.parametrize("limit", [20, 30, 60, 75])
def test_a_call_cut_off_by_the_limit_is_not_told_as_a_complete_one(anthropic_client, limit):
    text = "Well.\n" + written("get_weather", city="Rome, the city on the Tiber, of seven hills", days=3)
    client = anthropic_client(text)
    whole = ask(client, tools=TOOLS, max_tokens=limit)
    assert (whole.stop_reason, without_ids(whole.content)) == ("max_tokens", [{"type": "text", "text": "Well."}])
    events = list(ask(client, tools=TOOLS, max_tokens=limit, stream=True))
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    written_json = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
    assert "}" not in written_json
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert starts == (["text", "tool_use"] if written_json else ["text"])
    assert next(event.delta.stop_reason for event in events if event.type == "message_delta") == "max_tokens"


def test_stop_sequences_are_not_searched_in_calls(anthropic_client):
    message = ask(anthropic_client(written("get_weather", city="Rome", days=3)), tools=TOOLS, stop_sequences=["Rome"])
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.content[0].input == {"city": "Rome", "days": 3}
