"""Places in a compiled grammar: going back leaves no trace, and a failing library is an error like any other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.engine.grammar.library import GrammarLimitError, GrammarPlace, TokenMasks, compile_matcher, open_tokenizer
from onebox.engine.grammar.value import Grammar
from tests.engine.grammar.vocabulary import EOS, GRAMMARS, OTHER_EOS, TABLE, VOCAB_SIZE, start_of, walk

MASKS = TokenMasks(TABLE, VOCAB_SIZE)


@pytest.fixture(scope="module")
def place_in():
    tokenizer = open_tokenizer(TABLE, VOCAB_SIZE)
    return lambda grammar: GrammarPlace(MASKS, compile_matcher(tokenizer, grammar))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_going_back_gives_the_masks_that_were_there(place_in, grammar, seed, data):
    path = [*walk(place_in(grammar), seed), EOS, OTHER_EOS]
    place, masks = place_in(grammar), []
    for token_id in path:
        masks.append(place.mask())
        place.advance(token_id)
    depth = len(path)
    for target in data.draw(st.lists(st.integers(0, len(path) - 1), min_size=1, max_size=5)):
        place.rollback(max(0, depth - target))
        for token_id in path[depth:target]:
            place.advance(token_id)
        depth = target
        assert np.array_equal(place.mask(), masks[depth])


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_every_depth_can_be_gone_back_to(place_in, grammar):
    path = walk(place_in(grammar), seed=3)
    place, masks = place_in(grammar), []
    for token_id in path:
        masks.append(place.mask())
        place.advance(token_id)
    while masks:
        place.rollback(1)
        assert np.array_equal(place.mask(), masks.pop())
    with pytest.raises(ValueError, match="0 advances cannot go back 1"):
        place.rollback(1)


def test_a_place_beyond_the_limits_of_the_library_fails_with_a_sentence(place_in):
    # After one x, each of the rules is still open.
    rules = [f'r{i}: "x" r{i} | "z"' for i in range(1000)]
    lark = "\n".join(["start: " + " | ".join(f'"x" r{i}' for i in range(1000)), *rules])
    place = place_in(Grammar.cfg(lark))
    with pytest.raises(GrammarLimitError, match=r"cannot be held to its grammar any longer \(.+\): simplify it"):
        place.advance(*start_of("x"))


class Panic(BaseException):
    """The library's panics derive from BaseException."""


class PanickingMatcher:
    def compute_bitmask(self):
        raise Panic("index out of bounds\n  at some line")

    try_consume_tokens = rollback = lambda self, *_: self.compute_bitmask()

    def is_stopped(self):
        return False

    def is_error(self):
        return False


@pytest.mark.parametrize("call", [lambda place: place.mask(), lambda place: place.advance(0)])
def test_a_panic_of_the_library_is_an_error_like_any_other(call):
    with pytest.raises(GrammarLimitError, match=r"any longer \(index out of bounds\): simplify it"):
        call(GrammarPlace(MASKS, PanickingMatcher()))


def test_an_interrupt_is_not_taken_for_a_panic():
    class Interrupted(PanickingMatcher):
        def compute_bitmask(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GrammarPlace(MASKS, Interrupted()).mask()
