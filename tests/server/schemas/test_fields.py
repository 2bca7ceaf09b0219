"""Whatever a field holds, the answer is an answer or a refusal with a sentence: never a failure of ours."""

import pytest

from onebox.server.schemas.chat import ChatRequest
from onebox.server.schemas.completions import CompletionRequest
from onebox.server.schemas.tokens import DetokenizeRequest, TokenizeRequest

VALUES = [
    *(True, -1, 0, 3, 2**64, 0.5, 1e308),
    *("", "\ud800", "\x00", "{}", "("),
    *([], [1], ["a"], [[1], "a"], [{}], [None]),
    *({}, {"a": 1}, {"type": "text"}, {"type": "function", "function": {"name": "f"}}, {"json": {}, "regex": "a"}),
]
ENDPOINTS = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, (model, _) in ENDPOINTS.items() for field in model.model_fields]
)
def test_no_value_of_any_field_is_a_failure(tiny, path, field):
    for value in VALUES:
        response = tiny.request("POST", path, json_body={**ENDPOINTS[path][1], field: value})
        assert response.status_code < 500, (field, value, response.text)
        assert response.status_code == 200 or response.json()["error"]["message"].endswith(".")


USER = {"role": "user", "content": "Hi"}
INNER = {
    "role": lambda v: {"messages": [{**USER, "role": v}]},
    "content": lambda v: {"messages": [{**USER, "content": v}]},
    "part": lambda v: {"messages": [{**USER, "content": [{"type": "text", "text": v}]}]},
    "reasoning": lambda v: {"messages": [USER, {"role": "assistant", "reasoning": v}]},
    "calls": lambda v: {"messages": [USER, {"role": "assistant", "tool_calls": v}]},
    "arguments": lambda v: {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": v}}]}]
    },
    "tool": lambda v: {"tools": [{"type": "function", "function": v}]},
    "parameters": lambda v: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": v}}],
        "tool_choice": "required",
    },
    "properties": lambda v: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": v, "required": v}}}],
        "tool_choice": "required",
    },
    "property": lambda v: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": v}}}}],
        "tool_choice": "required",
    },
    "type": lambda v: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": v}}}}}],
        "tool_choice": "required",
    },
    "enum": lambda v: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"enum": v}}}}}],
        "tool_choice": "required",
    },
    "schema": lambda v: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": v}}},
    "option": lambda v: {"chat_template_kwargs": {"enable_thinking": v}},
    "budget": lambda v: {"chat_template_kwargs": {"thinking_budget": v}},
    "bias": lambda v: {"logit_bias": {"1": v}},
    "structured": lambda v: {"structured_outputs": {"json": v}},
}


@pytest.mark.parametrize("place", INNER)
def test_no_value_inside_a_field_is_a_failure(tiny, place):
    for value in VALUES:
        response = tiny.chat(**INNER[place](value), max_tokens=1)
        assert response.status_code < 500, (place, value, response.text)
        assert response.status_code == 200 or response.json()["error"]["message"].endswith(".")
