"""Intervals over few passages contain the truth as often as they say."""

import math

import numpy as np
import pytest

from onebox.eval.weighted import FEWEST_ITEMS, weighted_mean

RUNS = 1000
SPREADS = {
    # name: (mean of a passage's loss per token, draws of one)
    "a build of the same model": (0.03, lambda rng, size: rng.normal(0.03, 0.03, size)),
    "heavy tails": (0.0, lambda rng, size: 0.05 * rng.standard_t(5, size)),
    "skewed": (0.2, lambda rng, size: rng.gamma(4, 0.05, size)),
    "prose and code": (2.7, lambda rng, size: rng.normal(np.where(rng.random(size) < 0.3, 2.0, 3.0), 0.4)),
}


def losses(spread, num_passages, seed):
    """Mean losses and token counts of passages, `RUNS` times over; within a passage a token's deviation is 1."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(80, 400, size=(RUNS, num_passages))
    means = spread(rng, tokens.shape)
    return means + rng.normal(0, 1, tokens.shape) / np.sqrt(tokens), tokens


def coverage(found, truth):
    return sum(interval.low <= truth <= interval.high for interval in found) / len(found)


@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize("num_passages", [3, 5, 24])
def test_a_95_percent_interval_holds_the_truth_in_about_95_percent(name, num_passages):
    truth, spread = SPREADS[name]
    means, tokens = losses(spread, num_passages, 7)
    found = [weighted_mean(row * sizes, sizes) for row, sizes in zip(means, tokens, strict=True)]
    assert 0.93 <= coverage([one.interval() for one in found], truth) <= 0.99
    # A test at 5% is wrong as often as the interval: what is significant is what the interval excludes.
    shifted = [weighted_mean((row - truth) * sizes, sizes) for row, sizes in zip(means[:300], tokens, strict=False)]
    assert [one.p_value < 0.05 for one in shifted] == [
        not one.low <= truth <= one.high for one in (found_one.interval() for found_one in found[:300])
    ]


@pytest.mark.parametrize("num_passages", [3, 5, 24])
def test_a_mean_that_is_never_negative_is_covered_too(num_passages):
    rng = np.random.default_rng(5)
    values = np.exp(rng.normal(0, 0.6, (RUNS, num_passages)))
    tokens = rng.integers(80, 400, size=values.shape)
    found = [weighted_mean(v * n, n).positive_interval() for v, n in zip(values, tokens, strict=True)]
    assert all(interval.low > 0 for interval in found)
    assert coverage(found, math.exp(0.18)) >= 0.92


@pytest.mark.parametrize("num_passages", [3, 5, 24])
def test_a_share_is_covered_and_all_of_few_is_no_certainty(num_passages):
    rng = np.random.default_rng(6)
    tokens = rng.integers(80, 400, size=(RUNS, num_passages))
    same = rng.binomial(tokens, rng.beta(57, 3, size=tokens.shape))
    found = [weighted_mean(s, n).share_interval() for s, n in zip(same, tokens, strict=True)]
    assert 0.92 <= coverage(found, 0.95) <= 0.99
    assert all(0 <= one.low <= one.high <= 1 for one in found)
    whole = weighted_mean([100] * num_passages, [100] * num_passages).share_interval()
    assert whole.low < whole.high == whole.estimate == 1


def test_equal_weights_give_the_textbooks_interval():
    """Student's sleep data, the drug against the control: 1.58, 0.70 to 2.46 at nine degrees of freedom, p = 0.0028."""
    differences = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    found = weighted_mean(differences, [1] * 10)
    assert (found.interval().low, found.interval().high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert found.p_value == pytest.approx(0.002833, abs=1e-6)
    assert found.freedom == pytest.approx(9)


def test_one_long_passage_among_short_ones_leaves_less_freedom():
    assert weighted_mean([10, 11, 12, 900], [10, 10, 10, 1000]).freedom < 1.2


@pytest.mark.parametrize("num_passages", [1, FEWEST_ITEMS - 1])
def test_below_the_fewest_there_is_an_estimate_and_no_interval(num_passages):
    found = weighted_mean([50.0] * num_passages, [100] * num_passages)
    assert found.estimate == 0.5
    ends = [
        end(interval)
        for interval in (found.interval(), found.positive_interval(), found.share_interval())
        for end in (lambda one: one.low, lambda one: one.high)
    ]
    assert all(map(math.isnan, [*ends, found.p_value]))


def test_the_number_needed_has_the_width_that_was_asked_for():
    rng = np.random.default_rng(8)
    few = weighted_mean(100 * rng.normal(0, 0.1, 200), [100] * 200)
    needed = few.num_needed(0.04)
    assert needed < 200
    again = [weighted_mean(100 * rng.normal(0, 0.1, needed), [100] * needed).half_width() for _ in range(200)]
    assert np.mean(again) == pytest.approx(0.04, rel=0.15)
