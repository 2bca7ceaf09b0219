"""The table of a tokenizer's tokens, which the engine needs to constrain answers to a grammar."""

from onebox.spec.vocabulary import TokenTable
from onebox.text.tokenizer import Tokenizer

__all__ = ["token_table"]


def token_table(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> TokenTable:
    """The bytes of every token up to the highest id, added tokens included, and which of them are control tokens."""
    known = tokenizer._tokenizer.get_vocab(with_added_tokens=True).values()
    tokens = tuple(map(tokenizer.token_bytes, range(max(known) + 1)))
    return TokenTable(tokens, frozenset(tokenizer._hidden), eos_token_ids)
