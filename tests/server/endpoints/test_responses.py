"""The Responses API, mostly through the official client over real sockets."""

import json
from typing import Literal

import openai
import pydantic
import pytest

from onebox.server.schemas.responses import ResponsesRequest
from tests.server import test_media as media
from tests.server.conftest import listening
from tests.server.endpoints.test_chat import ANSWERS, THOUGHT, WEATHER, written
from tests.server.schemas.test_fields import VALUES
from tests.server.test_errors import refused

QUIET = {"reasoning": {"effort": "none"}}
TOOLS = [{"type": "function", **WEATHER["function"]}, {"type": "function", "name": "ping", "parameters": {}}]


def ask(client, asked="Hi", **fields):
    return client.responses.create(model="tiny", input=asked, **fields)


def post(client, **fields):
    return client.request("POST", "/v1/responses", json_body={"input": "Hi", **fields})


def prompt_of(server):
    """What the engine was last asked."""
    return server.service.tokenizer.decode(server.requests[-1].prompt)


def without_ids(value):
    """Items as the server sent them: without what differs from answer to answer, and what the client adds."""
    if isinstance(value, list):
        return [without_ids(held) for held in value]
    if isinstance(value, dict):
        added = ("id", "call_id", "parsed", "parsed_arguments")
        return {name: without_ids(held) for name, held in value.items() if name not in added}
    return without_ids(value.to_dict()) if hasattr(value, "to_dict") else value


def test_an_answer_has_items_and_usage(openai_client):
    response = ask(openai_client(THOUGHT), instructions="Be brief.", metadata={"a": "b"})
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Let me see.", [])
    assert (message.type, message.status, response.output_text) == ("message", "completed", "It is 42 — 世界 🙂.")
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.id[:5], response.model, response.metadata) == ("resp_", "tiny", {"a": "b"})
    usage = response.usage
    assert usage.output_tokens == len(THOUGHT.encode()) - len("</think>") + 2
    assert usage.output_tokens_details.reasoning_tokens == len("Let me see.\n") + 1
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize("text", [THOUGHT, *ANSWERS.values()], ids=["plain", *ANSWERS])
def test_a_stream_joins_to_the_whole_answer(openai_client, text):
    client = openai_client(text)
    whole = ask(client, tools=TOOLS)
    texts, deltas, done = {}, {}, {}
    with client.responses.stream(model="tiny", input="Hi", tools=TOOLS) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            place = getattr(event, "output_index", None)
            if event.type.endswith(".delta"):
                deltas[place] = deltas.get(place, "") + event.delta
            elif event.type.endswith(("text.done", "arguments.done")):
                texts[place] = event.text if hasattr(event, "text") else event.arguments
            elif event.type == "response.output_item.done":
                done[place] = event.item
        final = stream.get_final_response()
    assert {place: text for place, text in texts.items() if text} == deltas
    assert without_ids(final.output) == without_ids(whole.output)
    assert without_ids([*done.values()]) == without_ids(whole.output)
    assert [item.id for item in done.values()] == [item.id for item in final.output]
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_events_of_a_stream_come_in_openais_order(openai_client):
    events = list(ask(openai_client("A.\n</think>\n\nB.\n" + written("ping")), tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added", "X.delta", "X.done", "content_part.done", "output_item.done"]
    expected = ["created", "in_progress"]
    expected += [kind.replace("X", "reasoning_text") for kind in text]
    expected += [kind.replace("X", "output_text") for kind in text]
    expected += ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    expected += ["output_item.done", "completed"]
    assert [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]] == expected


def test_history_comes_back_as_the_client_holds_it(openai_client):
    client = openai_client("I look.\n</think>\n\n" + written("get_weather", city="Rome", days=3))
    first = ask(client, tools=TOOLS)
    call = first.output[-1]
    assert json.loads(call.arguments) == {"city": "Rome", "days": 3}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    for output in (first.output, [item.model_dump() for item in first.output]):
        ask(client, [{"role": "user", "content": "Hi"}, *output, result], tools=TOOLS, instructions="Be brief.")
        prompt = prompt_of(client.server)
        assert "Be brief." in prompt
        assert "<think>\nI look.\n</think>" in prompt
        assert "<function=get_weather>\n<parameter=city>\nRome\n</parameter>" in prompt
        assert "<tool_response>\nsunny\n</tool_response>" in prompt
        assert prompt.count("assistant\n") == 2


def test_reasoning_that_a_client_keeps_only_sealed_reaches_the_prompt(openai_client):
    client = openai_client("I look.\n</think>\n\n" + written("ping"))
    first = ask(client, tools=TOOLS, include=["reasoning.encrypted_content"], store=False)
    reasoning, call = first.output
    kept = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "ok"}]}
    ask(client, [{"role": "user", "content": "Hi"}, kept, call, result], tools=TOOLS)
    assert "<think>\nI look.\n</think>" in prompt_of(client.server)


def test_messages_of_all_roles_and_forms_reach_the_prompt(scripted):
    client = scripted("ok", max_model_len=2000)
    parts = [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Three", "annotations": []}]},
        {"role": "user", "content": "Four"},
    ]
    assert post(client, input=items, **QUIET).status_code == 200
    prompt = prompt_of(client)
    assert prompt.startswith("system\nRules.\nuser\nOneTwo\nassistant\n")
    assert "Three\nuser\nFour\nassistant\n" in prompt


def test_an_image_is_seen_as_in_a_chat(vision_client):
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    vision_client.chat([media.text_part("See:"), media.image_part(media.PICTURE)], max_tokens=1, **quiet)
    image = {"type": "input_image", "image_url": media.data_url(media.PICTURE), "detail": "auto"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "See:"}, image]}]
    assert post(vision_client, input=items, max_output_tokens=1, **QUIET).status_code == 200
    chat, response = vision_client.requests
    assert response.prompt == chat.prompt
    assert (response.vision.images.patches == chat.vision.images.patches).all()


def test_a_model_without_a_tower_refuses_images(scripted):
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]}]
    assert "reads text only" in refused(post(scripted("ok"), input=items), 400, "input")


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_leaves_the_response_incomplete(openai_client, stream):
    options = {"max_output_tokens": 3, **QUIET}
    client = openai_client("abcdef")
    if stream:
        *_, last = ask(client, stream=True, **options)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = ask(client, **options)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("abc", "incomplete")


def test_a_failure_after_the_start_is_a_failed_response(openai_client, tokenizer):
    client = openai_client("ok", fails_on=tokenizer.encode("é")[0])
    *_, last = ask(client, "é", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert "a scripted failure" in last.response.error.message
    with pytest.raises(openai.InternalServerError, match="a scripted failure"):
        ask(client, "é")
    assert ask(client, **QUIET).output_text == "ok"


class Answer(pydantic.BaseModel):
    side: Literal["left", "right"]
    sure: bool


def test_a_random_model_is_held_to_the_format_that_the_official_client_asks_for(tiny):
    with listening(tiny.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "tiny", "input": "Hi", "max_output_tokens": 200, **QUIET}
        assert client.responses.parse(**options, text_format=Answer).output_parsed.side in ("left", "right")
        free = client.responses.create(**{**options, "max_output_tokens": 20}, text={"format": {"type": "json_object"}})
    assert free.output_text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "pick"}])
def test_a_random_model_that_must_call_calls_with_fitting_arguments(tiny, choice):
    parameters = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
    tools = [{"type": "function", "name": "pick", "parameters": parameters}]
    options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 150}
    body = post(tiny, **options, **QUIET).json()
    (call,) = body["output"]
    assert (call["type"], call["name"], body["status"]) == ("function_call", "pick", "completed")
    assert json.loads(call["arguments"])["side"] in ("left", "right")
    assert (body["tool_choice"], body["parallel_tool_calls"]) == (choice, False)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"unheard_of": 1}, "unheard_of", "unheard_of is not supported"),
        ({"background": True, "stream": True}, None, "exclude each other"),
        ({"background": True, "store": False}, None, "Background needs store"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, None, "there are no tools"),
        ({"tool_choice": "required"}, None, "there are no tools"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "an item's type must be one of message"),
        ({"input": [{"role": "user"}]}, "input.0.content", "input.0.content is missing."),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type", "input_text"),
        ({"input": [{"type": "reasoning", "encrypted_content": "%"}]}, "input.0.encrypted_content", "not made by this"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema is given exactly"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format.schema", "schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"include": ["web_search_call.results"]}, "include.0", "encrypted_content"),
    ],
)
def test_what_would_not_be_honoured_is_refused_with_its_field(scripted, fields, param, says):
    assert says in refused(post(scripted("ok"), **fields), 400, param)


def test_more_than_the_context_holds_is_refused_with_both_numbers(openai_client):
    with pytest.raises(openai.BadRequestError, match=r"context holds 100") as error:
        ask(openai_client("ok", max_model_len=100), "x" * 200)
    assert error.value.code == "context_length_exceeded"


def test_a_limit_beyond_the_context_is_lowered_to_what_is_left_and_told(scripted, caplog):
    caplog.set_level("INFO", "onebox")
    client = scripted("x" * 500, max_model_len=100)
    body = post(client, max_output_tokens=64_000, **QUIET).json()
    used = body["usage"]
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["max_output_tokens"] == used["output_tokens"] == 100 - used["input_tokens"]
    assert "max_output_tokens 64000 was lowered to" in caplog.text


def test_no_value_of_any_field_is_a_failure(tiny):
    for field in ResponsesRequest.model_fields:
        for value in VALUES:
            response = post(tiny, **{"max_output_tokens": 1, field: value})
            assert response.status_code < 500, (field, value, response.text)
            assert response.status_code == 200 or response.json()["error"]["message"].endswith(".")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_off_by_the_limit_is_incomplete(openai_client, stream):
    tools = [{"type": "function", **WEATHER["function"]}]
    client = openai_client(written("ping") + written("get_weather", city="Rome", days=3))
    options = {"tools": tools, "max_output_tokens": 75, **QUIET}
    if stream:
        *_, last = client.responses.create(model="tiny", input="Hi", stream=True, **options)
        response = last.response
    else:
        response = ask(client, **options)
    first, second = response.output
    assert (first.name, first.arguments, first.status) == ("ping", "{}", "completed")
    assert (second.name, second.status, response.status) == ("get_weather", "incomplete", "incomplete")
    assert second.arguments.startswith('{"city": "')
    assert "}" not in second.arguments
