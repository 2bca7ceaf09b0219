"""The pace of prompts: answers wait as long as they may, and steps stay worth their fixed cost."""

import random

import pytest

from onebox.engine.pace import PromptPace
from onebox.spec.kv import PAGE_TOKENS


def settle(pace, fixed_s, each_s, steps=60, noise=0.0):
    """Runs steps that cost so much; the budget that results."""
    draw = random.Random(1)
    for _ in range(steps):
        num_tokens = pace.budget(has_answers=True)
        if draw.random() < 0.3:
            num_tokens = draw.randint(1, num_tokens)  # the end of a prompt
        pace.observe(num_tokens, (fixed_s + each_s * num_tokens) * (1 + noise * draw.uniform(-1, 1)))
    return pace.budget(has_answers=True)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_answers_wait_no_longer_than_they_may_where_the_weights_are_read_quickly(noise):
    budget = settle(PromptPace(2048, 0.05), 0.015, 50e-6, noise=noise)
    assert abs(budget - 700) <= PAGE_TOKENS * (1 + 30 * noise)


def test_half_of_a_step_is_its_tokens_own_time_where_reading_the_weights_alone_takes_longer():
    assert abs(settle(PromptPace(4096, 0.05), 0.27, 250e-6) - 1080) <= PAGE_TOKENS


def test_steps_that_are_all_alike_do_not_hold_it_in_place():
    pace = PromptPace(2048, 0.05)
    for _ in range(50):
        num_tokens = pace.budget(has_answers=True)
        pace.observe(num_tokens, 0.01 + 100e-6 * num_tokens)
    assert abs(pace.budget(has_answers=True) - 400) <= 2 * PAGE_TOKENS


def test_the_budget_is_whole_where_no_answer_waits_nothing_is_known_or_nothing_was_asked_for():
    pace = PromptPace(2048, 0.05)
    assert pace.budget(has_answers=True) == 2048
    pace.observe(2048, 10.0)
    assert pace.budget(has_answers=False) == 2048
    assert pace.budget(has_answers=True) < 2048
    unasked = PromptPace(2048, None)
    unasked.observe(2048, 10.0)
    assert unasked.budget(has_answers=True) == 2048


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 100.0])
def test_the_budget_is_always_on_the_grid_and_never_none(seconds):
    pace = PromptPace(640, 0.05)
    for num_tokens in (1, 640, 64, 3, 640):
        pace.observe(num_tokens, seconds)
        budget = pace.budget(has_answers=True)
        assert budget % PAGE_TOKENS == 0
        assert PAGE_TOKENS <= budget <= 640
