"""What is expected of a look into the text, from what looks found."""

import pytest

from onebox.engine.draft.kinds import TextPart
from onebox.engine.draft.lookup import LookupGains


def test_nothing_is_expected_before_something_was_found():
    gains = LookupGains(0.95)
    assert gains.expected(TextPart.ANSWER) is None
    gains.observe(TextPart.ANSWER, 0, 0.0)
    assert gains.expected(TextPart.ANSWER) is None
    gains.observe(TextPart.THINKING, 5, 4.0)
    assert gains.expected(TextPart.ANSWER) is None


def test_what_looks_found_is_expected_again():
    gains = LookupGains(1.0)
    for depth, accepted in ((0, 0.0), (10, 6.0), (0, 0.0), (4, 2.0)):
        gains.observe(TextPart.ANSWER, depth, accepted)
    assert gains.expected(TextPart.ANSWER) == (0.5, 7.0, 4.0)


def test_a_request_begins_with_what_others_found_and_learns_its_own():
    shared = LookupGains(0.98)
    for _ in range(100):
        shared.observe(TextPart.ANSWER, 10, 9.0)
    own = LookupGains(0.95, shared)
    assert own.expected(TextPart.ANSWER) == pytest.approx((1.0, 10.0, 9.0))
    chances = []
    for _ in range(30):
        own.observe(TextPart.ANSWER, 0, 0.0)
        chances.append(own.expected(TextPart.ANSWER).chance)
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.4
