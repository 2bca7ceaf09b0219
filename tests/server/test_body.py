"""JSON bodies: what is not JSON or too large to parse is refused before it costs anything."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.server import body
from onebox.server.body import MAX_DEPTH, measure_json, parse_json
from onebox.server.errors import BodyTooLongError
from onebox.spec.errors import UsageError
from tests.server.test_errors import refused

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@settings(max_examples=40)
@given(JSON, st.booleans())
def test_json_is_parsed_as_by_the_standard_library(value, is_ascii):
    text = json.dumps(value, ensure_ascii=is_ascii)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return
    assert parse_json(data) == json.loads(text)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "1e999, which is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is given twice"),
        (b'{"a": {"b": [{"c": 1, "c": 1}]}}', "the key 'c' is given twice"),
        (b"[" * 100_000, "deeper than 128"),
        (b"[" * 100_000 + b"]" * 100_000, "deeper than 128"),
        (b'{"a":' * 100_000, "deeper than 128"),
        (b'{"a\xff": 1}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": "', "not valid JSON"),
        (b'{"a": "\\', "not valid JSON"),
        (b'"a" b', "not valid JSON"),
    ],
)
def test_what_is_no_json_is_refused(data, why):
    with pytest.raises(UsageError, match=why):
        parse_json(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"0," * (1 << 21) + b"0]",
        b"[" + b"[]," * (1 << 21) + b"0]",
        b"[" + b'"",' * (1 << 18) + b"0]",
        b"[" + b'"\\"",' * (1 << 18) + b"0]",
        b'"' + b"word " * (4 << 20) + b'"',
        b'"' + b'\\"' * (30 << 20) + b'"',
        b'"' + b"\\\\" * (30 << 20),
        b" " * (17 << 20) + b"0",
        b'{"metadata": "' + b"A" * (17 << 20) + b'"}',
        b'["url", "' + b"A" * (17 << 20) + b'"]',
    ],
)
def test_bodies_that_cost_much_more_than_their_length_are_refused_before_they_are_parsed(data):
    began = time.monotonic()
    with pytest.raises(BodyTooLongError, match=r"limits|limit\."):
        measure_json(data)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "data",
    [
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"[" + b"[]," * 1000 + b"0]",
        b"[" + b'["]"],' * 1000 + b"0]",
        b'{"url": "' + b"A" * (40 << 20) + b'"}',
        b'{"type":"base64","data" :\n"' + b"A" * (40 << 20) + b'"}',
        b'"\\\\"',
        b'"\\\\\\""',
        b'["\\"[[[[' + b"[" * 1000 + b'"]',
        json.dumps(list(range(300_000))).encode(),
    ],
)
def test_ordinary_bodies_pass(data):
    parse_json(data)


def test_a_large_body_gets_the_same_answer_and_the_same_refusals_as_a_small_one(scripted, monkeypatch):
    def replies():
        client = scripted("ok")
        texts = [client.chat("Hi").json()["choices"][0]["message"]["content"]]
        texts.append(refused(client.chat("Hi", temperature="hot"), 400, "temperature"))
        texts.append(refused(client.chat("Hi", unheard=1), 400, "unheard"))
        headers = {"content-type": "application/json"}
        bad = (b"{]", b'{"messages": [], "messages": []}')
        replies = (client.request("POST", "/v1/chat/completions", content=data, headers=headers) for data in bad)
        return texts + [refused(reply, 400) for reply in replies]

    small = replies()
    monkeypatch.setattr(body, "INLINE_BYTES", 0)
    assert replies() == small


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_does_not_say_that_it_is_json_is_refused(scripted, content_type):
    """Pages of other origins may send such bodies without asking first."""
    headers = {"content-type": content_type} if content_type else {}
    content = b'{"prompt": "Hi"}'
    reply = scripted("ok").request("POST", "/v1/completions", content=content, headers=headers)
    assert "application/json" in refused(reply, 400)
