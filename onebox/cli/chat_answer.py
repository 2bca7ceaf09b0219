"""An answer of `onebox chat` as it is printed."""

import time
from dataclasses import dataclass, field
from typing import Any

import typer

from onebox.cli.printable import printable

__all__ = ["ChatAnswer"]


@dataclass
class _Call:
    """A tool call while it streams."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class ChatAnswer:
    """One answer, assembled and printed while it streams; plain, as scripts read it, its words alone."""

    is_plain: bool = False
    content: str = ""
    finish_reason: str = ""
    is_stopped: bool = False
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
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
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
        if self.is_plain and kind == "reasoning":
            return
        if self._shown and kind != self._shown:
            self.end()
        self._shown = kind
        typer.secho(printable(text), nl=False, **style)
        self._is_line_open = not text.endswith("\n")

    def end(self) -> None:
        """Ends the current line."""
        if self._is_line_open:
            typer.echo()
        self._is_line_open = False

    def note(self, text: str) -> None:
        """A dimmed line below the answer."""
        self.end()
        if text and not self.is_plain:
            typer.secho(f"({text})", dim=True)

    def figures(self) -> str:
        """Tokens and speed, if the server reports usage."""
        made = int(self.usage.get("completion_tokens") or 0)
        if not made or self._first is None:
            return ""
        seconds = self._last - self._first
        speed = f", {(made - 1) / seconds:.1f} tokens/s" if seconds > 0 else ""
        return f"{made} tokens{speed}, first after {self._first - self._began:.2f} s"
