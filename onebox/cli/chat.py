"""`onebox chat`: a conversation in the terminal with any OpenAI-compatible server."""

import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.spec.errors import OneboxError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import httpx

__all__ = ["chat"]

_CONNECT_S = 10.0
_HELP = """\
/reset          clear the conversation
/system TEXT    set the system prompt; without TEXT, remove it
/think on|off   switch thinking on or off
/help           show this help
Ctrl-C stops an answer, Ctrl-D exits."""
_UNSAFE = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""Control characters, which could send escape sequences to the terminal."""


def chat(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="ONEBOX_API_KEY", help="The server's API key, if it needs one.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first listed.")] = None,
) -> None:
    """Chat with a model on a server, in the terminal."""
    with _Server(url, api_key) as server:
        server.model = model or server.first_model()
        typer.echo(f"{server.model} at {server.url}. /help shows the commands.")
        _talk(_Conversation(server))


def _talk(conversation: "_Conversation") -> None:
    """Reads lines and prints answers until the input ends. An error ends only the current answer."""
    while True:
        try:
            conversation.take(_read_line())
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D exits.")
        except OneboxError as error:
            typer.echo(f"onebox: {error}", err=True)


def _read_line() -> str:
    """A line with the terminal's editing; no prompt if stdin is a pipe."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.strip()
    import readline  # noqa: F401 - input() uses it for line editing once imported

    return input("> ").strip()


class _Conversation:
    """The messages so far, and how the next answer is requested."""

    def __init__(self, server: "_Server") -> None:
        self._server = server
        self._messages: list[dict[str, Any]] = []
        self._system = ""
        self._thinks: bool | None = None
        """None: the model's default; the field is not sent, because other servers may not accept it."""

    def take(self, line: str) -> None:
        """Handles an input line: a command, or a message to the model."""
        if line.startswith("/"):
            typer.echo(self._command(line))
        elif line:
            self._say(line)

    def _command(self, line: str) -> str:
        """Runs a command line that begins with a slash; returns the text to print."""
        name, _, text = line.partition(" ")
        text = text.strip()
        match name, text:
            case "/reset", "":
                self._messages.clear()
                return "The conversation is cleared."
            case "/system", _:
                self._system = text
                return "The system prompt is set." if text else "There is no system prompt."
            case "/think", "on" | "off":
                self._thinks = text == "on"
                return f"Thinking is {text}."
            case "/help", "":
                return _HELP
        raise UsageError(f"{line!r} is not a command; /help shows the commands.")

    def _say(self, text: str) -> None:
        """Sends the question, streams the answer and stores both; without an answer, the question is dropped too."""
        self._messages.append({"role": "user", "content": text})
        answer = _Answer()
        try:
            self._read(answer)
        finally:
            answer.end()
            if answer.is_empty:
                self._messages.pop()
            else:
                self._messages.append(answer.message())

    def _read(self, answer: "_Answer") -> None:
        try:
            # Closed at once: a server keeps generating while the connection is open.
            with contextlib.closing(self._server.stream(self._body())) as chunks:
                for chunk in chunks:
                    answer.take(chunk)
        except KeyboardInterrupt:
            answer.note("stopped")
        else:
            answer.note(answer.figures())

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body: dict[str, Any] = {"messages": [*system, *self._messages]}
        if self._thinks is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._thinks}
        return body


@dataclass
class _Call:
    """A tool call while it streams."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class _Answer:
    """One answer, assembled and printed while it streams."""

    content: str = ""
    calls: dict[int, _Call] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    _shown: str = ""
    """Kind of the last printed part: reasoning, content, or a call's number."""
    _is_line_open: bool = False
    _began: float = field(default_factory=time.monotonic)
    _first: float | None = None
    _last: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not self.content and not self.calls

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [call.message() for call in self.calls.values()]
        return message

    def take(self, chunk: dict[str, Any]) -> None:
        """Adds a chunk of the stream and prints its new content."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            # Servers use either name; onebox sends both.
            self._show("reasoning", delta.get("reasoning_content") or delta.get("reasoning") or "", dim=True)
            content = delta.get("content") or ""
            self.content += content
            self._show("content", content)
            for call in delta.get("tool_calls") or ():
                self._take_call(call)

    def _take_call(self, part: dict[str, Any]) -> None:
        number, said = part.get("index") or 0, part.get("function") or {}
        call = self.calls.setdefault(number, _Call())
        call.id = call.id or part.get("id") or ""
        name, arguments = said.get("name") or "", said.get("arguments") or ""
        call.name += name
        call.arguments += arguments
        self._show(f"call {number}", f"tool call: {name} {arguments}" if name else arguments, fg="cyan")

    def _show(self, kind: str, text: str, **style: Any) -> None:
        if not self._shown or kind != self._shown:
            text = text.lstrip("\n")
        if not text:
            return
        now = time.monotonic()
        self._first, self._last = self._first or now, now
        if self._shown and kind != self._shown:
            self.end()
        self._shown = kind
        typer.secho(text.translate(_UNSAFE), nl=False, **style)
        self._is_line_open = not text.endswith("\n")

    def end(self) -> None:
        """Ends the current line."""
        if self._is_line_open:
            typer.echo()
        self._is_line_open = False

    def note(self, text: str) -> None:
        """A dimmed line below the answer."""
        self.end()
        if text:
            typer.secho(f"({text})", dim=True)

    def figures(self) -> str:
        """Tokens and speed, if the server reports usage."""
        made = self.usage.get("completion_tokens") or 0
        if not made or self._first is None:
            return ""
        seconds = self._last - self._first
        speed = f", {(made - 1) / seconds:.1f} tokens/s" if seconds > 0 else ""
        return f"{made} tokens{speed}, first after {self._first - self._began:.2f} s"


class _Server:
    """HTTP client of the server. Every refusal or broken connection becomes a one-sentence error."""

    def __init__(self, url: str, api_key: str | None) -> None:
        import httpx

        address = url if "://" in url else f"http://{url}"
        self.url = address.rstrip("/").removesuffix("/v1")
        self.model = ""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A long prompt delays the first token, so only connecting has a timeout.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            self._client = httpx.Client(base_url=f"{self.url}/v1/", headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise UsageError(f"--url is {url!r}, which is not a URL ({error}).") from None

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        with self._asked("GET", "models") as response:
            response.read()
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise UnsupportedError(
                    f"{self.url}/v1/models does not list a model; is this an OpenAI-compatible server?"
                ) from None

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of the answer to a chat request; an error event is raised."""
        body = {"model": self.model, **body, "stream": True, "stream_options": {"include_usage": True}}
        with self._asked("POST", "chat/completions", body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                try:
                    chunk = json.loads(data)
                except ValueError:
                    raise UnsupportedError(f"{self.url} streamed an event that is not JSON: {data[:80]}") from None
                if "error" in chunk:
                    raise OneboxError(_sentence(chunk))
                yield chunk

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator["httpx.Response"]:
        import httpx

        try:
            with self._client.stream(method, path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise OneboxError(_refusal(response))
                yield response
        except httpx.UnsupportedProtocol:
            raise UsageError(f"--url is {self.url!r}; it must begin with http:// or https://.") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise OneboxError(
                f"No server answers at {self.url} ({error}); start one with `onebox serve`, or name it with --url."
            ) from None
        except httpx.HTTPError as error:
            raise OneboxError(f"The connection to {self.url} broke ({error}).") from None


def _refusal(response: "httpx.Response") -> str:
    try:
        return _sentence(response.json())
    except (ValueError, LookupError, TypeError):
        return f"{response.url} answered with status {response.status_code}."


def _sentence(body: dict[str, Any]) -> str:
    """The message of an error in OpenAI's format, without control characters."""
    return str(body["error"]["message"]).translate(_UNSAFE)
