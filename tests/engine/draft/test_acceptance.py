"""Acceptance by position: what is learnt from a request's own drafts and from those of all."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.draft.acceptance import AcceptanceRates, DraftClass, LearningSettings, SharedRates, num_matching
from onebox.engine.draft.kinds import Drafter

FADING = (0.7, 0.6, 0.5, 0.4)
STEPS = st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=60)


def own_rates(prior: SharedRates | None = None, decay: float = 0.98) -> AcceptanceRates:
    return AcceptanceRates(decay, prior_weight=3, prior_rate=0.6, prior=prior)


def shared_rates() -> SharedRates:
    return SharedRates(LearningSettings(), DraftClass(Drafter.DFLASH))


def observe_text(rates, by_position: tuple[float, ...], num_steps: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        num_accepted = 0
        while num_accepted < len(by_position) and rng.random() < by_position[num_accepted]:
            num_accepted += 1
        rates.observe(len(by_position), num_accepted)


@given(STEPS, STEPS)
def test_rates_are_probabilities_and_chances_fall(steps, earlier_steps):
    shared = shared_rates()
    for step in earlier_steps:
        shared.observe(*step)
    for rates in (own_rates(), own_rates(shared)):
        for step in steps:
            rates.observe(*step)
        assert all(0 <= rate <= 1 for rate in rates.rates(15))
        chances = rates.chances(15)
        assert sorted(chances, reverse=True) == list(chances)


@given(STEPS)
def test_without_a_prior_unseen_positions_follow_the_last_seen(steps):
    acceptance = own_rates()
    for step in steps:
        acceptance.observe(*step)
    rates = acceptance.rates(10)
    assert rates[6] == rates[7] == rates[9]
    if not steps:
        assert rates[0] == 0.6


def test_rates_approach_what_is_observed_by_position():
    acceptance = own_rates(decay=0.999)
    observe_text(acceptance, FADING, 5000, seed=8)
    assert acceptance.rates(4) == pytest.approx(FADING, abs=0.06)
    with pytest.raises(ValueError, match="3 of 2 drafts"):
        acceptance.observe(2, 3)


def test_a_new_request_starts_with_the_rates_of_those_before_it():
    found = []
    for seed in range(20):
        shared = shared_rates()
        observe_text(shared, FADING, 300, seed)
        found.append(own_rates(shared).rates(4))
    assert [mean(rates) for rates in zip(*found, strict=True)] == pytest.approx(FADING, abs=0.05)


def test_a_new_request_starts_with_the_rates_of_the_latest_ones():
    shared = shared_rates()
    observe_text(shared, (0.1, 0.1, 0.1, 0.1), 1000, seed=9)
    observe_text(shared, (0.9, 0.9, 0.9, 0.9), 100, seed=9)
    assert min(own_rates(shared).rates(4)) > 0.7


def test_a_request_that_does_better_at_first_is_expected_to_do_better_further_on():
    shared = shared_rates()
    observe_text(shared, FADING, 2000, seed=10)
    better, worse = own_rates(shared), own_rates(shared)
    for _ in range(30):
        better.observe(1, 1)
        worse.observe(1, 0)
    for above, usual, below in zip(better.rates(4), shared.rates(4), worse.rates(4), strict=True):
        assert above > usual + 0.1
        assert below < usual - 0.1


def test_old_observations_are_forgotten_and_no_number_overflows():
    acceptance = own_rates()
    for num_accepted in (0, 4):
        for _ in range(20_000):
            acceptance.observe(4, num_accepted)
    assert min(acceptance.rates(4)) > 0.9


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_proposed_tokens_are_judged_as_far_as_tokens_came(proposed, came):
    num_judged, num_right = num_matching(proposed, came)
    assert num_judged == min(len(proposed), len(came))
    assert proposed[:num_right] == came[:num_right]
    assert num_right == num_judged or proposed[num_right] != came[num_right]
