"""A small vocabulary, grammars over it, and walks through them."""

import random

import numpy as np

from onebox.engine.grammar.constraint import Constraint
from onebox.engine.grammar.library import GrammarPlace
from onebox.engine.grammar.value import Grammar
from onebox.spec.vocabulary import TokenTable

# Between two bytes' tokens, tokens of several bytes: among them ones that cross the borders of a grammar's parts and
# halves of a character. The ids up to 255 are not the bytes in order; a vocabulary may not rely on it.
BYTES = tuple(bytes([255 - byte]) for byte in range(256))
WORDS = (b'{"', b'":', b", ", b'"}', b"true", b"ab", b"abc", b"\xc3", b"\xa9x", b"12", b"<think>", b"\n  ")
EOS, OTHER_EOS, CONTROL, HOLE = 256, 257, 258, 259
TABLE = TokenTable(
    tokens=(*BYTES, b"", b"", b"", b"", *WORDS),
    special_ids=frozenset({EOS, OTHER_EOS, CONTROL}),
    eos_token_ids=(OTHER_EOS, EOS),
)
VOCAB_SIZE = 300

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["tree", "rock", "ab"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "maxItems": 3},
        "is_old": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
LIST = 'start: "(" item ("," item)* ")"\nitem: /[a-c]{1,2}/ | start'
# Negated classes such as \S are left out: which characters they leave differs a little between Python and Unicode.
PATTERNS = [r"(ab|c)+[0-9]{2,3}é?", r"^[^x0-9]{3}x|/\.\"$", r"\s?[α-ω]{2}", "(?i)abc", "a*"]
GRAMMARS = [
    Grammar.json_schema(SCHEMA),
    Grammar.json_object(),
    Grammar.regex(r"(ab|c)+\d{2,3}é?"),
    Grammar.choice(["ab", "abc", 'say "no"', "é\n/"]),
    Grammar.cfg(LIST),
]


def allowed(mask) -> list[int]:
    assert mask.shape == (10,)
    assert mask.dtype == np.int32
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def walk(constraint: Constraint | GrammarPlace, seed: int, max_tokens: int = 400) -> list[int]:
    """Draws from the masks until an end token comes; the longer it takes, the more it leans to closing what is open."""
    rng = random.Random(seed)
    closing = {token_id for token_id, token in enumerate(TABLE.tokens) if token and token[-1:] in b'"}])'}
    token_ids: list[int] = []
    for step in range(max_tokens):
        choices = allowed(constraint.mask())
        preferred = [token_id for token_id in choices if token_id in closing | {EOS, OTHER_EOS}]
        if preferred and rng.random() < step / 100:
            choices = preferred
        token_ids.append(rng.choice(choices))
        constraint.advance(token_ids[-1])
        if token_ids[-1] in TABLE.eos_token_ids:
            return token_ids
    raise AssertionError(f"no end after {max_tokens} tokens: {text_of(token_ids)!r}")


def text_of(token_ids: list[int]) -> str:
    return b"".join(TABLE.tokens[token_id] for token_id in token_ids).decode()


def start_of(text: str) -> list[int]:
    """A text as the tokens of its bytes."""
    return [255 - byte for byte in text.encode()]
