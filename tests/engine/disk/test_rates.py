"""A hit is taken where reading beats computing, both as measured, also after a restart."""

import pytest

from onebox.engine.disk.rates import DiskRates

MB = 10**6


def test_reading_is_tried_where_nothing_was_computed_yet():
    assert DiskRates().compute_seconds(100) is None
    assert DiskRates().read_pays(64, 10_000 * MB)


def test_what_pays_follows_from_both_speeds():
    rates = DiskRates()
    rates.observe_prefill(10_000, 10.0)
    assert rates.compute_seconds(500) == pytest.approx(0.5)
    for _ in range(50):
        rates.observe_read(1000 * MB, 1.0)
    assert rates.read_pays(1000, 900 * MB)
    assert not rates.read_pays(1000, 1100 * MB)
    assert not rates.read_pays(3, 0)  # a few milliseconds are lost whatever is read


def test_the_latest_steps_count():
    rates = DiskRates()
    for _ in range(100):
        rates.observe_prefill(1000, 1.0)
    for _ in range(100):
        rates.observe_prefill(1000, 2.0)
    assert rates.compute_seconds(1000) == pytest.approx(2.0, rel=0.05)


def test_small_reads_say_nothing_about_the_disk():
    rates = DiskRates()
    before = rates.saved["read_bytes_per_s"]
    rates.observe_read(1000, 1.0)
    assert rates.saved["read_bytes_per_s"] == before


def test_a_disk_that_was_slow_once_gets_another_chance():
    rates = DiskRates()
    rates.observe_prefill(10_000, 10.0)
    for _ in range(20):
        rates.observe_read(10 * MB, 10.0)
    assert not rates.read_pays(1000, 100 * MB)
    for _ in range(1000):
        rates.observe_prefill(1000, 1.0)
    assert rates.read_pays(1000, 100 * MB)


def test_what_was_measured_is_known_after_a_restart():
    rates = DiskRates()
    rates.observe_prefill(10_000, 5.0)
    rates.observe_read(3000 * MB, 1.0)
    again = DiskRates(rates.saved)
    assert again.compute_seconds(1000) == pytest.approx(rates.compute_seconds(1000))
    assert again.saved == pytest.approx(rates.saved)
