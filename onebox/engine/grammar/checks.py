"""One grammar tried in full. Runs in a process that may be killed: nothing here is bounded in time or memory."""

import random
import time
from typing import TYPE_CHECKING

import numpy as np

from onebox.engine.grammar.library import (
    GrammarLimitError,
    GrammarPlace,
    TokenMasks,
    compile_matcher,
    has_failed_lexer,
    refusal,
)
from onebox.engine.grammar.value import Grammar, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["check_grammar"]

_NUM_WALKS = 8
"""At most. Two that end well are enough."""
_WALK_TOKENS = 48
_WALKS_S = 0.15
"""Seconds of CPU for all walks; what they have found by then counts."""
_MASK_S = 0.25
"""Seconds of CPU for one mask or one token: everybody's answers wait for it."""


def check_grammar(tokenizer: "LLTokenizer", masks: TokenMasks, grammar: Grammar) -> None:
    """Raises a GrammarError where no answer can match the grammar, or where it is too complex to hold answers to.

    Compiles it, computes a first mask, and walks along random allowed tokens. That a walk meets a limit of the library
    is no reason to refuse, unless all do: an answer may take another way.
    """
    matcher = _compiled(tokenizer, masks, grammar)
    found: list[str | None] = []
    ended_at = time.thread_time() + _WALKS_S
    while len(found) < _NUM_WALKS and found.count(None) < 2 and time.thread_time() < ended_at:
        if found and has_failed_lexer(matcher):
            matcher = compile_matcher(tokenizer, grammar)
        found.append(_walk(GrammarPlace(masks, matcher.deep_copy()), grammar, len(found), ended_at))
    if None not in found:
        raise refusal(grammar, f"it is too complex ({found[0]})")


def _compiled(tokenizer: "LLTokenizer", masks: TokenMasks, grammar: Grammar) -> "LLMatcher":
    """The grammar, if an answer of at least one text can match it. Where a part is at fault, the error is about it."""
    try:
        matcher = compile_matcher(tokenizer, grammar)
        words = GrammarPlace(masks, matcher).raw_mask()
    except GrammarLimitError as error:
        is_empty = "NoExtensionBias" in error.reason
        raise refusal(grammar, "no text fits it" if is_empty else f"it is too complex ({error.reason})") from None
    except GrammarError:
        for part in grammar.parts:
            _compiled(tokenizer, masks, part)
        raise
    has_text = bool((words & masks.text).any())
    if not (has_text or matcher.is_accepting()):
        raise refusal(grammar, "no text fits it")
    return matcher


def _walk(place: GrammarPlace, grammar: Grammar, seed: int, ended_at: float) -> str | None:
    """Walks until an end token or the walk's last; returns the library's error, if it met one."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    try:
        for _ in range(_WALK_TOKENS):
            began_at = time.thread_time()
            allowed = np.flatnonzero(np.unpackbits(place.mask().view(np.uint8), bitorder="little"))
            masked_at = time.thread_time()
            place.advance(int(rng.choice(allowed)))
            advanced_at = time.thread_time()
            slowest = max(masked_at - began_at, advanced_at - masked_at)
            if slowest > _MASK_S:
                raise refusal(grammar, f"it is too complex (one of its masks takes {slowest:.2f} s)")
            if place.is_complete or advanced_at > ended_at:
                return None
    except GrammarLimitError as error:
        return error.reason
    return None
