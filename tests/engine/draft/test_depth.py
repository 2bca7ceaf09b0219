"""The choice of drafter and depth, on simulated texts and machines, against the best fixed choice."""

import random
from statistics import mean, median

import pytest

from onebox.engine.draft.acceptance import AcceptanceRates, DraftClass
from onebox.engine.draft.costs import CostPrior, StepCosts
from onebox.engine.draft.depth import ALONE, PLAIN, AutoDepth, Company, DraftChoice, Offer, SharedAcceptance, choose
from onebox.engine.draft.kinds import Drafter
from tests.engine.draft.machines import MACHINES, MAX_MTP_DEPTH, TEXTS, fixed_speeds, rate_at
from tests.engine.draft.simulation import DFLASH, MTP, NGRAM, Simulation

PRIOR = CostPrior(row=0.1, draft=0.1, block=0.2)


def share_of_best(text: str, machine: str, seed: int, heads: tuple[DraftClass, ...] = (MTP, DFLASH)) -> float:
    """Of the best fixed choice, after two requests of the same text."""
    simulation = Simulation(MACHINES[machine], seed, heads=heads)
    for _ in range(2):
        simulation.run(TEXTS[text], 200)
        simulation.start_request()
    known = {"mtp": MTP in heads, "dflash": DFLASH in heads}
    speeds = fixed_speeds(TEXTS[text], MACHINES[machine])
    fixed = [speed for name, speed in speeds.items() if known.get(name.split()[0], True)]
    return simulation.run(TEXTS[text], 400) / max(fixed)


@pytest.mark.parametrize("text", TEXTS)
def test_the_choice_is_within_three_percent_of_the_best_fixed_one(text):
    """In the median; where two choices differ by 5%, it takes more than some hundred steps to tell which is better."""
    shares = [share_of_best(text, machine, seed) for seed, machine in enumerate(MACHINES)]
    assert median(shares) > 0.97
    assert min(shares) > 0.9


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_holds_without_a_block_drafter(text):
    shares = [share_of_best(text, machine, seed, heads=(MTP,)) for machine in ("spark", "cpu") for seed in range(3)]
    assert median(shares) > 0.97
    assert min(shares) > 0.9


@pytest.mark.parametrize("machine", MACHINES)
def test_nobody_is_slower_than_plain_decoding_by_more_than_the_probes(machine):
    """From the first step on, with a prior that takes drafts for better than they are."""
    simulation = Simulation(MACHINES[machine], seed=4)
    simulation.run(TEXTS["random"], 60)
    simulation.start_request()
    plain = fixed_speeds(TEXTS["random"], MACHINES[machine])["plain"]
    assert simulation.run(TEXTS["random"], 500) > 0.97 * plain


def test_json_and_copies_run_deep_and_prose_runs_short():
    depths = {}
    for name in ("prose", "thinking", "agent turns", "copying"):
        simulation = Simulation(MACHINES["spark"], seed=2)
        simulation.run(TEXTS[name], 400)
        depths[name] = median(choice.depth for choice in simulation.choices[200:])
    assert depths["prose"] <= 3
    assert depths["thinking"] <= 2
    assert depths["agent turns"] >= 6
    assert depths["copying"] >= 12


CHANGES = [("prose", "copying"), ("copying", "prose"), ("random", "agent turns"), ("agent turns", "random")]


@pytest.mark.parametrize("machine", ["spark", "h200", "cpu"])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_text_that_becomes_another_is_followed(before, after, machine):
    """Within 120 steps, in the same request."""
    simulation = Simulation(MACHINES[machine], seed=3)
    best = max(fixed_speeds(TEXTS[after], MACHINES[machine]).values())
    for _ in range(2):
        simulation.run(TEXTS[before], 300)
        simulation.run(TEXTS[after], 120)
        assert simulation.run(TEXTS[after], 150) > 0.92 * best


def test_one_bad_probe_after_good_ones_does_not_end_the_probing():
    """So a text that becomes a good one is found, whatever the luck of single probes, where they cost much."""
    machine, before, after = MACHINES["cpu"], TEXTS["random"], TEXTS["agent turns"]
    shares = []
    for seed in range(8):
        simulation = Simulation(machine, seed)
        simulation.run(before, 300)
        simulation.run(after, 120)
        shares.append(simulation.run(after, 150) / max(fixed_speeds(after, machine).values()))
    assert mean(shares) > 0.93


def test_a_probe_of_the_block_drafter_makes_the_whole_block():
    """The pass costs the same, and what is not verified is compared with the tokens that come."""
    policy, costs = AutoDepth(), StepCosts(CostPrior(row=0.5, draft=0.0, block=0.5))
    probes = []
    for _ in range(200):
        choice = policy.choose([Offer(MTP, 8), Offer(DFLASH, 15)], costs).choice
        policy.observe(choice.kind, choice.depth, choice.depth if choice.kind == MTP else 0)
        policy.observe_choice(choice, choice.depth, choice.depth if choice.kind == MTP else 0)
        probes += [choice] if choice.is_probe and choice.kind == DFLASH else []
    assert probes
    assert all(probe.num_blocks == 15 for probe in probes)
    assert min(probe.depth for probe in probes) < 15


def test_first_drafts_that_fail_are_given_up_soon():
    simulation = Simulation(MACHINES["spark"], seed=3)
    simulation.run(TEXTS["agent turns"], 300)
    simulation.run(TEXTS["random"], 60)
    assert sum(choice.depth for choice in simulation.choices[-20:]) <= 20


def test_a_new_request_begins_with_what_was_learnt_from_others():
    simulation = Simulation(MACHINES["spark"], seed=5)
    simulation.run(TEXTS["agent turns"], 300)
    simulation.start_request()
    simulation.run(TEXTS["agent turns"], 12)
    assert median(choice.depth for choice in simulation.choices[-10:]) >= 5


def test_a_wrong_prior_is_unlearnt():
    for prior in (CostPrior(0, 0, 0), CostPrior(1, 1, 1), CostPrior(0.01, 0.5, 0)):
        simulation = Simulation(MACHINES["spark"], seed=4, costs=StepCosts(prior))
        simulation.run(TEXTS["code"], 300)
        assert simulation.run(TEXTS["code"], 500) > 0.95 * max(fixed_speeds(TEXTS["code"], MACHINES["spark"]).values())


def test_a_drafter_that_offers_nothing_is_not_chosen():
    policy, costs = AutoDepth(), StepCosts(PRIOR)
    for _ in range(100):
        assert policy.choose([Offer(MTP, 0), Offer(DFLASH, 0)], costs).choice == PLAIN
        assert policy.choose([], costs).choice == PLAIN


def test_the_depth_keeps_to_the_offer():
    policy, costs = AutoDepth(), StepCosts(CostPrior(0, 0, 0))
    for max_depth in (3, 1, 15, 2) * 20:
        choice = policy.choose([Offer(DFLASH, max_depth), Offer(MTP, 1)], costs).choice
        assert choice.depth <= max_depth
        if choice.depth:
            policy.observe(choice.kind, choice.depth, choice.depth)
            policy.observe_choice(choice, choice.depth, choice.depth)


def test_the_same_observations_give_the_same_choices():
    runs = [Simulation(MACHINES["cpu"], seed=6) for _ in range(2)]
    for run in runs:
        run.run(TEXTS["json"], 300)
    assert runs[0].choices == runs[1].choices


def likely(chance: float):
    rates = AcceptanceRates(decay=0.98, prior_weight=1, prior_rate=chance)
    return lambda _, depth: rates.chances(depth)


def test_company_that_would_wait_makes_drafts_shallower():
    costs = StepCosts(CostPrior(row=0.1, draft=0.2))
    alone = choose([Offer(MTP, 8)], likely(0.75), costs, ALONE)
    busy = choose([Offer(MTP, 8)], likely(0.75), costs, Company(num_rows=15, expected_tokens=15))
    assert 1 <= alone.choice.depth <= 3
    assert busy.choice == PLAIN


def test_a_pass_of_the_block_drafter_that_runs_anyway_is_free():
    costs = StepCosts(CostPrior(row=0.1, draft=0.1, block=1.0))
    alone = choose([Offer(DFLASH, 15)], likely(0.5), costs, ALONE)
    beside = choose([Offer(DFLASH, 15)], likely(0.5), costs, Company(num_rows=5, num_blocks=4, expected_tokens=3))
    assert alone.choice == PLAIN
    assert beside.choice.depth > 0


def test_another_choice_must_gain_something_over_the_last_one():
    costs, offers = StepCosts(PRIOR), [Offer(MTP, 8), Offer(DFLASH, 15)]
    best = choose(offers, likely(0.7), costs).choice
    last = DraftChoice(best.kind, best.depth + 1)
    assert choose(offers, likely(0.7), costs, ALONE, last, least_gain=0.5).choice == last
    assert choose(offers, likely(0.7), costs, ALONE, last, least_gain=0.0).choice == best


@pytest.mark.parametrize("text", ["prose", "agent turns", "random"])
def test_a_full_batch_never_loses_to_plain_decoding(text):
    """Eight sequences, each with the others' latest choices as its company; the first 200 steps are for learning."""
    rng, costs, machine = random.Random(7), StepCosts(PRIOR), MACHINES["spark"]
    policies, planned = [AutoDepth() for _ in range(8)], [choose([], likely(0), costs)] * 8
    num_tokens, total_ms = 0, 0.0
    for step in range(600):
        for me, policy in enumerate(policies):
            others = [planned[other] for other in range(8) if other != me]
            company = Company(
                num_rows=sum(1 + other.choice.depth for other in others),
                num_chained=max(other.choice.num_chained for other in others),
                expected_tokens=sum(other.num_tokens for other in others),
            )
            planned[me] = policy.choose([Offer(MTP, MAX_MTP_DEPTH)], costs, company)
        choices = [best.choice for best in planned]
        kind = sum(1 + choice.depth for choice in choices), max(choice.num_chained for choice in choices), 0
        elapsed_ms = machine.ms(*kind) * rng.uniform(0.95, 1.05)
        costs.observe(*kind, elapsed_ms / 1000)
        for policy, choice in zip(policies, choices, strict=True):
            num_accepted = 0
            while num_accepted < choice.depth and rng.random() < rate_at(TEXTS[text].mtp, num_accepted):
                num_accepted += 1
            policy.observe(choice.kind, choice.depth, num_accepted)
            policy.observe_choice(choice, choice.depth, num_accepted)
            num_tokens += (1 + num_accepted) * (step >= 200)
        total_ms += elapsed_ms * (step >= 200)
    assert num_tokens / total_ms > 0.97 * 8 / machine.ms(8)


def test_heads_are_probed_where_they_are_bad_and_the_text_is_not():
    simulation = Simulation(MACHINES["spark"], seed=8)
    simulation.run(TEXTS["random"], 300)
    assert not any(choice.kind == NGRAM for choice in simulation.choices[60:])
    assert any(choice.kind.drafter is Drafter.MTP for choice in simulation.choices[60:])


def test_a_head_that_no_request_uses_is_believed_less_bad_with_every_request():
    shared = SharedAcceptance()
    unused, used = shared.of(DFLASH), shared.of(MTP)
    for _ in range(100):
        unused.observe(4, 0)
        used.observe(4, 0)
    assert unused.rates(1)[0] < 0.1
    before = unused.rates(1)[0]
    for _ in range(30):
        AutoDepth(shared=shared)  # on a thread that submits: touches nothing that requests share
    assert unused.rates(1)[0] == before
    for _ in range(30):
        AutoDepth(shared=shared).choose([], StepCosts(PRIOR))
        for _ in range(10):
            used.observe(4, 0)
    assert unused.rates(1)[0] > 0.5
    assert used.rates(1)[0] < 0.1
