"""A checkpoint's tokenizer: text to ids, ids to text, and the exact bytes behind each id.

The family's tokenizers are byte-level: every token is a fixed string of bytes, so text can be joined
token by token without decoding twice (`stream.py` relies on it). Any other kind is refused.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import read_json

__all__ = ["Tokenizer"]


class Tokenizer:
    """tokenizer.json of one checkpoint. Control tokens such as <|im_end|> have no text; <think> does."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = {token_id for token_id, token in added.items() if token.special}

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        path = directory / "tokenizer.json"
        decoder = read_json(path).get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise UnsupportedError(f"{path} has a decoder that is not ByteLevel; this family's tokenizers are.")
        try:
            return cls(_Tokenizer.from_file(str(path)))
        except Exception as error:
            # The library raises bare Exceptions for whatever it finds wrong in the file.
            raise UnreadableError(f"{path} cannot be read as a tokenizer ({error}): download it again.") from None

    @property
    def message_token_ids(self) -> tuple[int, ...]:
        """The token that opens a message in the family's chat format, if this tokenizer has it."""
        token_id = self._tokenizer.token_to_id("<|im_start|>")
        return () if token_id is None else (token_id,)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text; control tokens written out in it become those tokens, and none is added."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair.
            raise UsageError(
                f"The text holds U+{ord(text[error.start]):04X} by itself, which is no character."
            ) from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id adds to the text: none for control tokens and for the vocabulary's padding."""
        return b"" if token_id in self._hidden else self.shown_bytes(token_id)

    def shown_bytes(self, token_id: int) -> bytes:
        """The same, with control tokens by their names: the text that `encode` makes these ids of."""
        text = self._tokenizer.id_to_token(token_id)
        if text is None:
            return b""
        table = _byte_of_char()
        # An added token is written as it is, and may hold characters that are not in the byte alphabet.
        return bytes(table[char] for char in text) if all(char in table for char in text) else text.encode()


@cache
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: a printable Latin-1 byte is its own character, the others are shifted above 255."""
    alphabet = ByteLevel.alphabet()
    own = {char: ord(char) for char in alphabet if ord(char) < 256}
    shifted = sorted(char for char in alphabet if ord(char) >= 256)
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip(shifted, others, strict=True))
