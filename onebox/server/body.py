"""The JSON body of a request: measured, parsed and validated, away from the event loop unless it is small.

Measuring comes first, since parsing can take more than a hundred bytes of memory for a byte of the body and does not
let other threads run: how deep the body nests, how many values it has, and how much of it is text. Strings that
may be images and videos may be long; all other text is far beyond any context at `MAX_TEXT_BYTES`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from onebox.server.errors import BodyTooLongError
from onebox.server.pool import WorkPool
from onebox.spec.errors import UsageError
from onebox.spec.heap import collections_paused

__all__ = ["JsonRoute", "measure_json", "parse_json"]

INLINE_BYTES = 8 << 10
"""Bodies up to this size are parsed on the event loop: passing them to a thread would take longer."""
MAX_DEPTH = 128
MAX_VALUES = 1 << 20
"""Among them token ids, one each."""
MAX_STRINGS = 1 << 17
MAX_TEXT_BYTES = 16 << 20
"""Of everything but images and videos."""
MEDIA_BYTES = 64 << 10
"""A string may be an image or a video from this size on."""

_pool = WorkPool("parsing of large bodies", num_threads=2, max_waiting=64)


class JsonRoute(APIRoute):
    """A route whose body is read, measured, parsed and validated by this file instead of FastAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_parsed(request: Request) -> Response:
            if not _is_json(request):
                raise UsageError(_not_json(request))
            try:
                data = b"".join([part async for part in request.stream()])
            except ClientDisconnect:
                # For the log alone, as when a client leaves later.
                return Response(status_code=499)
            if len(data) <= INLINE_BYTES:
                body = self._validated(data) if data else None
            else:
                body = await _pool.run(self._validated_large, data)
            # The handler runs for as long as the answer is computed: it does not keep the bytes.
            is_empty = not data
            del data
            return await handle(_ParsedRequest(request, body, is_empty=is_empty))

        return handle_parsed

    def _validated_large(self, data: bytes) -> Any:
        with collections_paused():
            return self._validated(data)

    def _validated(self, data: bytes) -> Any:
        field = self.body_field
        assert field is not None  # noqa: S101 - the route has a body
        parsed = parse_json(data)
        body, errors = field.validate(parsed, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return body


class _ParsedRequest(Request):
    """A request whose body has been validated: FastAPI gets it in place of the JSON and lets it pass."""

    def __init__(self, request: Request, body: Any, *, is_empty: bool) -> None:
        super().__init__(request.scope, request.receive)
        self._validated = body
        self._is_empty = is_empty

    async def body(self) -> bytes:
        return b"" if self._is_empty else b"validated"

    async def json(self) -> Any:
        return self._validated


def _not_json(request: Request) -> str:
    given = request.headers.get("content-type", "").partition(";")[0].strip()[:80]
    said = f"The Content-Type is {given!r}" if given else "The request has no Content-Type"
    return f"{said}, so the body is not read as JSON; send it with `Content-Type: application/json`."


def _is_json(request: Request) -> bool:
    name = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name.endswith("+json"))


# Parsing.


def parse_json(data: bytes) -> Any:
    """The value. What is not JSON (NaN, a key given twice, a number beyond floats) and what is too large is refused."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"The body is not UTF-8 ({error.reason} at byte {error.start}).") from None
    measure_json(data)
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_float=_finite, parse_int=_integer, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise UsageError(f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise UsageError("The body's JSON nests too deep.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise UsageError(f"The body is not valid JSON: the key {twice[:80]!r} is given twice in one object.")
    return made


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise UsageError(f"The body has the number {digits[:40]}, which is too large.")
    return number


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise UsageError(f"The body has an integer of {len(digits)} digits, which is too large.") from None


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"The body is not valid JSON: {name} is not a JSON number.")


# Measuring.


def measure_json(data: bytes) -> None:
    """Refuses a body that would take too long to parse. Whether it is JSON is left to the parser.

    Goes from string to string, so its work is one step a string; what stands between two strings is counted as a
    whole.
    """
    depth = num_values = num_strings = num_text = place = 0
    while True:
        quote = data.find(b'"', place)
        end = len(data) if quote < 0 else quote
        num_values += data.count(b",", place, end) + data.count(b"[", place, end) + data.count(b"{", place, end)
        num_text += end - place
        _refuse_beyond(num_values, num_strings, num_text)
        depth = _nested(data, place, end, depth)
        if quote < 0:
            return
        place = _string_end(data, quote)
        num_strings += 1
        num_text += 0 if _may_be_media(data, quote, place) else place - quote


def _refuse_beyond(num_values: int, num_strings: int, num_text: int) -> None:
    if num_values > MAX_VALUES or num_strings > MAX_STRINGS:
        raise BodyTooLongError(
            f"The body's JSON has more than {MAX_STRINGS} strings or {MAX_VALUES} values, which are the limits."
        )
    if num_text > MAX_TEXT_BYTES:
        raise BodyTooLongError(
            f"The body has more than {MAX_TEXT_BYTES} bytes beside images and videos, which is the limit."
        )


# Possessive: no way back is kept in memory.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MEDIA_FIELD = re.compile(rb'"(?:url|data|image_url|video_url)"\s{0,16}:\s{0,16}\Z')
_URL = re.compile(rb"(?:[\w+/=:;,.%-]|\\/)*+", re.ASCII)
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


def _string_end(data: bytes, quote: int) -> int:
    """Behind the closing quote."""
    found = data.find(b'"', quote + 1)
    if found < 0:
        return len(data)
    if data[found - 1 : found] != b"\\":
        return found + 1
    # With an escaped quote it is text, whose length is limited.
    match = _STRING.match(data, quote, quote + MAX_TEXT_BYTES)
    return match.end() if match else len(data)


def _may_be_media(data: bytes, start: int, end: int) -> bool:
    """Whether it is long, the value of a field for media, and begins as base64 or a URL."""
    if end - start <= MEDIA_BYTES or not _MEDIA_FIELD.search(data, max(0, start - 80), start):
        return False
    return bool(_URL.fullmatch(data, start + 1, start + MEDIA_BYTES))


def _nested(data: bytes, start: int, end: int, depth: int) -> int:
    """The depth behind this stretch without strings, which begins at `depth`."""
    opens = data.count(b"[", start, end) + data.count(b"{", start, end)
    closes = data.count(b"]", start, end) + data.count(b"}", start, end)
    if depth + opens > MAX_DEPTH:
        reached = depth
        for bracket in data[start:end].translate(None, _OTHERS):
            reached += 1 if bracket in b"[{" else -1
            if reached > MAX_DEPTH:
                raise UsageError(f"The body's JSON nests deeper than {MAX_DEPTH} levels.")
    return depth + opens - closes
