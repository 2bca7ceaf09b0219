"""The learning rate and the clock of a run."""

import pytest

from recipes.pocket.training.schedule import (
    LEARNING_RATE,
    TEXT_SHARE,
    RunClock,
    later_share,
    learning_rate,
    picture_length,
    seeing_share,
)


def test_a_resumed_clock_takes_only_the_rest_of_the_time():
    clock = RunClock(10, done=0.75)
    clock.began -= 30
    clock.first_step = 0.0
    # 2.5 minutes are left, 12 seconds of them for the last checkpoint.
    assert clock.progress == pytest.approx(0.75 + 0.25 * 30 / 138, abs=1e-3)


def test_learning_rate_rises_stays_constant_and_falls_to_zero():
    assert learning_rate(0.0) == 0.0
    assert learning_rate(0.3) == LEARNING_RATE
    assert 0 < learning_rate(0.9) < LEARNING_RATE
    assert learning_rate(1.0) == 0.0


def test_the_text_model_follows_the_tower_slowly_at_first():
    assert seeing_share(0.0) == 0.0
    assert 0 < seeing_share(0.03) < TEXT_SHARE
    assert seeing_share(0.5) == TEXT_SHARE


def test_a_run_that_goes_on_with_a_trained_tower_trains_both_at_once():
    assert later_share(0.0) == TEXT_SHARE


def test_most_steps_have_pictures():
    lengths = (1024, 8192, 32_768)
    late = [picture_length(0.9, step, lengths) for step in range(10)]
    assert (late.count(1024), late.count(8192), late.count(32_768)) == (8, 1, 1)
