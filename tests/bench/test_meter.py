"""Sensors while requests run: what belongs to a workload, and what a million tokens cost."""

import asyncio
import os
import time

import pytest

from onebox.bench.cost import Prices, TokenCost, token_cost
from onebox.bench.meter import Meter
from onebox.bench.record import RequestRecord, Role, WorkloadKind, WorkloadRecord
from onebox.sensors import SensorReading
from onebox.spec.errors import UsageError


class Machine:
    """Sensors that tell one thing while idle and another while requests run."""

    def __init__(self, busy, idle=None):
        self.told, self._busy = busy if idle is None else idle, busy

    def read(self):
        return SensorReading(time.perf_counter(), **self.told)

    def work(self):
        self.told = self._busy


def metered(meter, machine, seconds=0.3):
    """Runs for a time; gives when it began."""

    async def run():
        async with meter.running():
            machine.work()
            began_at = time.perf_counter()
            await asyncio.sleep(seconds)
            return began_at

    return asyncio.run(run())


def workload(seconds, tokens=50):
    request = RequestRecord(Role.LOAD, 0.0, seconds, (0.01, seconds), (1, tokens - 1), 8, tokens, "usage")
    return WorkloadRecord("x", WorkloadKind.LOAD, {}, (request,), seconds)


def test_a_workload_has_the_watts_of_its_own_time():
    busy = {"power_w": {"GPU 0": 100.0, "GPU 1": 50.0, "box": 300.0}, "temperature_c": {"GPU 0": 70.0, "GPU 1": 75.0}}
    clocks = {"clock_mhz": {"GPU 0 SM": 1500.0, "GPU 0 memory": 3000.0}, "throttled": {"GPU 0: any": True}}
    idle = {"power_w": {"GPU 0": 5.0, "GPU 1": 5.0, "box": 40.0}}
    machine = Machine({**busy, **clocks}, idle)
    meter = Meter(os.getpid(), machine.read, interval_s=0.02)
    began_at = metered(meter, machine)
    found = meter.figures(workload(0.25), began_at)
    assert (found["gpu_mean_w"], found["gpu_peak_w"], found["box_mean_w"]) == (150.0, 150.0, 300.0)
    assert found["box_j_per_token"] == pytest.approx(300.0 * 0.25 / 50)
    assert (found["gpu_max_c"], found["gpu_sm_mean_mhz"], found["throttled_share"]) == (75.0, 1500.0, 1.0)
    assert "server_cpu_cores" not in found  # too short for a share
    assert (meter.power.idle_w, meter.power.mean_w) == (10.0, 150.0)
    sensed = meter.sensed
    assert (sensed.power_w["box"].idle, sensed.power_w["box"].mean) == (40.0, 300.0)
    assert sensed.throttled == {"GPU 0: any": 1.0}
    # Before the first sample there is nothing to tell.
    assert meter.figures(workload(0.1), began_at - 100) == {}


def test_the_cpu_share_of_a_process_is_told_idle_and_at_work():
    """The process is this one: idle in its first second, then it computes."""
    meter = Meter(os.getpid(), Machine({}).read, interval_s=0.1)

    async def run():
        async with meter.running(1.1):
            end = time.process_time() + 0.8
            while time.process_time() < end:
                await asyncio.sleep(0)
            await asyncio.sleep(0.3)

    asyncio.run(run())
    assert 0 <= meter.sensed.idle_cpu_cores < meter.sensed.cpu_cores


def test_a_workload_too_short_for_two_samples_has_no_watts():
    machine = Machine({"power_w": {"GPU 0": 100.0}})
    meter = Meter(None, machine.read, interval_s=60.0)
    began_at = metered(meter, machine)
    assert meter.figures(workload(0.1), began_at) == {}


def test_a_machine_that_tells_nothing_has_no_figures():
    machine = Machine({})
    meter = Meter(None, machine.read, interval_s=0.02)
    began_at = metered(meter, machine)
    assert meter.figures(workload(0.25), began_at) == {}
    assert (meter.power, meter.sensed) == (None, None)


def test_cost_is_energy_and_hardware_over_what_was_made():
    made = WorkloadRecord(
        "x", WorkloadKind.LOAD, {}, workload(10.0, tokens=500).requests, 10.0, {"box_j_per_token": 3.6}
    )
    # 3.6 J a token are 1 kWh a million; 50 tokens a second are a million in 20,000 s.
    assert token_cost(made, Prices(kwh=0.3)) == TokenCost("box", pytest.approx(0.3), None, None)
    found = token_cost(made, Prices(kwh=0.3, hardware=4000.0, lifetime_years=2.0, api=10.3))
    assert found.hardware == pytest.approx(4000 / (2 * 365.25 * 86400) * 20_000)
    assert found.total == pytest.approx(found.energy + found.hardware)
    # 10 saved on every million: 400 millions, 20,000 s each.
    assert found.paid_after_days == pytest.approx(400 * 20_000 / 86400)
    assert token_cost(made, Prices(kwh=20.0, hardware=4000.0, api=10.0)).paid_after_days is None
    with pytest.raises(UsageError, match="--price-hardware"):
        Prices(api=1.0)


def test_without_watts_there_is_no_cost_of_energy():
    assert token_cost(workload(10.0), Prices(kwh=0.3)) == TokenCost("", None, None, None)
    assert token_cost(WorkloadRecord("x", WorkloadKind.LOAD), Prices(kwh=0.3)) is None
