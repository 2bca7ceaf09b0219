"""The only calls into the grammar library: its tokenizer, its compiler, and one place in a compiled grammar.

The library is imported with the first grammar, so an engine that gets none does not need it. It may refuse, reach one
of its limits or panic; here all of that becomes an error of onebox, about one grammar.
"""

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from onebox.engine.grammar.value import Grammar, GrammarError
from onebox.spec.errors import UnsupportedError
from onebox.spec.vocabulary import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = [
    "GrammarLimitError",
    "GrammarPlace",
    "TokenMasks",
    "Words",
    "compile_matcher",
    "has_failed_lexer",
    "holds",
    "open_tokenizer",
    "refusal",
    "start_thread",
]

Words = NDArray[np.int32]
T = TypeVar("T")
P = ParamSpec("P")

_WORD_BITS = 32

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, the library would ask a tokenizer for its one proper split and forbid the others.
The engine has no tokenizer; without forcing, every split of the text is allowed and the model chooses. Written after
the grammar's own lines: the last such line counts, and errors keep their line numbers."""

_LIMITS = {
    "max_items_in_row": 600,
    "step_max_items": 15_000,
    "step_lexer_fuel": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""No mask and no step of a token takes longer than about 100 ms under these, whatever the grammar: the time grows with
the third power of the items in a row. One object may still have about 150 optional properties. A lexer state takes
about 250 bytes, and a text of bounded length one for each character."""

_MAX_MESSAGE = 300


class GrammarLimitError(UnsupportedError):
    """The library failed where a grammar had led it, for instance at one of its limits."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The answer cannot be held to its grammar any longer ({reason}): simplify it.")
        self.reason = reason


def start_thread(target: Callable[[], None], name: str, stack_bytes: int) -> threading.Thread:
    """Starts a daemon thread with a stack of that size: the library recurses as deep as a grammar is nested."""
    before = threading.stack_size(stack_bytes)
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


# Compiling.


def open_tokenizer(table: TokenTable, vocab_size: int) -> "LLTokenizer":
    """The table as the library needs it; takes seconds at 250,000 tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_LibraryTable(table, vocab_size)), eos_token=list(table.eos_token_ids))


def compile_matcher(tokenizer: "LLTokenizer", grammar: Grammar) -> "LLMatcher":
    """The grammar at its start. A GrammarError says why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    def build() -> "LLMatcher":
        limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        return LLMatcher(tokenizer, grammar.rules + _NO_FORCING, log_level=0, limits=limits)

    try:
        matcher = _guarded(build)
    except GrammarLimitError as error:
        raise refusal(grammar, error.reason) from None
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    return matcher


def has_failed_lexer(matcher: "LLMatcher") -> bool:
    """Whether a copy of this matcher broke the lexer that all its copies share."""
    copy = matcher.deep_copy()
    try:
        _guarded(copy.compute_bitmask)
    except GrammarLimitError:
        return True
    return copy.is_error()


def refusal(grammar: Grammar, message: str) -> GrammarError:
    return GrammarError(f"The {grammar.kind.noun} cannot be used: {_sentence(message)}.", grammar.field_name)


class _LibraryTable:
    """The table in the form that the library reads. Control tokens need names; these cannot occur in text."""

    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        self.special_token_ids = sorted(table.special_ids.union(table.eos_token_ids))
        self.eos_token_id = table.eos_token_ids[0]
        self.tokens = [*table.tokens, *[b""] * (vocab_size - len(table.tokens))]
        for token_id in self.special_token_ids:
            self.tokens[token_id] = b"\xff<control %d>" % token_id

    def __call__(self, text: bytes) -> list[int]:
        """Called only when text is forced, which `_NO_FORCING` rules out."""
        raise TypeError(f"the engine has no tokenizer to split {text!r} with")


# Masks and places.


class TokenMasks:
    """Which of a vocabulary's tokens have text and which end an answer, as masks of ceil(V / 32) words."""

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        self.eos_token_ids = frozenset(table.eos_token_ids)
        self.eos = _words(self.eos_token_ids, vocab_size)
        text_ids = {token_id for token_id, token in enumerate(table.tokens) if token} - table.special_ids
        self.text = _words(text_ids, vocab_size)
        self._sampled = self.text | self.eos

    def finish(self, words: Words) -> Words:
        """The library's mask without tokens that have no text; the end tokens where nothing would be left."""
        allowed = words & self._sampled
        return allowed if allowed.any() else self.eos.copy()


class GrammarPlace:
    """One place in a compiled grammar, moved token by token. Every failure of the library is a GrammarLimitError."""

    def __init__(self, masks: TokenMasks, matcher: "LLMatcher") -> None:
        self._masks = masks
        self._matcher = matcher
        self._num_consumed = 0
        self._num_past_end = 0
        """End tokens after the last one that the matcher takes, and therefore can take back."""

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token may follow. An answer may also end earlier, where the mask holds the end tokens."""
        return self._num_past_end > 0 or self._matcher.is_stopped()

    def mask(self) -> Words:
        """The tokens allowed next, int32 [ceil(V / 32)]: bit i of word w is token 32 w + i. Never empty."""
        words = self.raw_mask()
        return self._masks.eos.copy() if self.is_complete else self._masks.finish(words)

    def raw_mask(self) -> Words:
        """The library's own mask, in which tokens without text may be allowed."""
        words = np.frombuffer(_guarded(self._matcher.compute_bitmask), np.int32)
        self._check()
        # It may be a word longer than V needs.
        return words[: len(self._masks.text)]

    def advance(self, token_id: int) -> None:
        """Moves past a token that the mask allows; refuses any other and stays."""
        if not self.is_complete and _guarded(self._matcher.try_consume_tokens, [token_id]) == 1:
            self._check()
            self._num_consumed += 1
        elif token_id in self._masks.eos_token_ids and holds(self.mask(), token_id):
            self._num_past_end += 1
        else:
            self._check()
            raise UnsupportedError(f"The grammar does not allow token {token_id} here, and it was sampled.")

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last `num_tokens` advances."""
        if not 0 <= num_tokens <= self._num_consumed + self._num_past_end:
            raise ValueError(f"{self._num_consumed + self._num_past_end} advances cannot go back {num_tokens}")
        num_past_end = min(num_tokens, self._num_past_end)
        self._num_past_end -= num_past_end
        self._num_consumed -= num_tokens - num_past_end
        _guarded(self._matcher.rollback, num_tokens - num_past_end)
        self._check()

    def _check(self) -> None:
        """Raises if the library failed, for instance on a state beyond its limits; it stays failed."""
        if self._matcher.is_error():
            raise GrammarLimitError(_sentence(self._matcher.get_error()))


def holds(words: Words, token_id: int) -> bool:
    """Whether a mask allows a token."""
    word, bit = divmod(token_id, _WORD_BITS)
    return 0 <= word < len(words) and bool(words[word] >> bit & 1)


def _words(token_ids: frozenset[int] | set[int], vocab_size: int) -> Words:
    """A mask of these tokens, int32 [ceil(vocab_size / 32)]."""
    bits = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


# The library's failures.


def _guarded(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the call returns. A panic of the library derives from BaseException, and ends nothing but this grammar."""
    try:
        return call(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise GrammarLimitError(_sentence(str(error))) from None


def _sentence(message: str) -> str:
    """The main line of a library error, without its source excerpt and list of alternatives."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason was given"]
    main = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    # Positions in the line that onebox wrote, alternatives and settings mean nothing to the client.
    noise = r"^at 1\(8\): (failed to compile JSON schema: )?|; following .*|\. Enable .*"
    sentence = re.sub(noise, "", main).rstrip(".:")
    return sentence if len(sentence) <= _MAX_MESSAGE else sentence[: _MAX_MESSAGE - 3] + "..."
