"""Whole answers as JSON, made and sent in pieces: their size is the client's choice, and the server has others.

A piece takes a few milliseconds, so that other threads never wait longer for the interpreter, and one thread makes the
pieces of all clients in turn. A large answer is never in memory as JSON.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["JsonParts", "JsonResponse", "JsonRows", "json_pieces", "json_text"]

_PIECE_BYTES = 64 << 10
_ITEMS = 512
"""Of a list, how many are written at once."""
_CHARACTERS = 64 << 10
"""Of a text, as many."""

_builder = ThreadPoolExecutor(1, "onebox-reply")


class JsonRows:
    """A long list whose items, small ones, are made while it is written."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


class JsonParts(JsonRows):
    """The same, where the items may hold long texts and lists themselves."""


def json_text(value: Any) -> str:
    """In one piece, for what is known to be small."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_items)


def _items(value: Any) -> list[Any]:
    if isinstance(value, JsonRows):
        return list(value.items)
    raise TypeError(f"{type(value).__name__} is not JSON")


def json_pieces(value: Any) -> Iterator[bytes]:
    """UTF-8 in pieces of about 64 KiB. Raises ValueError for NaN and infinities, which JSON does not have."""
    held, num_held = [], 0
    for text in _texts(value):
        held.append(text)
        num_held += len(text)
        if num_held >= _PIECE_BYTES:
            yield "".join(held).encode()
            held, num_held = [], 0
    yield "".join(held).encode()


def _texts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            entries = (_entry(name, held) for name, held in value.items())
            yield from _enclosed("{", entries, "}")
        case JsonParts():
            yield from _enclosed("[", map(_texts, value.items), "]")
        case JsonRows():
            yield from _enclosed("[", ((_dumps(item),) for item in value.items), "]")
        case list() | tuple() if len(value) > _ITEMS:
            slices = (value[start : start + _ITEMS] for start in range(0, len(value), _ITEMS))
            yield from _enclosed("[", ((_dumps(part)[1:-1],) for part in slices), "]")
        case str() if len(value) > _CHARACTERS:
            yield '"'
            for start in range(0, len(value), _CHARACTERS):
                yield _dumps(value[start : start + _CHARACTERS])[1:-1]
            yield '"'
        case _:
            yield _dumps(value)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"{_dumps(name)}:"
    yield from _texts(value)


def _enclosed(opening: str, items: Iterable[Iterable[str]], closing: str) -> Iterator[str]:
    yield opening
    for place, item in enumerate(items):
        if place:
            yield ","
        yield from item
    yield closing


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JsonResponse(Response):
    """A JSON object that is made beside the event loop, piece by piece, while it is sent."""

    media_type = "application/json"

    def __init__(self, make: Callable[[], dict[str, Any]], held: AbstractContextManager[object] | None = None) -> None:
        """`make` is called beside the event loop, too. `held` is left when all is sent."""
        super().__init__()
        self._make = make
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error in the first piece is raised before anything is sent."""
        with self._held or nullcontext():
            await self._send(scope, receive, send)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = self._pieces()
        made = await _next(pieces, 2)
        if len(made) == 1:
            await Response(made[0], media_type=self.media_type)(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        while made:
            for piece in made:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            made = await _next(pieces, 1)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pieces(self) -> Iterator[bytes]:
        yield from json_pieces(self._make())


async def _next(pieces: Iterator[bytes], count: int) -> list[bytes]:
    return await asyncio.get_running_loop().run_in_executor(_builder, lambda: list(islice(pieces, count)))
