"""Client of any OpenAI-compatible server that times the response.

A server failure never raises here: it is returned as a `StreamedAnswer` with a `Failure`, because failures are results.
Only a server that cannot be queried at all (bad address, no model) is an error of the command. Independent of
workloads.
"""

import asyncio
import base64
import io
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from onebox.bench.answer import Ask, StreamedAnswer, error_message
from onebox.bench.record import Failure, Reason, Server
from onebox.spec.authorization import authorization
from onebox.spec.errors import OneboxError, UnsupportedError, UsageError

__all__ = ["Client", "Connection", "picture_part", "server_address"]

_CONNECT_S = 10.0
_QUICK_S = 60.0
"""Timeout of requests that generate nothing: models, tokenize, metrics."""
_LATENCY_TRIALS = 3
_FIELDS = ("return_token_ids", "ignore_eos", "min_tokens", "chat_template_kwargs")
"""Non-OpenAI fields that make a measurement more exact, sent where the server supports them."""
_TRIAL_VALUES: dict[str, Any] = {
    "return_token_ids": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "chat_template_kwargs": {"enable_thinking": False},
}


@dataclass(frozen=True)
class Connection:
    """Address of a server and the timeouts of its streams."""

    url: str
    api_key: str | None = None
    model: str | None = None
    """None: the first model listed."""
    stall_s: float = 120.0
    """A started stream without an event for this long has stalled."""
    first_token_s: float = 600.0
    """The same before the first event; longer, because a long prompt may prefill alongside others."""
    timeout_s: float = 1800.0
    """Limit for a complete answer."""


def server_address(url: str) -> str:
    """The URL with a scheme and without /v1."""
    address = url if "://" in url else f"http://{url}"
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise UsageError(f"--url is {url!r}; it must be a URL such as http://127.0.0.1:8000.")
    return address.rstrip("/").removesuffix("/v1")


def picture_part(png: bytes) -> dict[str, Any]:
    """An image as a content part of a message."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


class Client:
    """One server. Use as an async context manager and call `discover` first."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.url = server_address(connection.url)
        headers = authorization(connection.api_key)
        # Stalls are detected by events below, because keep-alive comments are not part of an answer.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=limits)
        except httpx.InvalidURL as error:
            raise UsageError(f"--url is {connection.url!r}, which is not a URL ({error}).") from None
        self.server = Server(self.url, connection.model or "")
        self._accepts: frozenset[str] = frozenset()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def discover(self) -> Server:
        """Queries the server's model, version and features; sends a few one-token requests."""
        listed = await self._model()
        props = await self._quick("GET", "/props") or {}
        version = (await self._quick("GET", "/version") or {}).get("version") or props.get("build_info") or ""
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        self.server = Server(
            url=self.url,
            model=str(listed["id"]),
            kind=str(listed.get("owned_by") or "unknown"),
            version=str(version),
            max_model_len=listed.get("max_model_len") or context,
            tokenizer=await self._tokenizer_form(str(listed["id"])),
            is_local=urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1"),
        )
        self._accepts = await self._known_fields()
        answer = await self.ask(_trial(2))
        if answer.failure:
            self._refuse_unusable(answer.failure)
        modalities = await self._modalities(listed, props)
        self.server = replace(self.server, gives_token_ids=answer.has_token_ids, modalities=modalities)
        return self.server

    async def name_model(self) -> None:
        """The minimum that `ask` needs."""
        self.server = Server(self.url, str((await self._model())["id"]))

    async def _model(self) -> dict[str, Any]:
        """The entry of /v1/models to measure."""
        try:
            response = await self._http.get("/v1/models", timeout=_QUICK_S)
        except httpx.HTTPError as error:
            raise OneboxError(
                f"No server answers at {self.url} ({error or type(error).__name__}); start one with `onebox serve`, "
                "or name it with --url."
            ) from None
        if response.is_error:
            raise OneboxError(f"{self.url}/v1/models answered {response.status_code}: {_said(response)}")
        try:
            models = {str(model["id"]): model for model in response.json()["data"]}
        except (ValueError, LookupError, TypeError):
            models = {}
        if not models:
            raise UnsupportedError(f"{self.url}/v1/models lists no model; is this an OpenAI-compatible server?")
        name = self._connection.model or next(iter(models))
        if name not in models:
            raise UsageError(f"--model is {name!r}; {self.url} serves {', '.join(models)}.")
        return dict(models[name])

    async def _tokenizer_form(self, model: str) -> str:
        """Which /tokenize format the server has."""
        for form, body in (("vllm", {"model": model, "prompt": "a"}), ("llamacpp", {"content": "a"})):
            found = await self._quick("POST", "/tokenize", body)
            if isinstance((found or {}).get("tokens"), list):
                return form
        return ""

    async def _known_fields(self) -> frozenset[str]:
        """Which optional fields the server accepts: tried all at once, then one by one if that fails."""
        if not _is_refused(await self.ask(_trial(2, _TRIAL_VALUES))):
            return frozenset(_FIELDS)
        known = [name for name in _FIELDS if not _is_refused(await self.ask(_trial(2, {name: _TRIAL_VALUES[name]})))]
        return frozenset(known)

    async def _modalities(self, listed: dict[str, Any], props: dict[str, Any]) -> tuple[str, ...]:
        """Modalities as reported by the server; if none are reported, a small image is sent to test."""
        if isinstance(listed.get("input_modalities"), list):
            return tuple(str(kind) for kind in listed["input_modalities"])
        if isinstance(props.get("modalities"), dict):
            return ("text", *(["image"] if props["modalities"].get("vision") else []))
        part = picture_part(_small_picture())
        message = {"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}
        answer = await self.ask(Ask((message,), max_tokens=2))
        return ("text",) if answer.failure else ("text", "image")

    def _refuse_unusable(self, failure: Failure) -> None:
        """Stops the run if a two-token request fails, with the server's message."""
        if failure.reason in (Reason.UNREACHABLE, Reason.REFUSED, Reason.SERVER_ERROR):
            status = f" (status {failure.status})" if failure.status else ""
            raise OneboxError(f"{self.url} failed the first short chat{status}: {failure.message}")

    @property
    def accepts(self) -> frozenset[str]:
        """The non-OpenAI fields that this server accepts."""
        return self._accepts

    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """The path and JSON body of a request. Fields that the server does not accept (see `accepts`) are omitted."""
        body: dict[str, Any] = {
            "model": self.server.model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if "return_token_ids" in self._accepts:
            body["return_token_ids"] = True
        if ask.ignore_eos and "ignore_eos" in self._accepts:
            body["ignore_eos"] = True
            if "min_tokens" in self._accepts:
                body["min_tokens"] = ask.max_tokens
        if not ask.is_chat:
            return "/v1/completions", body | {"prompt": _as_list(ask.prompt)} | ask.extra
        body["messages"] = list(ask.messages)
        if ask.tools:
            body["tools"] = list(ask.tools)
        if ask.thinking is not None and "chat_template_kwargs" in self._accepts:
            body["chat_template_kwargs"] = {"enable_thinking": ask.thinking}
        return "/v1/chat/completions", body | ask.extra

    async def ask(self, ask: Ask) -> StreamedAnswer:
        """Sends a request and reads its stream until it ends, fails or times out."""
        path, body = self.body(ask)
        answer = StreamedAnswer(ask, time.perf_counter())
        try:
            async with asyncio.timeout(self._connection.timeout_s):
                await self._read(path, body, answer)
        except TimeoutError:
            answer.fail(Reason.TIMEOUT, f"The answer was not complete after {self._connection.timeout_s:g} s.")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            answer.fail(Reason.UNREACHABLE, f"No connection ({error or type(error).__name__}).")
        except httpx.HTTPError as error:
            answer.fail(Reason.CUT, f"After {len(answer.arrivals_s)} chunks: {error or type(error).__name__}.")
        if answer.failure or not answer.total_s:
            # A failed stream ends now, not at its last event.
            answer.total_s = time.perf_counter() - answer.sent_at
        answer.check()
        return answer

    async def _read(self, path: str, body: dict[str, Any], answer: StreamedAnswer) -> None:
        loop = asyncio.get_running_loop()
        stall_s = self._connection.first_token_s
        try:
            async with asyncio.timeout(stall_s) as patience, self._http.stream("POST", path, json=body) as response:
                answer.status = response.status_code
                if response.is_error:
                    await response.aread()
                    refused = response.status_code < 500
                    answer.fail(Reason.REFUSED if refused else Reason.SERVER_ERROR, _said(response))
                    return
                async for data, arrived_at in _events(response):
                    if data == "[DONE]":
                        answer.is_done = True
                        continue
                    answer.take(data, arrived_at - answer.sent_at)
                    if answer.arrivals_s:
                        stall_s = self._connection.stall_s
                        patience.reschedule(loop.time() + stall_s)
                    # Time up to the last event: closing the connection is excluded.
                    answer.total_s = arrived_at - answer.sent_at
        except TimeoutError:
            answer.fail(Reason.STALL, f"No event for {stall_s:g} s after {len(answer.arrivals_s)} chunks.")

    async def count_prompt(self, ask: Ask) -> int | None:
        """Prompt tokens with the chat template; None if the server cannot count them. Images are not counted."""
        match self.server.tokenizer:
            case "vllm":
                return await self._count_as_vllm(ask)
            case "llamacpp":
                return await self._count_as_llamacpp(ask)
        # The usage of a one-token request gives the same count, more slowly.
        answer = await self.ask(replace(ask, max_tokens=1, ignore_eos=False, prompt_tokens=None))
        counted = (answer.usage or {}).get("prompt_tokens")
        return counted if isinstance(counted, int) else None

    async def _count_as_vllm(self, ask: Ask) -> int | None:
        body: dict[str, Any] = {"model": self.server.model}
        if isinstance(ask.prompt, tuple):
            return len(ask.prompt)
        if ask.prompt is not None:
            body["prompt"] = ask.prompt
        else:
            body["messages"] = list(ask.messages)
            if ask.tools:
                body["tools"] = list(ask.tools)
            if ask.thinking is not None and "chat_template_kwargs" in self._accepts:
                body["chat_template_kwargs"] = {"enable_thinking": ask.thinking}
        found = await self._quick("POST", "/tokenize", body)
        return found["count"] if found and isinstance(found.get("count"), int) else None

    async def _count_as_llamacpp(self, ask: Ask) -> int | None:
        text: Any = ask.prompt
        if ask.is_chat:
            found = await self._quick("POST", "/apply-template", {"messages": list(ask.messages)})
            text = (found or {}).get("prompt")
        if isinstance(text, tuple):
            return len(text)
        ids = await self.token_ids(text, with_special=True) if isinstance(text, str) else None
        return None if ids is None else len(ids)

    async def token_ids(self, text: str, *, with_special: bool = False) -> list[int] | None:
        """The text's token ids on the server; None without /tokenize."""
        if self.server.tokenizer == "vllm":
            body = {"model": self.server.model, "prompt": text, "add_special_tokens": with_special}
        elif self.server.tokenizer == "llamacpp":
            body = {"content": text, "add_special": with_special, "parse_special": with_special}
        else:
            return None
        found = await self._quick("POST", "/tokenize", body)
        ids = (found or {}).get("tokens")
        return ids if isinstance(ids, list) else None

    async def latency_s(self) -> float:
        """Mean time of a request that computes nothing (GET /v1/models), of three."""
        times = []
        for _ in range(_LATENCY_TRIALS):
            sent_at = time.perf_counter()
            await self._quick("GET", "/v1/models")
            times.append(time.perf_counter() - sent_at)
        return statistics.fmean(times)

    async def metrics(self) -> str | None:
        """The text of /metrics, if available."""
        try:
            response = await self._http.get("/metrics", timeout=_QUICK_S)
        except httpx.HTTPError:
            return None
        return None if response.is_error else response.text

    async def _quick(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """An untimed request; None if it is refused or the response is not a JSON object."""
        try:
            response = await self._http.request(method, path, json=body, timeout=_QUICK_S)
            found = None if response.is_error else response.json()
        except (httpx.HTTPError, ValueError):
            return None
        return found if isinstance(found, dict) else None


class _ReadClock:
    """The time of the socket read that a block of bytes came from.

    One read may hold several blocks (HTTP chunks). They come without the event loop running in between, and so share
    the read's time, however long it takes to parse them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_waited = True
        self._read_at = 0.0

    def read_at(self) -> float:
        if self._has_waited:
            self._has_waited, self._read_at = False, time.perf_counter()
            self._loop.call_soon(self._wait)
        return self._read_at

    def _wait(self) -> None:
        self._has_waited = True


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, float]]:
    """The data of each server-sent event, with the arrival time of its last bytes."""
    held, clock = b"", _ReadClock()
    async for block in response.aiter_bytes():
        arrived_at = clock.read_at()
        *lines, held = (held + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].decode("utf-8", "replace").strip(), arrived_at


def _is_refused(answer: StreamedAnswer) -> bool:
    return answer.failure is not None and answer.failure.reason in (Reason.REFUSED, Reason.SERVER_ERROR)


def _trial(max_tokens: int, extra: dict[str, Any] | None = None) -> Ask:
    message = {"role": "user", "content": "Count from one to three."}
    return Ask((message,), max_tokens=max_tokens, extra=extra or {})


def _as_list(prompt: str | Sequence[int] | None) -> Any:
    return list(prompt) if isinstance(prompt, tuple) else prompt


def _said(response: httpx.Response) -> str:
    try:
        return error_message(response.json())[:500]
    except ValueError:
        return response.text.strip()[:200] or f"status {response.status_code} without a message"


def _small_picture() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(buffer, "PNG")
    return buffer.getvalue()
