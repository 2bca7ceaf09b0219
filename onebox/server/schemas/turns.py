"""A conversation given as items or blocks, to messages in the shape that `ChatInput` takes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Turns", "image_part", "text_part"]

Part = dict[str, Any]


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> Part:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


class Turns:
    """Collects messages. Consecutive reasoning, content and calls of the assistant are one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._texts: dict[str, list[str]] = {}
        """Of the assistant's message at the end, by field. Joined once: a client may send it in ten thousands of parts,
        and each sum of texts would copy all of them."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        self._join()
        return self._messages

    def add_message(self, role: str, parts: Iterable[Part]) -> None:
        """Of the system, a developer or the user."""
        self._join()
        self._messages.append({"role": role, "content": list(parts)})

    def add_content(self, text: str) -> None:
        self._assistant()
        self._texts.setdefault("content", []).append(text)

    def add_reasoning(self, text: str) -> None:
        self._assistant()
        self._texts.setdefault("reasoning_content", []).append(text)

    def add_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        """Arguments are an object, or the JSON of one."""
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, parts: Sequence[Part]) -> None:
        self._join()
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": list(parts)})

    def _assistant(self) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]

    def _join(self) -> None:
        for name, texts in self._texts.items():
            last = self._messages[-1]
            last[name] = "".join((last.get(name, ""), *texts))
        self._texts = {}
