"""A whole answer is the JSON that it would be in one piece, and is made and sent in pieces of bounded size."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.server.pieces import JsonParts, JsonResponse, JsonRows, json_pieces, json_text

PIECE = 256 << 10
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def lazily(value):
    """The same value with its lists made while they are written."""
    match value:
        case dict():
            return {name: lazily(held) for name, held in value.items()}
        case [first, *_] if isinstance(first, dict | list):
            return JsonParts(map(lazily, value))
        case list():
            return JsonRows(iter(value))
    return value


@given(values)
def test_pieces_joined_are_the_json_of_the_value(value):
    assert json.loads(b"".join(json_pieces(value))) == value
    assert json.loads(b"".join(json_pieces(lazily(value)))) == value
    assert json.loads(json_text(lazily(value))) == value


@pytest.mark.parametrize(
    "value", ['世🙂\n"\\' * 100_000, list(range(300_000)), tuple(range(5000)), [{"a": 1}] * 20_000]
)
def test_a_long_text_or_list_is_cut(value):
    pieces = list(json_pieces({"a": {"b": value}}))
    assert len(pieces) > 1 or len(pieces[0]) < PIECE
    assert max(map(len, pieces)) <= PIECE
    assert json.loads(b"".join(pieces)) == {"a": {"b": list(value) if isinstance(value, tuple) else value}}


def test_rows_are_made_when_they_are_sent():
    made, seen = [], []

    def rows():
        for place in range(100_000):
            made.append(place)
            yield {"place": place}

    async def send(message):
        if message.get("body"):
            seen.append((len(made), len(message["body"])))

    asyncio.run(JsonResponse(lambda: {"rows": JsonRows(rows())})({}, None, send))
    assert len(seen) > 10
    assert seen[0][0] < 20_000
    assert max(size for _, size in seen) <= PIECE


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_json_has_no_word_for_is_an_error_before_anything_is_sent(number):
    sent = []

    async def send(message):
        sent.append(message)

    with pytest.raises(ValueError, match="JSON compliant"):
        asyncio.run(JsonResponse(lambda: {"a": JsonRows(iter([number]))})({}, None, send))
    with pytest.raises(ValueError, match="JSON compliant"):
        json_text({"a": number})
    assert not sent


def test_a_small_object_comes_with_its_length():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(JsonResponse(lambda: {"a": 1})({"type": "http"}, None, send))
    assert dict(sent[0]["headers"])[b"content-length"] == b"7"
