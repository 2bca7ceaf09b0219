"""Draws follow the softmax, and their noise follows (seed, position, token) alone."""

import numpy as np
import pytest

from onebox.engine.request import SamplingParams
from onebox.engine.sampler import gumbel, sample

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], dtype=np.float32))


def draws(count, **params):
    return [sample(LOGITS, SamplingParams(seed=11, **params), position) for position in range(count)]


def frequencies(tokens):
    return np.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


def within_noise(seen, expected, count):
    """Five standard deviations of a binomial share."""
    return np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / count) + 1e-12


def test_draws_have_the_distribution_of_the_softmax():
    assert within_noise(frequencies(draws(8000)), np.exp(LOGITS), 8000).all()


def test_temperature_flattens_the_distribution():
    flat = np.exp(LOGITS / 2) / np.exp(LOGITS / 2).sum()
    assert within_noise(frequencies(draws(8000, temperature=2.0)), flat, 8000).all()


def test_temperature_zero_is_greedy_and_needs_no_seed():
    assert sample(LOGITS, SamplingParams(temperature=0), 3) == 0


@pytest.mark.parametrize(
    ("params", "kept"), [({"top_k": 2}, 2), ({"top_p": 0.7}, 2), ({"top_p": 0.71}, 3), ({"top_p": 1e-9}, 1)]
)
def test_top_k_and_top_p_keep_the_likeliest_tokens_in_proportion(params, kept):
    expected = np.where(np.arange(5) < kept, np.exp(LOGITS), 0)
    assert within_noise(frequencies(draws(4000, **params)), expected / expected.sum(), 4000).all()


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    everything = gumbel(5, 9, np.arange(1000))
    some = np.array([3, 999, 42])
    assert (gumbel(5, 9, some) == everything[some]).all()


def test_noise_is_independent_over_seeds_positions_and_tokens():
    columns = [gumbel(seed, position, np.arange(4000)) for seed in (0, 1, -1) for position in (0, 1, 2)]
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)
    assert abs(np.mean(columns) - np.euler_gamma) < 0.05


def test_numbers_that_are_not_finite_are_an_error():
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(np.array([0.0, np.nan], dtype=np.float32), SamplingParams(temperature=0), 0)
