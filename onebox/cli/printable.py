"""What others wrote, as it may be printed."""

__all__ = ["printable"]

_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_UNSAFE = {
    **{code: None for code in (*range(32), 127, *range(128, 160), *_DIRECTIONS) if chr(code) not in "\n\t"},
    **dict.fromkeys(_SURROGATES, "\N{REPLACEMENT CHARACTER}"),
}


def printable(text: object) -> str:
    """The text without escape sequences for the terminal, turned text and what cannot be printed."""
    return str(text).translate(_UNSAFE)
