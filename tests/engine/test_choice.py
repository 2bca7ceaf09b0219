"""The scheduler's choices: nobody is preempted needlessly, no prompt is starved."""

from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.choice import MAX_OVERTAKEN, fewest, prompt_shares, shortest_first
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


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 40))
def test_the_budget_is_spent_on_the_grid_least_remaining_first_and_the_first_prompt_gets_its_quarter(
    remaining, num_pages
):
    shares = prompt_shares(remaining, num_pages * PAGE_TOKENS)
    num_given = sum(-(-share // PAGE_TOKENS) for share in shares)
    assert num_given == min(num_pages, sum(-(-tokens // PAGE_TOKENS) for tokens in remaining))
    for share, length in zip(shares, remaining, strict=True):
        assert share == length or share % PAGE_TOKENS == 0
    assert shares[0] >= min(remaining[0], max(1, num_pages // 4) * PAGE_TOKENS)
    # A prompt gets something only where every shorter one gets all it needs; but for the first one.
    for place, share in enumerate(shares[1:], 1):
        if share:
            shorter = [other for other, length in enumerate(remaining) if length < remaining[place]]
            assert all(shares[other] == remaining[other] for other in shorter)


def test_a_prompt_is_overtaken_by_shorter_ones_and_not_for_ever():
    queue, overtaken, served = [1000, 500], {1000: 0, 500: 0}, []
    for length in range(1, 100):
        queue.append(length)
        overtaken[length] = 0
        chosen = shortest_first(queue, lambda s: s, overtaken.__getitem__)
        served.append(chosen)
        for other in queue[: queue.index(chosen)]:
            overtaken[other] += 1
        queue.remove(chosen)
    assert served[:MAX_OVERTAKEN] == list(range(1, MAX_OVERTAKEN + 1))
    assert served[MAX_OVERTAKEN : MAX_OVERTAKEN + 2] == [1000, 500]
