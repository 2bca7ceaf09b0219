"""Structured output in all dialects: what cannot be used is refused with status 400, a sentence and its field."""

import json

import pytest

SLOW = {"type": "integer", "multipleOf": 999_983}
"""Takes longer to compile than is allowed."""
HI = [{"role": "user", "content": "Hi"}]


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


FIELDS = {
    "odd reference": ({"guided_json": {"$ref": []}}, "guided_json", "a $ref is not a text"),
    "odd type": ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
    "odd text": ({"guided_json": "[" * 5000}, "guided_json", "is a text that is not JSON"),
    "long text": (
        {"guided_json": "[" + "[]," * 200_000 + "[]]"},
        "guided_json",
        "has 600004 characters; at most 524288",
    ),
    "deep": ({"guided_json": json.dumps(nested(100))}, "guided_json", "nested deeper than the 128"),
    "slow": ({"guided_json": SLOW}, "guided_json", "takes longer than 0.6 s"),
    "wrapped": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format",
        'Unimplemented keys: ["not"]',
    ),
    "choices": ({"guided_choice": [str(i) for i in range(20_000)]}, "guided_choice", "has 20000 entries"),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    "grammar": ({"guided_grammar": "start: A"}, "guided_grammar", "unknown name"),
}


@pytest.mark.parametrize(("fields", "name", "sentence"), FIELDS.values(), ids=FIELDS.keys())
def test_what_cannot_be_used_is_refused_with_its_field(tiny, fields, name, sentence):
    # After a reasoning, the grammar is a part of another one.
    is_part = name != "guided_json"
    response = tiny.chat(**fields, max_tokens=4, chat_template_kwargs={"enable_thinking": is_part})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert sentence in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("parameters", [{"x": {"type": "array", "items": {"$ref": []}}}, {"x": SLOW}])
def test_a_tool_s_schema_is_refused_as_the_tools(tiny, parameters):
    response = tiny.chat(tools=[tool({"properties": parameters})], tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_other_dialects_refuse_the_same(tiny):
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}
    response = tiny.request("POST", "/v1/responses", json_body={"input": "Hi", "text": text})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format.schema")
    config = {"format": {"type": "json_schema", "schema": {"type": "strin"}}}
    body = {"model": "tiny", "max_tokens": 4, "messages": HI, "output_config": config}
    response = tiny.request("POST", "/v1/messages", json_body=body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_many_choices_are_no_error(tiny):
    choices = [f"{place} times" for place in range(2100)]
    fields = {"guided_choice": choices, "max_tokens": 30, "chat_template_kwargs": {"enable_thinking": False}}
    response = tiny.chat(**fields, n=2, seed=1)
    assert response.status_code == 200
    assert all(choice["message"]["content"] in choices for choice in response.json()["choices"])
