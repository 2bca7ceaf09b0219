"""What an engine that knows only token ids is told about the text behind them."""

from dataclasses import dataclass

__all__ = ["TokenTable"]


@dataclass(frozen=True)
class TokenTable:
    """The bytes that each token id stands for. A plain value: it crosses thread and process boundaries."""

    tokens: tuple[bytes, ...]
    """By id; b"" for control tokens and for ids that no token has."""
    special_ids: frozenset[int]
    """Control tokens, such as <|im_end|>: they have no text, so no text can hold them."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end an answer."""
