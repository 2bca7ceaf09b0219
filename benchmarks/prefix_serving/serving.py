"""One life of `onebox serve` with the pocket model, and completions of token ids with their log-probabilities."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

__all__ = ["Completion", "Server", "prompt_of"]

START_LIMIT_S = 600.0


@dataclass(frozen=True)
class Completion:
    """An answer, and what it cost."""

    text: str
    logprobs: tuple[float, ...]
    cached_tokens: int
    first_token_s: float


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Token ids that look like text to nobody: prompts with equal seeds share their beginning."""
    ids, state = [], seed + 1
    for _ in range(num_tokens):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        ids.append(100 + (state >> 33) % 2000)
    return ids


class Server:
    """Started, and ready once constructed; killed at the end unless it was ended before."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "onebox.cli.main", "serve", "--port", "0", *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(START_LIMIT_S) or self._process.poll() is not None:
            self.kill()
            raise RuntimeError("The server did not start:\n" + "\n".join(self.lines))
        found = re.search(r"http://([\d.]+):(\d+)/v1", self.lines[-1])
        if found is None:
            raise RuntimeError(f"No address in {self.lines[-1]!r}.")
        self._host, self._port = found.group(1), int(found.group(2))

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(line.rstrip())
            if line.startswith("Ready"):
                self._ready.set()
        self._ready.set()

    def complete(self, prompt: list[int], max_tokens: int = 8) -> Completion:
        """Greedy, streamed; raises OSError where the server is gone."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "stream": True}
        body = json.dumps({**asked, "model": "pocket", "stream_options": {"include_usage": True}})
        connection = http.client.HTTPConnection(self._host, self._port, timeout=600)
        began, first_token_s = time.perf_counter(), 0.0
        text, logprobs, cached = "", list[float](), 0
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ConnectionError(response.read().decode())
            for line in response:
                event = _event(line)
                for choice in event.get("choices", ()):
                    first_token_s = first_token_s or time.perf_counter() - began
                    text += choice["text"]
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
                if event.get("usage"):
                    cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from None
        finally:
            connection.close()
        if len(logprobs) != max_tokens and not text:
            raise ConnectionError("The answer was cut off.")
        return Completion(text, tuple(logprobs), cached, first_token_s)

    def terminate(self) -> float:
        """As a service manager ends it; returns the seconds that it took."""
        began = time.perf_counter()
        self._process.terminate()
        self._process.wait(120)
        return time.perf_counter() - began

    def kill(self) -> None:
        """With -9, the engine's process with it: both at one moment."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _event(line: bytes) -> dict[str, Any]:
    content = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or content == b"[DONE]":
        return {}
    event: dict[str, Any] = json.loads(content)
    if "error" in event:
        raise ConnectionError(str(event["error"]))
    return event
