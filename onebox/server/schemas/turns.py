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
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, parts: Iterable[Part]) -> None:
        """Of the system, a developer or the user."""
        self.messages.append({"role": role, "content": list(parts)})

    def add_content(self, text: str) -> None:
        self._assistant()["content"] += text

    def add_reasoning(self, text: str) -> None:
        turn = self._assistant()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        """Arguments are an object, or the JSON of one."""
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, parts: Sequence[Part]) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": list(parts)})

    def _assistant(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]
