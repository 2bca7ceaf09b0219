"""The learning rate and the clock of a run."""

import pytest

from recipes.pocket.training.schedule import LEARNING_RATE, RunClock, learning_rate


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
