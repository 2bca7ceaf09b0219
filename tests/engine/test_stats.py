"""Counters of drafting add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.prefix import PrefixStats
from onebox.engine.request import AcceptanceCounts
from onebox.engine.stats import AcceptanceTally, DiskStats, EngineStats, Totals, add_past

STEPS = st.lists(st.integers(0, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))))


def total_of(steps) -> AcceptanceCounts:
    tally = AcceptanceTally()
    for num_drafted, num_accepted in steps:
        tally.add(num_drafted, num_accepted)
    return tally.counts


@given(STEPS)
def test_the_sum_over_steps_counts_each_draft_once(steps):
    total = total_of(steps)
    assert total.num_steps == sum(1 for drafted, _ in steps if drafted)
    assert total.num_drafted == sum(drafted for drafted, _ in steps)
    assert total.num_accepted == sum(accepted for _, accepted in steps) == sum(total.accepted_by_position)
    for position, count in enumerate(total.accepted_by_position):
        assert count == sum(1 for _, accepted in steps if accepted > position)


@given(STEPS, STEPS)
def test_the_order_of_adding_does_not_matter(first, second):
    assert total_of(first) + total_of(second) == total_of(second) + total_of(first) == total_of(second + first)


def test_more_accepted_than_drafted_is_a_mistake():
    with pytest.raises(ValueError, match="3 of 2 drafts"):
        AcceptanceTally().add(2, 3)


def test_no_counter_of_the_disk_falls_when_the_engine_is_restarted():
    def stats(disk):
        return EngineStats(True, 0, 0, 1, 1, Totals().frozen(), PrefixStats(0, 0, 0, 0, 0, 0, 0), disk)

    now = DiskStats(1, 64, 1000, 2000, 0.5, 1, 2, 3, num_entries=7, used_bytes=70, is_writing=False)
    then = DiskStats(2, 128, 10, 20, 0.25, 0, 1, 0, num_entries=5, used_bytes=50)
    expected = DiskStats(3, 192, 1010, 2020, 0.75, 1, 3, 3, num_entries=7, used_bytes=70, is_writing=False)
    assert add_past(stats(now), stats(then)).disk == expected
    assert add_past(stats(now), stats(None)).disk == now
    assert add_past(stats(None), stats(then)).disk is None
