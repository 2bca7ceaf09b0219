"""Measured costs of steps, on simulated machines whose costs are known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.draft.costs import CostPrior, StepCosts

PRIOR = CostPrior(row=0.1, draft=0.1, block=0.2)
KINDS = ((1, 0, 0), (4, 3, 0), (13, 0, 12))


def seconds(num_rows: int, num_chained: int = 0, num_blocks: int = 0, jump: float = 0.0) -> float:
    block = 0.4 if num_blocks else 0.0
    return 0.01 * (1 + 0.25 * (num_rows - 1) + 0.1 * num_chained + block + (jump if num_rows > 4 else 0.0))


def ratio(costs: StepCosts, *kind: int) -> float:
    """Of a step of this kind to a plain one: what choices depend on."""
    return costs.cost(*kind) / costs.cost(1, 0, 0)


def test_costs_start_from_the_prior_and_become_what_is_observed():
    costs = StepCosts(CostPrior(row=0.1, draft=0.2, block=0.3))
    assert costs.cost(1, 0, 0) == 1
    assert costs.cost(3, 2, 0) == pytest.approx(1.6)
    assert costs.cost(3, 0, 2) == pytest.approx(1.5)
    assert costs.cost(3, 2, 5) == pytest.approx(1.9)
    costs.observe(1, 0, 0, 0.02)
    assert costs.seconds(3, 2) == pytest.approx(0.02 * 1.6)
    kinds = ((1, 0, 0), (3, 2, 0), (9, 0, 0), (9, 8, 0), (9, 0, 8))
    for _ in range(100):
        for kind in kinds:
            costs.observe(*kind, seconds(*kind, jump=0.5))
    for kind in kinds:
        assert costs.seconds(*kind) == pytest.approx(seconds(*kind, jump=0.5), rel=0.03)


def test_costs_of_unseen_steps_follow_from_the_seen_ones():
    costs = StepCosts(CostPrior(row=0.5, draft=0.01, block=0.01))
    for _ in range(50):
        for kind in ((1, 0, 0), (2, 1, 0), (6, 0, 0), (16, 4, 0), (6, 0, 5)):
            costs.observe(*kind, seconds(*kind))
    for kind in ((1, 1, 0), (4, 0, 0), (4, 3, 0), (9, 8, 0), (13, 0, 12), (32, 2, 12)):
        assert costs.seconds(*kind) == pytest.approx(seconds(*kind), rel=0.03)


def test_deeper_blocks_cost_more_where_they_do():
    costs = StepCosts(PRIOR)
    kinds = ((1, 0, 0), (8, 0, 0), (5, 0, 4), (1, 0, 15), (16, 0, 15))
    for _ in range(50):
        for rows, _, drafts in kinds:
            costs.observe(rows, 0, drafts, seconds(rows, 0, drafts) + 0.001 * drafts)
    for rows, drafts in ((5, 4), (10, 9), (3, 12)):
        assert costs.seconds(rows, 0, drafts) == pytest.approx(seconds(rows, 0, drafts) + 0.001 * drafts, rel=0.03)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.5, 2.0), st.booleans()), max_size=60))
def test_costs_do_not_depend_on_when_they_were_asked_for(steps):
    asked, silent = StepCosts(PRIOR), StepCosts(PRIOR)
    for kind, noise, is_asked in steps:
        if is_asked:
            for other in (*KINDS, (2, 1, 0)):
                asked.cost(*other)
        for costs in (asked, silent):
            costs.observe(*kind, noise * seconds(*kind))
    for kind in (*KINDS, (2, 1, 0)):
        assert asked.seconds(*kind) == silent.seconds(*kind)
        assert asked.by_rows(*kind[1:])[kind[0]] == asked.cost(*kind)


def test_a_stall_does_not_count_as_what_steps_cost():
    costs = StepCosts(PRIOR)
    for stall in (*[1] * 30, 100):
        costs.observe(1, 0, 0, 0.01 * stall)
    assert costs.seconds(1, 0) < 0.011


@pytest.mark.parametrize("stalled", KINDS)
def test_a_stall_at_first_sight_is_forgotten(stalled):
    costs = StepCosts(PRIOR)
    costs.observe(*stalled, 1.0)
    for _ in range(20):
        for kind in KINDS:
            costs.observe(*kind, seconds(*kind))
    for kind in KINDS:
        assert costs.seconds(*kind) == pytest.approx(seconds(*kind), rel=0.1)


def test_costs_follow_a_machine_that_slows_down():
    costs = StepCosts(PRIOR)
    for factor in (1, 3):
        for _ in range(200):
            for kind in KINDS:
                costs.observe(*kind, factor * seconds(*kind))
    for kind in (*KINDS, (2, 1, 0)):
        assert costs.seconds(*kind) == pytest.approx(3 * seconds(*kind), rel=0.05)


def test_of_well_known_steps_without_passes_few_are_measured_and_changes_are_followed():
    costs = StepCosts(PRIOR)
    for _ in range(200):
        costs.observe(1, 0, 0, seconds(1))
    assert costs._num_observed < 100
    for _ in range(100):
        costs.observe(1, 0, 0, 3 * seconds(1))
    assert costs.seconds(1, 0) == pytest.approx(3 * seconds(1), rel=0.05)


def test_a_machine_that_slows_down_while_one_kind_runs_keeps_the_ratios_of_all():
    """Other programs come and go: the kind that ran meanwhile did not become worse than those that did not."""
    costs = StepCosts(PRIOR)
    for _ in range(50):
        for kind in KINDS:
            costs.observe(*kind, seconds(*kind))
    for _ in range(100):
        costs.observe(4, 3, 0, 2 * seconds(4, 3))
    assert costs.seconds(4, 3) == pytest.approx(2 * seconds(4, 3), rel=0.02)
    for kind in KINDS:
        assert ratio(costs, *kind) == pytest.approx(seconds(*kind) / seconds(1), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_ratios_are_found_in_noise(seed):
    costs, rng = StepCosts(PRIOR), random.Random(seed)
    for _ in range(300):
        kind = rng.choice(KINDS)
        costs.observe(*kind, seconds(*kind) * rng.lognormvariate(0, 0.25))
    for kind in KINDS:
        assert ratio(costs, *kind) == pytest.approx(seconds(*kind) / seconds(1), rel=0.2)


def test_no_step_costs_nothing():
    costs = StepCosts(PRIOR)
    for num_rows in (2, 4, 8) * 20:
        costs.observe(num_rows, 0, 0, 0.001 * num_rows**2)
    assert costs.cost(1, 0) > 0
    costs.observe(1, 0, 0, 0.0)
    assert costs.cost(1, 0) > 0


def test_a_negative_prior_is_refused():
    with pytest.raises(ValueError, match="cannot be negative"):
        CostPrior(row=0.1, draft=0.1, block=-0.1)
