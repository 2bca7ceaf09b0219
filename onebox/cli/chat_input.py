"""What is typed, pasted or piped into `onebox chat`."""

import os
import select
import sys
from typing import Any

from onebox.spec.errors import UsageError

__all__ = ["QUOTES", "is_terminal", "read_message", "read_pipe"]

QUOTES = '"""'
"""Around a message of several lines, as in Ollama."""
_PROMPT, _CONTINUED = "> ", ". "
_PASTE_S = 0.05


def is_terminal(stream: Any) -> bool:
    """Whether a person is at the other end; a closed stream is None."""
    return stream is not None and stream.isatty()


def read_pipe() -> str:
    """All of stdin where it is a file or a pipe; empty for a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.read().strip("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not text in {error.encoding} (byte {error.start}).") from None


def read_message() -> str:
    """A message from the terminal: a line, what was pasted at once, or what stands between triple quotes."""
    lines = [_read_lines(_PROMPT)]
    if not lines[0].lstrip().startswith(QUOTES):
        return lines[0].strip()
    # The mark may end the line that it begins.
    while not _is_closed("\n".join(lines)):
        lines.append(_read_lines(_CONTINUED))
    return "\n".join(lines).strip().removeprefix(QUOTES).removesuffix(QUOTES).strip()


def _is_closed(text: str) -> bool:
    text = text.strip()
    return text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)


def _read_lines(prompt: str) -> str:
    """A line with the terminal's editing, or several that came at once.

    GNU readline takes a paste as one text, its line ends included, wherever the terminal marks pastes. Elsewhere, the
    lines that are already there when the first one ends belong to it.
    """
    marks_pastes = _prepare_editing()
    text = input(prompt)
    while not marks_pastes and _has_more():
        text += "\n" + input()
    return text


def _prepare_editing() -> bool:
    """Sets line editing up, which input() uses once it is imported; whether it knows a paste from typed lines."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or "") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _has_more() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], _PASTE_S)[0])
    except (OSError, ValueError):
        return False
