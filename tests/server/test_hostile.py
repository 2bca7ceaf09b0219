"""Requests of all endpoints, mutated at random: no 5xx, always the documented shape, nothing left in the engine."""

import asyncio
import copy
import json
import random

import httpx
import numpy as np
import pytest

from tests.server.conftest import LogprobRunner, wait_until

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "seed": 7,
    "stop": ["END"],
    "stop_token_ids": [3],
    "max_tokens": 5,
    "min_tokens": 1,
    "ignore_eos": False,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "cache_prompt": False,
    "priority": 1,
    "user": "u",
    "metadata": {"a": {"b": [1, 2.5, "x", None]}},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True},
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "guided_json": SCHEMA}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_completion_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        },
    ),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 3, "echo": True, "logprobs": 2, "n": 2}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/completions", {"prompt": [1, 2, 3], "stop": "x", "stream": True, "guided_choice": ["a", "b"]}),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "auto",
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "max_output_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.5,
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": {"b": [1]}},
            "client_metadata": {"x": 1},
            "store": False,
            "stream": True,
        },
    ),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "metadata": {"a": "b"}}),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "top_k": 3,
            "metadata": {"user_id": "u"},
            "stream": True,
        },
    ),
    ("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


VALUES = [
    *(None, True, False, 0, -1, 1, 2, 2**31, -(2**31), 2**63, 10**30, int("9" * 4000), 0.0, -0.0, 0.5, 1e-309, 1e-308),
    *(
        5e-324,
        1e308,
        -1e308,
        1e-12,
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "x",
        "Hi",
        "\0",
        "\ud800",
        "🙂" * 50,
    ),
    *("x" * 600, "x" * 100_000, "</think>", "<|im_end|>", "9" * 5000, "-1", "1e5", "NaN", "null", "auto", "required"),
    *([], [[]], [None], ["x"] * 2000, [0] * 2000, [{}], [{"type": "text"}], ["END"] * 17, {}, {"": ""}, {"a": None}),
    *(
        {"type": "text"},
        {"type": []},
        {"9" * 5000: 1},
        {"x" * 5000: 1},
        {str(i): 1 for i in range(5000)},
    ),
    *(nested(5), nested(45), nested(100), {"$ref": []}, {"$ref": "#"}, {"type": "object", "properties": []}),
]


class MaskedRunner(LogprobRunner):
    """Says what a grammar allows where it does not allow the script."""

    def _chunk(self, chunk):
        return self._allowed(chunk.draw, super()._chunk(chunk))

    def _rows(self, rows):
        return self._allowed(rows.draw, super()._rows(rows))

    def _allowed(self, draw, result):
        mask = draw.adjustments[0].mask if draw and draw.adjustments else None
        if mask is None:
            return result
        allowed = np.flatnonzero(np.unpackbits(np.asarray(mask).view(np.uint8), bitorder="little"))
        token_id = result.token_ids[0] if result.token_ids[0] in allowed else int(allowed[0])
        return result._replace(token_ids=(token_id,), logprobs=self._told(draw, result._replace(token_ids=(token_id,))))


@pytest.fixture
def client(scripted):
    client = scripted("ab", max_model_len=2000, num_pages=400)
    client.runner.__class__ = MaskedRunner
    return client


def places(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner:
        yield from places(held, (*path, key))


def mutated(draw, body):
    """One to three changes: a value replaced, removed, repeated, wrapped, or one added."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        if not body:
            break
        *path, last = draw.choice([place for place in places(body) if place])
        holder = body
        for key in path:
            holder = holder[key]
        match draw.randint(0, 5):
            case 0 | 1 | 2:
                holder[last] = copy.deepcopy(draw.choice(VALUES))
            case 3:
                del holder[last]
            case 4:
                holder[last] = draw.choice([[holder[last]], {"a": holder[last]}, [holder[last]] * 30])
            case 5 if isinstance(holder, dict):
                holder[draw.choice([*CHAT, "x", "", "type", "content", "\ud800", "x" * 3000])] = copy.deepcopy(
                    draw.choice(VALUES)
                )
    return body


def check_shape(path, response):
    """A refusal or an answer, in the shape of the path's dialect."""
    assert response.status_code < 500, response.text[:2000]
    if response.headers["content-type"].startswith("text/event-stream"):
        for line in response.text.split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                assert isinstance(json.loads(line[6:], parse_constant=refuse_constant), dict)
        return
    body = json.loads(response.content, parse_constant=refuse_constant)
    if response.status_code == 200:
        return
    assert len(response.content) < 5000
    error = body["error"]
    if path.startswith("/v1/messages"):
        assert (body["type"], error.keys()) == ("error", {"type", "message"})
    else:
        assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("seed", range(4))
def test_no_request_makes_the_server_fail_or_stays_in_it(client, seed):
    draw = random.Random(seed)
    transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
    headers = {"content-type": "application/json"}

    async def send_all():
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as sender:
            for _ in range(100):
                path, body = draw.choice(BODIES)
                content = json.dumps(mutated(draw, body))
                response = await sender.post(path, content=content, headers=headers)
                try:
                    check_shape(path, response)
                except AssertionError as error:
                    raise AssertionError(f"{path} {content[:3000]}") from error

    asyncio.run(send_all())
    engine = client.service.engine
    wait_until(lambda: not engine._open)
    stats = engine.stats()
    assert (stats.is_alive, stats.num_running, stats.num_waiting) == (True, 0, 0)


@pytest.mark.parametrize("path_and_body", BODIES)
def test_the_requests_that_are_mutated_are_valid_themselves(client, path_and_body):
    path, body = path_and_body
    response = client.request("POST", path, json_body=body)
    assert response.status_code == 200, response.text
    check_shape(path, response)


SEEN = [
    ("/v1/chat/completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("/v1/chat/completions", {"repetition_penalty": 1e-308}, "repetition_penalty"),
    ("/v1/chat/completions", {"temperature": 1e-309}, "temperature"),
    ("/v1/chat/completions", {"metadata": nested(60)}, "metadata"),
    ("/v1/chat/completions", {"model": "x" * 1_000_000}, "model"),
    ("/v1/chat/completions", {str(place): 1 for place in range(5000)}, "at most 256 fields"),
    ("/v1/chat/completions", {"messages": [{}] * 70_000}, "messages"),
    ("/v1/chat/completions", {"seed": 10**400}, "seed"),
    ("/v1/chat/completions", {"max_tokens": 10**400}, "max_tokens"),
    ("/v1/completions", {"prompt": ["x"] * 100_000}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/responses", {"input": "Hi", "metadata": nested(63)}, "metadata"),
    ("/v1/responses", {"input": "Hi", "metadata": {"a": [10**301]}}, "metadata"),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": nested(55)}]}, "input_schema"),
]


@pytest.mark.parametrize(("path", "fields", "names"), SEEN)
def test_what_is_beyond_a_bound_is_refused_with_its_name(client, path, fields, names):
    base = {"/v1/chat/completions": {"messages": MESSAGES}, "/v1/messages": dict(BODIES[9][1])}.get(path, {})
    response = client.request("POST", path, json_body={**base, **fields})
    assert response.status_code in (400, 413)
    check_shape(path, response)
    assert names in response.text or "digits" in response.text
    assert not client.requests
