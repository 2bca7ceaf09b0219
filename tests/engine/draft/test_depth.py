"""The choice of depth, on simulated texts whose acceptance and costs are known, against the best fixed depth."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.draft.depth import (
    ALONE,
    PLAIN,
    AcceptanceRates,
    AutoDepth,
    Company,
    CostPrior,
    DepthSettings,
    DraftChoice,
    Offer,
    StepCosts,
    choose,
)
from onebox.engine.draft.kinds import Drafter

MAX_DEPTH = 8
PRIOR = CostPrior(row=0.1, draft=0.1)

# AcceptanceRates of a draft at each position, given that those before it were kept; the last one holds from there on.
TEXTS = {
    "json": (0.95,),
    "prose": (0.3,),
    "fading": (0.7, 0.6, 0.5, 0.4),
    "steep": (0.9, 0.3, 0.1),
    "hopeless": (0.0,),
}
# (each row after the first, each MTP pass, a jump past four rows) in parts of a step with one row; none is the prior's.
MACHINES = {
    "bound by memory": (0.12, 0.06, 0.0),
    "many experts a row": (0.25, 0.1, 0.0),
    "rows for nothing": (0.02, 0.02, 0.0),
    "dear drafts": (0.6, 0.4, 0.0),
    "a cliff": (0.05, 0.05, 0.5),
}


def seconds(machine: str, num_rows: int, num_chained: int) -> float:
    row, draft, jump = MACHINES[machine]
    return 0.01 * (1 + row * (num_rows - 1) + jump * (num_rows > 4) + draft * num_chained)


def rate_at(text: str, position: int) -> float:
    return TEXTS[text][min(position, len(TEXTS[text]) - 1)]


def fixed_speed(text: str, machine: str, depth: int) -> float:
    """Tokens a second, on average, of always drafting `depth` tokens with the MTP head."""
    tokens, chance = 1.0, 1.0
    for position in range(depth):
        chance *= rate_at(text, position)
        tokens += chance
    return tokens / seconds(machine, 1 + depth, depth)


def best_speed(text: str, machine: str) -> float:
    return max(fixed_speed(text, machine, depth) for depth in range(MAX_DEPTH + 1))


@dataclass
class Simulation:
    """One sequence on one machine, where a step checks the drafts of the one before and makes those of the next.

    Steps vary by 5%, and one in two hundred stalls for twenty times as long.
    """

    machine: str
    seed: int
    costs: StepCosts = field(default_factory=lambda: StepCosts(PRIOR))
    policy: AutoDepth = field(default_factory=AutoDepth)
    ngram_text: str | None = None
    choices: list[DraftChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next = PLAIN

    def run(self, text: str, num_steps: int) -> float:
        """Tokens a second over these steps, stalls not counted: they are nobody's choice."""
        num_tokens, total = 0, 0.0
        for _ in range(num_steps):
            choice, self._next = self._next, self.policy.choose(self._offers(), self.costs)
            drafted_from = self.ngram_text if choice.drafter is Drafter.NGRAM else text
            num_accepted = self._accepted(drafted_from, choice.depth)
            kind = 1 + choice.depth, self._next.num_chained
            elapsed = seconds(self.machine, *kind) * self._random.uniform(0.95, 1.05)
            num_tokens, total = num_tokens + 1 + num_accepted, total + elapsed
            stall = 20 if self._random.random() < 1 / 200 else 1
            self.costs.observe(*kind, elapsed * stall)
            self.policy.observe(choice, choice.depth, num_accepted)
            self.choices.append(choice)
        return num_tokens / total

    def _offers(self) -> list[Offer]:
        offers = [Offer(Drafter.MTP, MAX_DEPTH)]
        return [*offers, Offer(Drafter.NGRAM, MAX_DEPTH, match_length=4)] if self.ngram_text else offers

    def _accepted(self, text: str | None, depth: int) -> int:
        num_accepted = 0
        while text and num_accepted < depth and self._random.random() < rate_at(text, num_accepted):
            num_accepted += 1
        return num_accepted


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", TEXTS)
def test_speed_is_within_five_percent_of_the_best_fixed_depth_and_three_of_plain(text, machine):
    speed = Simulation(machine, seed=1).run(text, 1500)
    assert speed > 0.95 * best_speed(text, machine)
    assert speed > 0.97 * fixed_speed(text, machine, 0)


def test_json_runs_deep_and_prose_runs_shallow():
    json, prose = (Simulation("bound by memory", seed=2) for _ in range(2))
    json.run("json", 500)
    prose.run("prose", 500)
    assert sum(choice.depth for choice in json.choices) > 6 * 500
    assert sum(choice.depth for choice in prose.choices) < 1.5 * 500


@pytest.mark.parametrize("machine", MACHINES)
def test_a_turn_of_the_text_is_followed_within_200_steps(machine):
    simulation = Simulation(machine, seed=3)
    for text in ("json", "hopeless", "json", "prose", "json"):
        simulation.run(text, 200)
        assert simulation.run(text, 600) > 0.94 * best_speed(text, machine)


def test_a_wrong_prior_is_unlearnt():
    for prior in (CostPrior(0, 0), CostPrior(1, 1), CostPrior(0.01, 0.5)):
        simulation = Simulation("many experts a row", seed=4, costs=StepCosts(prior))
        simulation.run("json", 200)
        assert simulation.run("json", 1000) > 0.95 * best_speed("json", "many experts a row")


def test_the_better_drafter_is_found():
    for mtp_text, ngram_text in (("prose", "json"), ("json", "prose"), ("json", "hopeless")):
        simulation = Simulation("bound by memory", seed=5, ngram_text=ngram_text)
        simulation.run(mtp_text, 100)
        speed = simulation.run(mtp_text, 1000)
        assert speed > 0.95 * best_speed("json", "bound by memory")
        favourite = Drafter.NGRAM if ngram_text == "json" else Drafter.MTP
        assert sum(choice.drafter is favourite for choice in simulation.choices[100:]) > 900


def test_a_drafter_that_offers_nothing_is_not_chosen():
    policy, costs = AutoDepth(), StepCosts(PRIOR)
    for _ in range(100):
        assert policy.choose([Offer(Drafter.MTP, 0)], costs) == PLAIN
        assert policy.choose([], costs) == PLAIN


def test_the_depth_keeps_to_the_offer():
    policy, costs = AutoDepth(), StepCosts(CostPrior(0, 0))
    for max_depth in (3, 1, 8, 2) * 20:
        choice = policy.choose([Offer(Drafter.MTP, max_depth)], costs)
        assert choice.depth <= max_depth
        policy.observe(choice, choice.depth, choice.depth)


def test_the_same_observations_give_the_same_choices():
    runs = [Simulation("a cliff", seed=6, ngram_text="steep") for _ in range(2)]
    for run in runs:
        run.run("fading", 500)
    assert runs[0].choices == runs[1].choices


def test_company_that_would_wait_makes_drafts_shallower():
    settings = DepthSettings()
    acceptance = {(Drafter.MTP, 0): AcceptanceRates(settings)}
    for _ in range(50):
        acceptance[Drafter.MTP, 0].observe(4, 2)
    costs = StepCosts(CostPrior(row=0.1, draft=0.2))
    alone = choose([Offer(Drafter.MTP, 8)], acceptance, costs, ALONE)
    busy = choose([Offer(Drafter.MTP, 8)], acceptance, costs, Company(num_rows=15, expected_tokens=15))
    assert alone.depth == 2
    assert busy == PLAIN


@pytest.mark.parametrize("text", TEXTS)
def test_a_full_batch_never_loses_to_plain_decoding(text):
    """Eight sequences, each with the others' latest choices as its company; the first 200 steps are for learning."""
    rng, costs, machine = random.Random(7), StepCosts(PRIOR), "many experts a row"
    policies, choices = [AutoDepth() for _ in range(8)], [PLAIN] * 8
    num_tokens, total = 0, 0.0
    for step in range(1000):
        expected = [policy.expected_tokens(choice) for policy, choice in zip(policies, choices, strict=True)]
        for me, policy in enumerate(policies):
            others = [other for other in range(8) if other != me]
            company = Company(
                num_rows=sum(1 + choices[other].depth for other in others),
                num_chained=max(choices[other].num_chained for other in others),
                expected_tokens=sum(expected[other] for other in others),
            )
            choices[me] = policy.choose([Offer(Drafter.MTP, MAX_DEPTH)], costs, company)
        num_rows, num_chained = sum(1 + choice.depth for choice in choices), max(c.num_chained for c in choices)
        elapsed = seconds(machine, num_rows, num_chained) * rng.uniform(0.95, 1.05)
        costs.observe(num_rows, num_chained, elapsed)
        for policy, choice in zip(policies, choices, strict=True):
            num_accepted = 0
            while num_accepted < choice.depth and rng.random() < rate_at(text, num_accepted):
                num_accepted += 1
            policy.observe(choice, choice.depth, num_accepted)
            num_tokens += (1 + num_accepted) * (step >= 200)
        total += elapsed * (step >= 200)
    assert num_tokens / total > 0.97 * 8 / seconds(machine, 8, 0)


@given(st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=60))
def test_rates_are_probabilities_and_unseen_positions_follow_the_last_seen(steps):
    acceptance = AcceptanceRates(DepthSettings())
    for num_proposed, num_accepted in steps:
        acceptance.observe(num_proposed, num_accepted)
    rates = [acceptance.rate(position) for position in range(10)]
    assert rates == acceptance.rates(10)
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[6] == rates[7] == rates[9]
    if not steps:
        assert rates[0] == DepthSettings().prior_rate


def test_rates_approach_what_is_observed_by_position():
    acceptance, rng = AcceptanceRates(DepthSettings(decay=0.999)), random.Random(8)
    for _ in range(5000):
        num_accepted = 0
        while num_accepted < 4 and rng.random() < rate_at("fading", num_accepted):
            num_accepted += 1
        acceptance.observe(4, num_accepted)
    assert acceptance.rates(4) == pytest.approx(TEXTS["fading"], abs=0.06)
    with pytest.raises(ValueError, match="3 of 2 drafts"):
        acceptance.observe(2, 3)


def test_costs_start_from_the_prior_and_become_what_is_observed():
    costs = StepCosts(CostPrior(row=0.1, draft=0.2))
    assert costs.cost(1, 0) == 1
    assert costs.cost(3, 2) == pytest.approx(1.6)
    costs.observe(1, 0, 0.02)
    assert costs.cost(3, 2) == pytest.approx(0.02 * 1.6)
    kinds = ((1, 0), (3, 2), (9, 0), (9, 8))
    for _ in range(100):
        for kind in kinds:
            costs.observe(*kind, seconds("a cliff", *kind))
    for kind in kinds:
        assert costs.cost(*kind) == pytest.approx(seconds("a cliff", *kind), rel=0.02)


def test_costs_of_unseen_steps_follow_from_the_seen_ones():
    costs = StepCosts(CostPrior(row=0.5, draft=0.01))
    for _ in range(50):
        for kind in ((1, 0), (2, 1), (6, 0), (16, 4)):
            costs.observe(*kind, seconds("many experts a row", *kind))
    for kind in ((1, 1), (4, 0), (4, 3), (9, 8), (32, 2)):
        assert costs.cost(*kind) == pytest.approx(seconds("many experts a row", *kind), rel=0.03)


def test_a_stall_does_not_count_as_what_steps_cost():
    costs = StepCosts(PRIOR)
    for stall in (*[1] * 30, 100):
        costs.observe(1, 0, 0.01 * stall)
    assert costs.cost(1, 0) < 0.011


@pytest.mark.parametrize("stalled", [(1, 0), (4, 3)])
def test_a_stall_at_first_sight_is_forgotten(stalled):
    costs = StepCosts(PRIOR)
    costs.observe(*stalled, 1.0)
    for _ in range(10):
        for kind in ((1, 0), (4, 3)):
            costs.observe(*kind, seconds("bound by memory", *kind))
    for kind in ((1, 0), (4, 3)):
        assert costs.cost(*kind) == pytest.approx(seconds("bound by memory", *kind), rel=0.1)


def test_costs_follow_a_machine_that_slows_down():
    costs = StepCosts(PRIOR)
    for factor in (1, 3):
        for _ in range(200):
            for kind in ((1, 0), (4, 3)):
                costs.observe(*kind, factor * seconds("bound by memory", *kind))
    for kind in ((1, 0), (2, 1), (4, 3)):
        assert costs.cost(*kind) == pytest.approx(3 * seconds("bound by memory", *kind), rel=0.05)


def test_no_step_costs_nothing():
    costs = StepCosts(PRIOR)
    for num_rows in (2, 4, 8) * 20:
        costs.observe(num_rows, 0, 0.001 * num_rows**2)
    assert costs.cost(1, 0) > 0
    costs.observe(1, 0, 0.0)
    assert costs.cost(1, 0) > 0


def test_negative_costs_are_a_mistake():
    with pytest.raises(ValueError, match="cannot be negative"):
        CostPrior(row=-0.1, draft=0)
