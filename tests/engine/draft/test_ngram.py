"""The n-gram drafter against its definition, written as a search."""

from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.draft.ngram import NgramIndex

# Few letters make matches of all lengths likely; a large id shows that ids do not run into each other.
LETTERS = st.sampled_from([0, 1, 2, 248319])
TEXTS = st.lists(LETTERS, max_size=40) | st.builds(mul, st.lists(LETTERS, max_size=20), st.integers(2, 5))


def longest_latest_match(tokens: list[int]) -> tuple[int, int]:
    """(length, end) of the last tokens' earlier occurrence: the longest of 32, 16, 8, 4, 3, 2, of those the latest."""
    for size in (32, 16, 8, 4, 3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return size, end
    return 0, 0


def brute_force(tokens: list[int], depth: int) -> tuple[int, ...]:
    size, end = longest_latest_match(tokens)
    text = list(tokens)
    for i in range(depth if size else 0):
        text.append(text[end + i])
    return tuple(text[len(tokens) :])


@given(TEXTS, st.integers(0, 12))
def test_drafts_are_what_followed_the_longest_latest_match(tokens, depth):
    index = NgramIndex(tokens)
    assert index.match_length == longest_latest_match(tokens)[0]
    assert index.propose(depth) == brute_force(tokens, depth)


@given(st.lists(TEXTS, max_size=5))
def test_an_index_that_grew_is_one_that_was_built_at_once(pieces):
    grown = NgramIndex()
    tokens: list[int] = []
    for piece in pieces:
        grown.extend(piece)
        tokens += piece
        assert len(grown) == len(tokens)
        assert grown.match_length == NgramIndex(tokens).match_length
        assert grown.propose(6) == NgramIndex(tokens).propose(6)


@given(TEXTS, TEXTS)
def test_a_prompt_and_what_was_added_to_it_are_one_text(prompt, answer):
    index = NgramIndex(prompt)
    index.extend(answer)
    assert index.match_length == NgramIndex([*prompt, *answer]).match_length
    assert index.propose(6) == NgramIndex([*prompt, *answer]).propose(6)


@given(TEXTS, st.integers(0, 6), st.integers(0, 6))
def test_a_shallower_draft_is_the_beginning_of_a_deeper_one(tokens, depth, more):
    index = NgramIndex(tokens)
    assert index.propose(depth + more)[:depth] == index.propose(depth)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_period_repeats_past_the_end_of_the_text(period):
    tokens = [*range(10, 10 + period)] * 4
    assert NgramIndex(tokens).propose(11) == tuple((tokens * 5)[:11])


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 5], [7, 1, 8, 1]])
def test_without_a_match_nothing_is_drafted(tokens):
    assert NgramIndex(tokens).match_length == 0
    assert NgramIndex(tokens).propose(4) == ()


def test_a_longer_match_goes_before_a_later_one():
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3]
    assert NgramIndex(tokens).match_length == 3
    assert NgramIndex(tokens).propose(1) == (50,)
