"""The bytes of each token, for an engine that otherwise handles only token ids."""

from dataclasses import dataclass

__all__ = ["TokenTable"]


@dataclass(frozen=True)
class TokenTable:
    """The bytes of each token id. A plain value that can be passed between threads and processes."""

    tokens: tuple[bytes, ...]
    """Indexed by id; b"" for control tokens and unassigned ids."""
    special_ids: frozenset[int]
    """Control tokens, such as <|im_end|>: they have no text, so tokenising plain text never yields them."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end an answer."""
