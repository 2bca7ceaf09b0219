"""Intervals and tests, held against enumeration, published tables and simulation."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.bench.statistics import (
    adjusted,
    mcnemar,
    paired_difference,
    plain_json,
    share_interval,
    welch,
)

Z95 = 1.959963984540054


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 5), (5, 0), (1, 9), (3, 4), (6, 6), (2, 12)])
def test_mcnemar_counts_the_splits_that_are_as_uneven(first, second):
    total, gap = first + second, abs(first - second)
    as_uneven = sum(
        abs(sum(signs)) >= gap for signs in itertools.product((-1, 1), repeat=total)
    )  # every way in which chance could have split them
    assert mcnemar(first, second) == pytest.approx(float(Fraction(as_uneven, 2**total)))


@pytest.mark.parametrize("total", [1, 20, 50, 400])
def test_servers_that_never_differed_may_still_differ_by_what_the_closed_form_says(total):
    interval = paired_difference(0, 0, total)
    assert interval.estimate == 0
    assert interval.high == pytest.approx(Z95**2 / (total + Z95**2), abs=1e-9)
    assert interval.low == pytest.approx(-interval.high, abs=1e-9)


@pytest.mark.parametrize(("first", "second"), [(0.02, 0.02), (0.1, 0.1), (0.2, 0.05), (0.0, 0.1), (0.3, 0.3)])
def test_the_interval_of_a_paired_difference_covers_the_truth(first, second):
    """Over all outcomes of 30 questions, weighted by their exact probability."""
    total, covered = 30, 0.0
    for only_first in range(total + 1):
        for only_second in range(total + 1 - only_first):
            ways = math.comb(total, only_first) * math.comb(total - only_first, only_second)
            rest = total - only_first - only_second
            chance = ways * first**only_first * second**only_second * (1 - first - second) ** rest
            if chance < 1e-7:
                continue
            interval = paired_difference(only_first, only_second, total)
            covered += chance * (interval.low <= second - first <= interval.high)
    assert covered > 0.93


@given(total=st.integers(1, 300), data=st.data())
def test_the_difference_lies_within_its_interval_and_changes_sign_with_the_sides(total, data):
    only_first = data.draw(st.integers(0, total))
    only_second = data.draw(st.integers(0, total - only_first))
    one, other = paired_difference(only_first, only_second, total), paired_difference(only_second, only_first, total)
    assert -1 <= one.low <= one.estimate <= one.high <= 1
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low), abs=1e-6)


@given(total=st.integers(1, 500), share=st.floats(0, 1))
def test_the_ends_of_a_share_are_where_the_score_test_gives_way(total, share):
    right = round(share * total)
    interval = share_interval(right, total)
    for end in (interval.low, interval.high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(right / total - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / total), rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "quantile"), [((2, 2), 4.303), ((3, 3), 2.776), ((6, 6), 2.228), ((16, 16), 2.042), ((61, 61), 1.980)]
)
def test_welch_uses_the_quantiles_that_tables_of_student_print(sizes, quantile):
    """With equal spread and size the degrees of freedom are both sizes less two."""
    first = [-1.0, 1.0] * (sizes[0] // 2) + [0.0] * (sizes[0] % 2)
    second = [value + 5 for value in first]
    error = math.sqrt(2 * np.var(first, ddof=1) / len(first))
    interval = welch(first, second)
    assert interval.estimate == pytest.approx(5)
    assert (interval.high - interval.low) / 2 / error == pytest.approx(quantile, abs=6e-4)


def test_a_result_becomes_json_that_any_reader_takes():
    found = plain_json({"share": share_interval(0, 0), "said": ("half \ud83d", True, 3)})
    assert found == {"share": {"estimate": None, "low": 0.0, "high": 1.0}, "said": ["half ?", True, 3]}
    json.dumps(found, allow_nan=False).encode()


def test_one_value_has_no_interval():
    assert math.isnan(welch([1.0], [2.0, 3.0]).low)


def test_holm_gives_what_its_textbook_example_gives():
    assert adjusted([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjusted([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_an_adjusted_p_value_is_never_smaller_and_keeps_the_order(values):
    found = adjusted(values)
    assert all(after >= before for before, after in zip(values, found, strict=True))
    assert [found[i] for i in sorted(range(len(values)), key=values.__getitem__)] == sorted(found)


def test_a_series_whose_values_repeat_each_other_has_a_wider_interval():
    """Ten values, each twice, are worth little more than the ten."""
    draw = np.random.default_rng(3)
    first, second = draw.normal(0, 1, 10), draw.normal(0, 1, 10)
    alone = welch(first, second)
    twice = welch(np.repeat(first, 2), np.repeat(second, 2), is_series=True)
    taken_for_independent = welch(np.repeat(first, 2), np.repeat(second, 2))
    assert twice.estimate == pytest.approx(alone.estimate)
    assert twice.high - twice.low > 0.95 * (alone.high - alone.low)
    assert taken_for_independent.high - taken_for_independent.low < 0.75 * (alone.high - alone.low)
