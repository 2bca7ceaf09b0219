"""The scheduler's choices: nobody is preempted needlessly, no prompt is starved."""

from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.choice import fewest, prompt_shares
from onebox.spec.kv import PAGE_TOKENS


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 40))
def test_those_chosen_are_enough_and_none_of_them_is_needless(weights, needed):
    places = list(range(len(weights)))

    def is_enough(chosen):
        return sum(weights[place] for place in chosen) >= needed

    chosen = fewest(places, is_enough)
    assert (chosen is None) == (sum(weights) < needed)
    if chosen is not None:
        assert is_enough(chosen)
        assert not any(is_enough([other for other in chosen if other != place]) for place in chosen)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 40), st.integers(0, 10))
def test_the_budget_is_spent_evenly_and_on_the_grid(remaining, num_pages, turn):
    shares = prompt_shares(remaining, num_pages * PAGE_TOKENS, turn)
    assert sum(-(-share // PAGE_TOKENS) for share in shares) <= num_pages
    for share, length in zip(shares, remaining, strict=True):
        assert share == length or share % PAGE_TOKENS == 0
    unfinished = [share for share, length in zip(shares, remaining, strict=True) if share < length]
    assert max(unfinished, default=0) - min(unfinished, default=0) <= PAGE_TOKENS
