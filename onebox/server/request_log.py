"""Middleware around everything: a request's id, and its one line in the log.

The line has counts, times and names; texts only where the operator asks for them.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onebox.server.record import HttpRecord, current_record, request_id_of
from onebox.text.tokenizer import Tokenizer

__all__ = [
    "READING_METHODS",
    "OnFinish",
    "RequestIds",
    "RequestLog",
    "request_fields",
    "request_line",
    "shown_path",
]

REFUSALS_PER_S = 20
"""Lines about requests that were refused; any client can cause as many as it likes."""
_MAX_PATH = 200
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OnFinish = Callable[[HttpRecord, Headers, float], None]
"""Called with each request when it has ended, and with that time on the clock of `HttpRecord.began`."""

_log = logging.getLogger(__name__)


class RequestIds:
    """Takes or makes a request's id, returns it, keeps the record of the request, and hands it on at the end."""

    def __init__(self, app: ASGIApp, on_finish: Sequence[OnFinish] = ()) -> None:
        self._app = app
        self._on_finish = on_finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = HttpRecord(request_id_of(headers.get("x-request-id", "")), scope["method"], scope["path"])
        current_record.set(record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                sent = MutableHeaders(raw=message.setdefault("headers", []))
                sent["x-request-id"] = record.request_id
                if record.path.startswith("/v1/messages"):
                    sent["request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            now = time.monotonic()
            for tell in self._on_finish:
                tell(record, headers, now)


class RequestLog:
    """Writes the lines. Requests that read, such as /health and /metrics, are told at the level debug."""

    def __init__(self, tokenizer: Tokenizer, max_characters: int = 0) -> None:
        """`max_characters` of each prompt and answer are in its line; 0 is none."""
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._refusals = _LineBudget(REFUSALS_PER_S)

    def __call__(self, record: HttpRecord, _: Headers, now: float) -> None:
        level = _level(record)
        if not _log.isEnabledFor(level):
            return
        if record.status >= 400:
            num_left_out = self._refusals.take(time.monotonic())
            if num_left_out is None:
                return
            if num_left_out:
                _log.info("%d refused requests have no line here", num_left_out)
        fields = {**request_fields(record, now), **dict(self._texts(record))}
        _log.log(level, "%s", request_line(fields), extra={"fields": {"event": "request", **fields}})

    def _texts(self, record: HttpRecord) -> Iterator[tuple[str, Any]]:
        limit = self._max_characters
        if limit and record.answers:
            # A token has at least a character, with rare exceptions, so no more of them are decoded.
            prompts = [answer.prompt.token_ids for answer in record.answers.answers[:: record.answers.n]]
            yield "prompts", [self._tokenizer.decode(ids[:limit])[:limit] for ids in prompts[:4]]
            answers = [answer.token_ids for answer in record.answers.answers[:4]]
            yield "answers", [self._tokenizer.decode(ids[:limit])[:limit] for ids in answers]


def _level(record: HttpRecord) -> int:
    if record.status >= 500 or record.error:
        return logging.WARNING
    return logging.DEBUG if record.method in READING_METHODS else logging.INFO


class _LineBudget:
    """Lines of one second."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._second = 0
        self._num_lines = self._num_left_out = 0

    def take(self, now: float) -> int | None:
        """How many lines were left out before this one; None: so is this one."""
        if int(now) != self._second:
            self._second, self._num_lines = int(now), 0
        self._num_lines += 1
        if self._num_lines > self._max_lines:
            self._num_left_out += 1
            return None
        num_left_out, self._num_left_out = self._num_left_out, 0
        return num_left_out


def shown_path(record: HttpRecord) -> str:
    """Without what does not belong in a log, and not longer than useful."""
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in record.path[:_MAX_PATH])


def request_fields(record: HttpRecord, now: float) -> dict[str, Any]:
    """What the line says, by name; nothing of what was asked or answered."""
    fields: dict[str, Any] = {
        "id": record.request_id,
        "method": record.method[:16],
        "path": shown_path(record),
        "status": record.shown_status,
        "key": record.key_name,
    }
    if record.answers:
        fields |= _answer_fields(record)
    fields["total_s"] = _seconds(record, now)
    fields["error"] = record.error
    fields["notes"] = "; ".join(record.notes) or None
    return {name: value for name, value in fields.items() if value is not None}


def _answer_fields(record: HttpRecord) -> dict[str, Any]:
    assert record.answers  # noqa: S101 - the caller looked
    usage = record.answers.usage
    return {
        "answer_id": record.answers.request_id,
        "stream": record.is_stream,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "cached_tier": usage.cached_tier,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "drafted_tokens": usage.accepted_draft_tokens + usage.rejected_draft_tokens,
        "accepted_draft_tokens": usage.accepted_draft_tokens,
        "finish_reason": ",".join(record.finish_reasons),
        "queue_s": _seconds(record, record.started_at),
        "first_token_s": _seconds(record, record.first_token_at),
    }


def _seconds(record: HttpRecord, at: float | None) -> float | None:
    return None if at is None else round(max(0.0, at - record.began), 4)


def request_line(fields: dict[str, Any]) -> str:
    """`POST /v1/chat/completions 200 id=... prompt_tokens=12 ... total_s=0.31`."""
    head = f"{fields['method']} {fields['path']} {fields['status']}"
    rest = (f"{name}={_shown(value)}" for name, value in fields.items() if name not in ("method", "path", "status"))
    return " ".join((head, *rest))


def _shown(value: object) -> str:
    """As JSON has it where it is no plain word or number."""
    if isinstance(value, bool | list):
        return json.dumps(value)
    text = str(value)
    return json.dumps(text) if any(c.isspace() or not c.isprintable() for c in text) else text
