"""/v1/cache/lookup: the figure is that of the usage of the request sent next, whatever makes up its prompt."""

import base64
import io
import itertools
import json

import pytest
from PIL import Image

from onebox.engine.api import Request
from onebox.server.keys import ApiKey
from onebox.server.settings import ServerSettings
from tests.server.conftest import Client

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
NUMBERS = itertools.count()


def document(size=500):
    """A text that no other test has sent."""
    return f"No. {next(NUMBERS)}. ".ljust(size, ".")


def question(text, ask="What is it?"):
    return {"messages": [{"role": "system", "content": text}, {"role": "user", "content": ask}]}


def look_up(client, path="/v1/cache/lookup", **body):
    response = client.request("POST", path, json_body=body)
    assert response.status_code == 200, response.text
    return response.json()


def asked(client, **body):
    """(prompt tokens, cached tokens) of an answered chat."""
    usage = client.request("POST", "/v1/chat/completions", json_body={**body, "max_tokens": 2}).json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def told(reply):
    return reply["num_tokens"], reply["cached_tokens"]


VARIANTS = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "tools that are hidden": {"tools": TOOLS, "tool_choice": "none"},
    "a call": {"tools": TOOLS, "tool_choice": "required"},
    "no thinking": {"enable_thinking": False},
    "no thinking, by the template": {"chat_template_kwargs": {"enable_thinking": False}},
    "no thinking, by effort": {"reasoning_effort": "none"},
    "a budget": {"thinking_budget": 100},
    "an opt-out": {"cache_prompt": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_lookup_of_a_chat_tells_what_its_answer_will(tiny, name):
    fields = VARIANTS[name]
    chat = {**question(document()), **fields}
    before = look_up(tiny, **chat)
    assert told(before) == asked(tiny, **chat)
    assert (before["cached_tokens"], before["tier"]) == (0, None)
    after = look_up(tiny, **chat)
    other = look_up(tiny, **{**chat, **question(chat["messages"][0]["content"], "And in other words?")})
    expected = (asked(tiny, **chat), asked(tiny, **{**chat, "messages": [chat["messages"][0], other_turn()]}))
    assert (told(after), told(other)) == expected
    is_cached = fields.get("cache_prompt", True)
    assert (after["cached_tokens"] > 400, after["tier"]) == ((True, "memory") if is_cached else (False, None))
    assert (other["cached_tokens"] > 400) == is_cached
    assert (after["memory_tokens"], after["disk_tokens"]) == (after["cached_tokens"], 0)


def other_turn():
    return {"role": "user", "content": "And in other words?"}


def test_a_change_at_the_start_of_the_prompt_finds_nothing(tiny):
    text = document()
    asked(tiny, **question(text))
    assert look_up(tiny, **question(text), tools=TOOLS)["cached_tokens"] == 0


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_lookup_of_a_prompt_tells_what_its_completion_will(tiny, as_ids):
    text = document()
    prompt = list(tiny.service.tokenizer.encode(text)) if as_ids else text
    counts = []
    for _ in range(2):
        reply = look_up(tiny, prompt=prompt)
        usage = tiny.complete(prompt, max_tokens=2).json()["usage"]
        assert told(reply) == (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        counts.append(reply["cached_tokens"])
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize(
    "fields", [{}, {"thinking": {"type": "enabled", "budget_tokens": 50}}, {"cache_prompt": False}]
)
def test_anthropics_shape_has_its_own_path_and_its_own_rendering(tiny, fields):
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    turn = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]
    body = {"model": "tiny", "system": document(), "messages": turn, "tools": tools, **fields}
    counts = []
    for _ in range(2):
        reply = look_up(tiny, "/v1/messages/cache_lookup", **body)
        usage = tiny.request("POST", "/v1/messages", json_body={**body, "max_tokens": 2}).json()["usage"]
        assert told(reply) == (
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["cache_read_input_tokens"],
        )
        counts.append(reply["cached_tokens"])
    assert counts[0] == 0
    assert (counts[1] > 400) == ("cache_prompt" not in fields)


def test_every_dialect_can_opt_out(tiny):
    bodies = {
        "/v1/responses": {"input": document(), "max_output_tokens": 2},
        "/v1/messages": {"model": "tiny", "max_tokens": 2, "messages": question(document())["messages"]},
        "/v1/chat/completions": {**question(document()), "max_tokens": 2},
        "/v1/completions": {"prompt": document(), "max_tokens": 2},
    }
    for path, body in bodies.items():
        hits = []
        for cache_prompt in (False, False, True, True):
            before = tiny.service.engine.stats().prefix.num_hits
            answer = tiny.request("POST", path, json_body={**body, "cache_prompt": cache_prompt})
            assert answer.status_code == 200, answer.text
            hits.append(tiny.service.engine.stats().prefix.num_hits - before)
        assert hits == [0, 0, 0, 1], path


def test_pictures_are_part_of_the_prompt(vision_client):
    def chat(colour):
        data = io.BytesIO()
        Image.new("RGB", (64, 64), colour).save(data, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x" * 300}]
        return {"messages": [{"role": "user", "content": parts}]}

    red, blue = (200, 0, 0), (0, 0, 200)
    first = asked(vision_client, **chat(red))
    seen, unseen = look_up(vision_client, **chat(red)), look_up(vision_client, **chat(blue))
    assert told(seen) == asked(vision_client, **chat(red))
    assert told(unseen) == (first[0], 0)
    assert seen["cached_tokens"] > 100


def test_a_lookup_is_no_request_and_no_hit(tiny):
    text = document()
    asked(tiny, **question(text))
    before, num_requests = tiny.service.engine.stats(), len(tiny.requests)
    look_up(tiny, **question(text))
    assert (tiny.service.engine.stats(), len(tiny.requests)) == (before, num_requests)


def test_a_busy_engine_answers_lookups(scripted):
    client = scripted("ok", num_checkpoints=4, boundary_token_ids=())
    text = "x" * 200
    client.complete(text, max_tokens=1)
    client.runner.gate.clear()
    client.service.engine.submit(Request("held", (1, 2, 3)))
    assert look_up(client, prompt=text)["cached_tokens"] == 192


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "Hi", "stream": True}, "stream", "stream"),
        ({"prompt": "Hi", "max_tokens": 5}, "max_tokens", "max_tokens"),
        ({**question("Hi"), "temperature": 1}, "temperature", "temperature"),
        ({**question("Hi"), "stream": False}, "stream", "stream"),
        ({**question("Hi"), "prompt": "Hi"}, None, "Give either prompt or messages"),
        ({}, None, "Give either prompt or messages"),
        ({"prompt": ["Hi", "you"]}, "prompt.0", "prompt"),
        ({"prompt": "Hi", "tools": TOOLS}, "tools", "tools"),
        ({"prompt": ""}, None, "The prompt is empty"),
        ({"prompt": [1, 400]}, None, "token id 400"),
        ({"messages": []}, "messages", "messages"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused_by_name(scripted, body, param, words):
    response = scripted("ok").request("POST", "/v1/cache/lookup", json_body=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in error["message"]
    assert error["param"] == param


def test_a_lookup_is_refused_like_the_request_it_is_for(scripted):
    client = scripted("ok")
    long = client.request("POST", "/v1/cache/lookup", json_body={"prompt": "x" * 400})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    other = client.request("POST", "/v1/cache/lookup", json_body={"prompt": "Hi", "model": "other"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    theirs = client.request("POST", "/v1/messages/cache_lookup", json_body={"model": "tiny", "stream": True})
    assert (theirs.status_code, theirs.json()["type"]) == (400, "error")
    client.service.engine.close()
    stopped = client.request("POST", "/v1/cache/lookup", json_body={"prompt": "Hi"})
    assert (stopped.status_code, stopped.json()["error"]["code"]) == (503, "engine_stopped")


def test_a_lookup_needs_the_key(scripted):
    client = Client(scripted("ok").service, ServerSettings(api_keys=(ApiKey("one", "secret"),)))
    body = {"content": json.dumps({"prompt": "Hi"})}
    for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        assert client.request("POST", "/v1/cache/lookup", headers=headers, **body).status_code == status


def test_the_description_of_the_api_has_both_shapes_and_the_reply(scripted):
    spec = scripted("ok").app.openapi()
    body = spec["paths"]["/v1/cache/lookup"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = [one["$ref"].rpartition("/")[2] for one in body.get("anyOf", body.get("oneOf"))]
    assert names == ["PromptLookupRequest", "ChatLookupRequest"]
    fields = spec["components"]["schemas"]["CacheLookupReply"]["properties"]
    assert [*fields] == ["num_tokens", "cached_tokens", "tier", "memory_tokens", "disk_tokens"]
