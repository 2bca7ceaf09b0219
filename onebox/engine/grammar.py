"""Constrains an answer to a grammar: which tokens may come next, advanced and rolled back with the sequence.

A `Grammar` is what a request asks for, a plain value. A `GrammarCompiler` is built once per engine and compiles
grammars against its tokens. A `Constraint` is one sequence's place in its grammar. The grammar library is imported with
the first grammar, so an engine that gets none does not need it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onebox.spec.errors import MismatchError, UnsupportedError, UsageError
from onebox.spec.vocabulary import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "GrammarKind"]

Words = NDArray[np.int32]

_WORD_BITS = 32
_NUM_COMPILED = 64
"""Grammars kept compiled. One takes from a few kilobytes to a few megabytes; clients repeat theirs."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, the library would ask a tokenizer for its one proper split and forbid the others.
The engine has no tokenizer; without forcing, every split of the text is allowed and the model chooses. Written after
the grammar's own lines: the last such line counts, and errors keep their line numbers."""

_JSON_WHITESPACE = r"[ \n\r\t]{1,64}"
"""Enough for a deep indent; unbounded, a model can write whitespace until its token limit."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    CFG = "cfg"


@dataclass(frozen=True)
class Grammar:
    """What a whole answer must match. Refused when created, if no answer could match it."""

    kind: GrammarKind
    text: str
    """JSON of the schema or of the list of choices, the regex, or the Lark grammar; empty for json_object."""

    def __post_init__(self) -> None:
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_lark(_lark(self))
        except UnicodeEncodeError:
            # JSON can spell half of a surrogate pair.
            raise _refusal(self.kind, "it holds half of a surrogate pair, which is no character") from None
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_error:
            raise _refusal(self.kind, messages[0])

    @property
    def rules(self) -> str:
        """The same grammar in Lark's notation; inside `%lark { }` it is a part of a larger one."""
        return _rules(self)

    @classmethod
    def json_schema(cls, schema: dict[str, Any]) -> "Grammar":
        """A document that the schema accepts, its properties in the schema's order."""
        if not isinstance(schema, dict):
            raise UsageError(f"A JSON schema must be an object; this one is {_brief(schema)}.")
        if "x-guidance" in schema:
            raise UsageError("The JSON schema holds x-guidance, settings of the grammar library; remove them.")
        return cls(GrammarKind.JSON_SCHEMA, _json(schema, "JSON schema"))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT, "")

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that the pattern matches from end to end. Classes are Unicode's; no look-around, no back-references."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """One of these texts."""
        if not choices:
            raise UsageError("The list of choices is empty; give at least one.")
        for choice in choices:
            if not isinstance(choice, str) or not choice:
                raise UsageError(f"Each choice must be a text of at least one character; one is {_brief(choice)}.")
        return cls(GrammarKind.CHOICE, _json(list(choices), "list of choices"))

    @classmethod
    def cfg(cls, lark: str) -> "Grammar":
        """Text of a context-free grammar in Lark's notation, from its rule `start`; it cannot name control tokens."""
        return cls(GrammarKind.CFG, lark)


class GrammarCompiler:
    """Compiles grammars against the engine's tokens, and caches the latest.

    `vocab_size` is the number of logits' columns, V. It may exceed the table: ids without text are never allowed.
    Building one takes seconds at 250,000 tokens.
    """

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        if len(table.tokens) > vocab_size:
            raise MismatchError(
                f"The tokenizer has {len(table.tokens)} tokens and the model only {vocab_size} columns for them: "
                "they do not belong together."
            )
        if not table.eos_token_ids:
            raise UsageError("No token ends an answer, so no answer can be held to a grammar: name the end tokens.")
        if max(table.eos_token_ids) >= vocab_size:
            raise MismatchError(f"The end token {max(table.eos_token_ids)} is not among the model's {vocab_size}.")
        self.eos_token_ids = frozenset(table.eos_token_ids)
        self._eos_words = _words(self.eos_token_ids, vocab_size)
        text_ids = {token_id for token_id, token in enumerate(table.tokens) if token} - table.special_ids
        self._text_words = _words(text_ids, vocab_size)
        self._tokenizer = _library_tokenizer(table, vocab_size)
        self._compiled = lru_cache(_NUM_COMPILED)(self._compile)

    def constrain(self, grammar: Grammar) -> "Constraint":
        """A sequence's place in the grammar, at its start."""
        return Constraint(self, self._compiled(grammar).deep_copy())

    def finish_mask(self, words: Words) -> Words:
        """The library's mask without tokens that have no text; the end tokens where nothing would be left."""
        # The library's mask may be a word longer than V needs.
        allowed = words[: len(self._text_words)] & (self._text_words | self._eos_words)
        return allowed if allowed.any() else self.eos_mask()

    def eos_mask(self) -> Words:
        return self._eos_words.copy()

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(_lark(grammar)), log_level=0)
        if matcher.is_error():
            raise _refusal(grammar.kind, matcher.get_error())
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(self._text_words)]
        has_text = bool((words & self._text_words).any())
        if matcher.stop_reason() == "NoExtensionBias" or not (has_text or matcher.is_accepting()):
            raise _refusal(grammar.kind, "no text fits it")
        if matcher.is_error():
            raise _refusal(grammar.kind, matcher.get_error())
        return matcher


class Constraint:
    """One sequence's place in its grammar. Made by `GrammarCompiler.constrain`."""

    def __init__(self, compiler: GrammarCompiler, matcher: "LLMatcher") -> None:
        self._compiler = compiler
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
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._check()
        return self._compiler.eos_mask() if self.is_complete else self._compiler.finish_mask(words)

    def advance(self, token_id: int) -> None:
        """Moves past a token that the mask allows; any other raises ValueError."""
        if not self.is_complete and self._matcher.try_consume_tokens([token_id]) == 1:
            self._num_consumed += 1
        elif token_id in self._compiler.eos_token_ids and _holds(self.mask(), token_id):
            self._num_past_end += 1
        else:
            self._check()
            raise ValueError(f"the grammar does not allow token {token_id} here")

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last `num_tokens` advances."""
        if not 0 <= num_tokens <= self._num_consumed + self._num_past_end:
            raise ValueError(f"{self._num_consumed + self._num_past_end} advances cannot go back {num_tokens}")
        num_past_end = min(num_tokens, self._num_past_end)
        self._num_past_end -= num_past_end
        self._num_consumed -= num_tokens - num_past_end
        self._matcher.rollback(num_tokens - num_past_end)
        self._check()

    def masks_for(self, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Words, ...]]:
        """The drafts up to the first that the grammar forbids, and the masks of the positions that they reach.

        First the next position's mask, then the one after each allowed draft. The place in the grammar does not change.
        """
        masks = [self.mask()]
        for draft in drafts:
            if not _holds(masks[-1], draft):
                break
            self.advance(draft)
            masks.append(self.mask())
        num_allowed = len(masks) - 1
        self.rollback(num_allowed)
        return drafts[:num_allowed], tuple(masks)

    def _check(self) -> None:
        """Raises if the library failed, for instance on a state beyond its limits; it stays failed."""
        if self._matcher.is_error():
            message = _sentence(self._matcher.get_error())
            raise UnsupportedError(f"The answer cannot be held to its grammar any longer ({message}): simplify it.")


def _lark(grammar: Grammar) -> str:
    """What the library is given."""
    return _rules(grammar) + _NO_FORCING


def _rules(grammar: Grammar) -> str:
    """The grammar in the library's Lark notation, to which all kinds come down."""
    from llguidance import regex_to_lark

    match grammar.kind:
        case GrammarKind.CFG:
            return grammar.text
        case GrammarKind.REGEX:
            # Empty: no class is narrowed to ASCII.
            return f"start: /{regex_to_lark(grammar.text, use_ascii='')}/"
        case GrammarKind.CHOICE:
            return "start: " + " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
        case GrammarKind.JSON_SCHEMA:
            return _json_rules(json.loads(grammar.text))
        case GrammarKind.JSON_OBJECT:
            return _json_rules({"type": "object"})


def _json_rules(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _JSON_WHITESPACE}})


def _library_tokenizer(table: TokenTable, vocab_size: int) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_LibraryTable(table, vocab_size)), eos_token=list(table.eos_token_ids))


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


def _words(token_ids: frozenset[int] | set[int], vocab_size: int) -> Words:
    """A mask of these tokens, int32 [ceil(vocab_size / 32)]."""
    bits = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _holds(words: Words, token_id: int) -> bool:
    word, bit = divmod(token_id, _WORD_BITS)
    return 0 <= word < len(words) and bool(words[word] >> bit & 1)


def _refusal(kind: GrammarKind, message: str) -> UsageError:
    names = {GrammarKind.JSON_SCHEMA: "JSON schema", GrammarKind.CHOICE: "list of choices", GrammarKind.CFG: "grammar"}
    return UsageError(f"The {names.get(kind, kind)} cannot be used: {_sentence(message)}.")


def _sentence(message: str) -> str:
    """The main line of a library error, without its source excerpt and list of alternatives."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason was given"]
    main = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    # Positions in the line that onebox wrote, alternatives and settings mean nothing to the client.
    noise = r"^at 1\(8\): (failed to compile JSON schema: )?|; following .*|\. Enable .*"
    return re.sub(noise, "", main).rstrip(".:")


def _json(value: object, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"The {name} cannot be written as JSON ({error}).") from None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
