"""The server of `onebox chat`: any that is OpenAI-compatible, over HTTP."""

import contextlib
import json
import ssl
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from onebox.cli.printable import printable
from onebox.spec.authorization import authorization
from onebox.spec.errors import OneboxError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import httpx

__all__ = ["MALFORMED", "ChatServer"]

_CONNECT_S = 10.0
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading an answer raises that is JSON and not of the form that it should be."""


class ChatServer:
    """HTTP client of the server. Every refusal or broken connection becomes a one-sentence error."""

    def __init__(self, url: str, api_key: str | None) -> None:
        import httpx

        address = url if "://" in url else f"http://{url}"
        self.url = address.rstrip("/").removesuffix("/v1")
        self.model = ""
        # A long prompt delays the first token, so only connecting has a timeout.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            self._client = httpx.Client(base_url=f"{self.url}/v1/", headers=authorization(api_key), timeout=timeout)
        except httpx.InvalidURL as error:
            raise UsageError(f"--url is {url!r}, which is not a URL ({error}).") from None

    def __enter__(self) -> "ChatServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        with self._asked("GET", "models") as response:
            response.read()
            try:
                return str(response.json()["data"][0]["id"])
            except MALFORMED:
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
                except (ValueError, RecursionError):
                    shown = printable(data[:80])
                    raise UnsupportedError(f"{self.url} streamed an event that is not JSON: {shown}") from None
                if not isinstance(chunk, dict):
                    raise UnsupportedError(f"{self.url} streamed an event that is no object: {printable(data[:80])}")
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
        except UnicodeEncodeError:  # bytes from a pipe or an argument that Python could not decode
            raise UsageError("The question or the system prompt is not text in UTF-8.") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            refusal = _certificate_refusal(error)
            if refusal:
                raise OneboxError(
                    f"The certificate of {self.url} is not trusted ({refusal}); SSL_CERT_FILE=FILE names the authority "
                    "that signed it, or the certificate itself."
                ) from None
            raise OneboxError(
                f"No server answers at {self.url} ({error}); start one with `onebox serve`, or name it with --url."
            ) from None
        except httpx.HTTPError as error:
            raise OneboxError(f"The connection to {self.url} broke ({error}).") from None


def _certificate_refusal(error: BaseException | None) -> str:
    """Why the server's certificate was not accepted; "" where that is not what went wrong."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return "" if error is None else error.verify_message


def _refusal(response: "httpx.Response") -> str:
    try:
        return printable(response.json()["error"]["message"])
    except MALFORMED:
        return f"{response.url} answered with status {response.status_code}."


def _sentence(chunk: dict[str, Any]) -> str:
    """The message of an error in OpenAI's format."""
    error = chunk["error"]
    return printable(error["message"] if isinstance(error, dict) and "message" in error else error)
