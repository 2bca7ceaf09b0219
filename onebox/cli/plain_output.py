"""Output on terminals without Unicode: what cannot be written is spelled with what can, and never ends a command."""

import codecs
import io
import sys

__all__ = ["spell_what_cannot_be_written"]

_ERRORS = "onebox-spelled"
_SPELLINGS = {"±": "+-", "°": " deg ", "×": "x", "…": "...", "→": "->", "–": "-", "—": "-", "’": "'"}
_SPELLINGS |= {"“": '"', "”": '"', "█": "#", **dict.fromkeys("▏▎▍▌▋▊▉", " ")}


def spell_what_cannot_be_written() -> None:
    """For standard output and standard error, where their encoding lacks characters: ASCII, Latin-1 and the like."""
    codecs.register_error(_ERRORS, _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors=_ERRORS)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(_SPELLINGS.get(char, "?") for char in wrong), error.end
