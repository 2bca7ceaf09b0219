"""Refusals and failures in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with their HTTP status."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from onebox.engine.api import (
    ContextTooLongError,
    EngineRestartingError,
    EngineStoppedError,
    GrammarError,
    QueueFullError,
    SamplingParams,
    ShareFullError,
)
from onebox.spec.errors import OneboxError, UnsupportedError, UsageError

__all__ = [
    "BodyTooLongError",
    "CompressedBodyError",
    "ErrorReply",
    "FieldError",
    "ForeignOriginError",
    "GenerationError",
    "ModelNotFoundError",
    "NotServedError",
    "ResponseNotFoundError",
    "ServerBusyError",
    "UnauthorizedError",
    "UnknownHostError",
    "error_body",
    "error_response",
    "error_status",
    "excerpt",
    "install_error_handlers",
]

_log = logging.getLogger(__name__)


class ModelNotFoundError(UsageError):
    """The request names a model that is not served here."""


class ResponseNotFoundError(UsageError):
    """No response is stored under this id for this caller."""


class NotServedError(UsageError):
    """The path is not served at the port at which it was asked for."""


class FieldError(UsageError):
    """A field of the request cannot be applied; `param` is its name."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownHostError(UsageError):
    """The request's Host is not a name of this server."""


class ForeignOriginError(UsageError):
    """The request was sent by a web page of another origin."""


class UnauthorizedError(UsageError):
    """The request does not carry the server's API key."""


class BodyTooLongError(UsageError):
    """The request's body exceeds a limit."""


class CompressedBodyError(UsageError):
    """The request's body is compressed, which is not read here."""


class ServerBusyError(OneboxError):
    """What requests share (memory, threads, connections) is taken; the request was not accepted."""

    retry_after_s = 1


class GenerationError(OneboxError):
    """The engine accepted the request and could not complete it."""


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    """The wrong field, where it is one."""
    code: str | None


class ErrorReply(BaseModel):
    """The body of every refusal."""

    error: ErrorFields


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None
    param: str | None = None


_SHOWN = 80
"""Characters of a method or path that a message repeats."""
_BAD_REQUEST = _Kind(400, "invalid_request_error")
_SERVER_ERROR = _Kind(500, "server_error")
# The first row that matches decides, so a class comes before its base classes.
_KINDS: tuple[tuple[type[OneboxError], _Kind], ...] = (
    (ModelNotFoundError, _Kind(404, "invalid_request_error", "model_not_found", "model")),
    (NotServedError, _Kind(404, "invalid_request_error", "not_supported")),
    (ResponseNotFoundError, _Kind(404, "invalid_request_error", "response_not_found")),
    (UnknownHostError, _Kind(421, "invalid_request_error", "host_not_allowed")),
    (ForeignOriginError, _Kind(403, "invalid_request_error", "origin_not_allowed")),
    (UnauthorizedError, _Kind(401, "invalid_request_error", "invalid_api_key")),
    (ContextTooLongError, _Kind(400, "invalid_request_error", "context_length_exceeded")),
    (ShareFullError, _Kind(429, "rate_limit_error", "key_share_full")),
    (QueueFullError, _Kind(429, "rate_limit_error", "queue_full")),
    (ServerBusyError, _Kind(429, "rate_limit_error", "server_busy")),
    (EngineRestartingError, _Kind(503, "server_error", "engine_restarting")),
    (EngineStoppedError, _Kind(503, "server_error", "engine_stopped")),
    (BodyTooLongError, _Kind(413, "invalid_request_error")),
    (CompressedBodyError, _Kind(415, "invalid_request_error")),
    (UsageError, _BAD_REQUEST),
    (UnsupportedError, _BAD_REQUEST),
    (OneboxError, _SERVER_ERROR),
)


_MAX_TEXT_CHARACTERS = 1000
_MAX_PATH_CHARACTERS = 200
_MAX_NAME_CHARACTERS = 64
"""Of a field's path in a refusal, and of each name in it."""

_EMBEDDINGS = (
    "the model generates text, and its hidden states were not trained to be compared, so vectors made of them would "
    "look like embeddings and find the wrong texts; serve an embedding model beside it"
)
_TEXT_ALONE = "the model reads texts, images and videos and writes text"
_UNSERVED = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score"), _EMBEDDINGS),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/speech", "/v1/audio/translations"), _TEXT_ALONE),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits"), _TEXT_ALONE),
    "/v1/batches": "requests of any number are queued as they come, within --max-num-waiting",
    "/v1/files": "files are sent inside a request",
    "/v1/fine_tuning/jobs": "nothing is trained here",
}
"""Paths of OpenAI's API that clients try, and why each is refused."""
_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__)
_PROMPT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}


def error_body(error: OneboxError) -> dict[str, Any]:
    """The body of a response, or an event in a stream that has begun."""
    return _body(str(error), _kind(error))


def error_status(error: OneboxError) -> int:
    """The HTTP status that the error has, or would have if the stream had not begun."""
    return _kind(error).status


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(OneboxError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _internal)


def error_response(error: OneboxError) -> JSONResponse:
    """The error as a response."""
    headers = None
    if isinstance(error, QueueFullError | ServerBusyError | EngineRestartingError):
        headers = {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error_body(error), _kind(error).status, headers)


def excerpt(value: object, limit: int = 60) -> str:
    """How a message repeats what a client sent: quoted, and no more of it than tells which it was."""
    if not isinstance(value, str):
        value = "..." if isinstance(value, dict | list) and len(value) > limit else repr(value)
        return value[:limit]
    return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value)} characters)"


def _kind(error: OneboxError) -> _Kind:
    kind = next(kind for cls, kind in _KINDS if isinstance(error, cls))
    match error:
        case FieldError():
            return kind._replace(param=error.param)
        case GrammarError():
            return kind._replace(param=error.field_name or None)
    # The engine's refusals begin with the name of the parameter that they are about.
    name = str(error).partition(" ")[0]
    return kind._replace(param=name) if kind is _BAD_REQUEST and name in _SAMPLING_FIELDS else kind


def _body(message: str, kind: _Kind) -> dict[str, Any]:
    error = {"message": message, "type": kind.type, "param": kind.param, "code": kind.code}
    # A request can contain lone surrogates, which cannot be encoded as UTF-8.
    return {"error": {name: text and _shorten(text).encode(errors="replace").decode() for name, text in error.items()}}


def _shorten(text: str) -> str:
    """A refusal names what it refuses, and does not send back megabytes of it: the beginning and the end stay."""
    if len(text) <= _MAX_TEXT_CHARACTERS:
        return text
    half = _MAX_TEXT_CHARACTERS // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OneboxError)  # noqa: S101 - Starlette calls a handler with the class it is registered for
    if isinstance(error, ContextTooLongError):
        # The field of the prompt differs by endpoint.
        return JSONResponse(_body(str(error), _kind(error)._replace(param=_PROMPT_FIELDS.get(request.url.path))), 400)
    return error_response(error)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
    first = error.errors()[0]
    param = None if first["type"] == "json_invalid" else _param(first["loc"])
    return JSONResponse(_body(_sentence(first, param), _BAD_REQUEST._replace(param=param)), _BAD_REQUEST.status)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    if error.status_code == 404 and request.url.path in _UNSERVED:
        message = f"{request.url.path} is not served: {_UNSERVED[request.url.path]}."
        return JSONResponse(_body(message, _Kind(404, "invalid_request_error", "not_supported")), 404)
    message = f"{error.detail}: {request.method[:_SHOWN]} {request.url.path[:_SHOWN]}."
    return JSONResponse(_body(message, _Kind(error.status_code, "invalid_request_error")), error.status_code)


async def _internal(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path[:_MAX_PATH_CHARACTERS], exc_info=error)
    return JSONResponse(_body("The server made an error; its log says more.", _SERVER_ERROR), _SERVER_ERROR.status)


def _param(location: Sequence[str | int]) -> str | None:
    """The field's path, such as messages.0.content, without the <tag>s of unions."""
    names = [str(part)[:_MAX_NAME_CHARACTERS] for part in location[1:] if not str(part).startswith("<")]
    return ".".join(names)[:_MAX_PATH_CHARACTERS] or None


def _sentence(error: dict[str, Any], param: str | None) -> str:
    if error["type"] == "extra_forbidden":
        return f"{param} is not supported; onebox refuses what it would not honour, so remove it."
    if error["type"] == "json_invalid":
        return f"The body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}."
    if error["type"] == "missing":
        return f"{param} is missing." if param else "The body is missing; send a JSON object."
    if error["type"] == "string_unicode" and param:
        return f"{param}: it is not valid Unicode; it holds half of a surrogate pair."
    message = error["msg"].removeprefix("Value error, ")
    return f"{param}: {message}." if param else f"{message[0].upper()}{message[1:]}."
