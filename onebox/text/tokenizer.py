"""A checkpoint's tokenizer: text to ids, ids to text, and the exact bytes behind each id.

The family's tokenizers are byte-level: every token is a fixed string of bytes, so text can be joined
token by token without decoding twice (`stream.py` relies on it). Any other kind is refused.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import read_json
from onebox.text.marks import MARKS
from onebox.text.shield import Shield, refuse_half_characters

__all__ = ["Tokenizer", "TooManyTokensError"]

# The library would start threads of its own, which do not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_PIECE_CHARS = 1 << 15
"""A long text is encoded in pieces of about so many characters, and not further than a limit of tokens needs."""
_SEARCH_CHARS = 1 << 15
"""The place of a cut is searched in steps of so many characters: a search does not let other threads run."""
_SPLITS = {
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}| ?[^\s{marks}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for letters, marks in ((r"\p{L}", r"\p{L}"), (r"[\p{L}\p{M}]", r"\p{L}\p{M}"))
}
"""How the family's tokenizers split text into words, within which tokens are merged."""
_CUT = re.compile(
    r"(?<=[0-9])(?=[\n -~])|(?<=[A-Za-z])(?=[\n -@\[-`{-~])"
    "|(?<=[!-~\u00c0-\u167f\u3041-\ud7a3])(?= )"
    "|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3])(?=[\u3001\u3002\uff0c])"
)
"""Places where a word ends by those rules whatever comes before and behind: behind an ASCII digit, between an ASCII
letter and what is none, before a space, between a letter and a comma or full stop of East Asian text. None lies inside
what Unicode's composition joins."""
_MAX_WORD_CHARS = 1 << 18
"""Without a place to cut, the time grows faster than the length; no word is as long as this."""
_CACHED_WORDS = 256
"""Words whose ids the library keeps; it never forgets one. Its own 10,000 take 68 MB where clients send words of 200
characters, and save less than a fifth of the time. Few are there within a minute, many would come for half an hour.
"""
_COMPOSED_CHARS = 4
"""Characters that Unicode's composition may join to one, before text is split into words."""


class TooManyTokensError(UsageError):
    """A text has more tokens than its caller can use."""


class Tokenizer:
    """tokenizer.json of one checkpoint. Control tokens such as <|im_end|> have no text; <think> does."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = _bounded(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        for token in added.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise UnsupportedError(
                    f"tokenizer.json has a token {token.content!r} that depends on the text around it; this family's "
                    "do not."
                )
        self._hidden = {token_id for token_id, token in added.items() if token.special}
        self._control_ids = {token.content: token_id for token_id, token in added.items() if token.content}
        self.shield = Shield(self._control_ids)
        """Covers what clients wrote in a text for `encode_rendered`."""
        self.mark_ids = {self._control_ids[mark]: mark for mark in MARKS if mark in self._control_ids}
        """The marks of an answer that are tokens, by id."""
        self._can_cut = _split_pattern(tokenizer) in _SPLITS

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        path = directory / "tokenizer.json"
        decoder = read_json(path).get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise UnsupportedError(f"{path} has a decoder that is not ByteLevel; this family's tokenizers are.")
        try:
            tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises bare Exceptions for whatever it finds wrong in the file.
            raise UnreadableError(f"{path} cannot be read as a tokenizer ({error}): download it again.") from None
        return cls(tokenizer)

    @property
    def added_token_ids(self) -> tuple[int, ...]:
        """Of all tokens beside the byte-pair vocabulary, such as <|im_end|> and <think>."""
        return tuple(sorted(self._control_ids.values()))

    @property
    def message_token_ids(self) -> tuple[int, ...]:
        """The token that opens a message in the family's chat format, if this tokenizer has it."""
        token_id = self._tokenizer.token_to_id("<|im_start|>")
        return () if token_id is None else (token_id,)

    @property
    def thinking_token_ids(self) -> tuple[int, int] | None:
        """The tokens that open and close a reasoning; None where this tokenizer spells either of them."""
        opens, closes = (self._tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
        return None if opens is None or closes is None else (opens, closes)

    @property
    def spelled_marks(self) -> frozenset[str]:
        """The marks for which there is no token, so that an answer spells them."""
        return frozenset(MARKS) - set(self.mark_ids.values())

    def encode(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        """Ids of text; control tokens written out in it become those tokens, and none is added.

        A text of more than `max_tokens` is refused with TooManyTokensError, before all of it is encoded, and so is one
        that would take very long, with a UsageError.
        """
        refuse_half_characters(text)
        return self.encode_rendered(text, max_tokens)

    def encode_rendered(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        """The same of a text in which the shield has covered what clients wrote: control tokens spelled there are text.

        Text between two control tokens is encoded by itself, as the tokenizer library does it too, so other text has
        the ids that `encode` gives it.
        """
        if max_tokens is not None and len(text) > self.max_chars(max_tokens):
            raise TooManyTokensError(f"The text has more than {max_tokens} tokens.")
        token_ids: list[int] = []
        for words, control in self.shield.split(text):
            for piece in self._pieces(words, is_bounded=max_tokens is not None):
                token_ids += self._encode_words(self.shield.uncover(piece))
                if max_tokens is not None and len(token_ids) > max_tokens:
                    raise TooManyTokensError(f"The text has more than {max_tokens} tokens.")
            if control:
                token_ids.append(self._control_ids[control])
        if max_tokens is not None and len(token_ids) > max_tokens:
            raise TooManyTokensError(f"The text has more than {max_tokens} tokens.")
        return tuple(token_ids)

    def _encode_words(self, text: str) -> list[int]:
        """Ids of text without control tokens; what is spelled as one is encoded as text."""
        tokenizer = self._wordwise if self.shield.is_spelled_in(text) else self._tokenizer
        # In contrast to `encode`, the library lets other threads run meanwhile.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def _pieces(self, text: str, *, is_bounded: bool) -> Iterator[str]:
        """The text cut at ends of words, where that leaves its ids as they are; `is_bounded` refuses endless words."""
        at = 0
        while self._can_cut and len(text) - at > _PIECE_CHARS:
            start = at + _PIECE_CHARS
            end = _find_cut(text, start, start + _MAX_WORD_CHARS if is_bounded else len(text))
            yield text[at:end]
            at = end
        if at < len(text):
            yield text[at:]

    def max_chars(self, num_tokens: int) -> int:
        """A text of more characters certainly has more tokens."""
        return num_tokens * self._max_token_bytes * _COMPOSED_CHARS

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @cached_property
    def _wordwise(self) -> _Tokenizer:
        """The tokenizer without control tokens. Few prompts need it, so it is made when the first one does."""
        source: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return _bounded(_Tokenizer.from_str(json.dumps({**source, "added_tokens": [], "post_processor": None})))

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


def _bounded(tokenizer: _Tokenizer) -> _Tokenizer:
    """The tokenizer with a small cache of words, where its kind has one."""
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize:
        resize(_CACHED_WORDS)
    return tokenizer


def _split_pattern(tokenizer: _Tokenizer) -> str | None:
    """The rule by which text is split into words, if that is the only rule."""
    if tokenizer.pre_tokenizer is None:
        return None
    state = json.loads(tokenizer.pre_tokenizer.__getstate__())
    match state.get("pretokenizers"):
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
        case _:
            return None


def _find_cut(text: str, start: int, end: int) -> int:
    """The first place from `start` on where the text may be cut, or its end; refused if it lies beyond `end`."""
    for at in range(start, min(end, len(text)), _SEARCH_CHARS):
        if found := _CUT.search(text, at, at + _SEARCH_CHARS + 1):
            return found.start()
    if end < len(text):
        raise UsageError(
            f"The text holds more than {_MAX_WORD_CHARS} characters without a place where a word ends, such as a "
            "space; break them up."
        )
    return len(text)


@cache
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: a printable Latin-1 byte is its own character, the others are shifted above 255."""
    alphabet = ByteLevel.alphabet()
    own = {char: ord(char) for char in alphabet if ord(char) < 256}
    shifted = sorted(char for char in alphabet if ord(char) >= 256)
    others = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip(shifted, others, strict=True))
