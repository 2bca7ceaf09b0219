"""Samples the sensors of the server's machine while requests run: watts, heat, clocks, throttling, CPU share.

Only if client and server share a machine. Sampling is in a thread; a workload's figures come from the samples between
its first request and its last answer, and are absent if there are too few of them.

| figure | meaning |
|---|---|
| `gpu_mean_w`, `gpu_peak_w`, `box_mean_w`, `box_peak_w` | power of all GPUs, and of the whole machine |
| `gpu_j_per_token`, `box_j_per_token` | mean power times duration, divided by the tokens of all complete answers |
| `gpu_max_c` | the hottest GPU |
| `gpu_sm_mean_mhz`, `gpu_sm_min_mhz` | the GPUs' SM clocks |
| `throttled_share` | share of the samples in which a GPU, the CPU or the box was throttled |
| `server_cpu_cores` | CPU time of the server and its processes per second: 1 is one core |
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple

from onebox.bench.record import Figures, Power, Role, Sensed, SensorSpread, WorkloadRecord
from onebox.sensors import SensorReading, Sensors, cpu_seconds

__all__ = ["Meter"]

_INTERVAL_S = 1.0
_LEAST_SAMPLES = 2
_LEAST_CPU_S = 1.0
"""A process's CPU time is counted in hundredths of a second: in less than this there is no share."""


class _Sample(NamedTuple):
    reading: SensorReading
    cpu_s: float | None
    """CPU time of the server's processes so far."""


class Meter:
    """Samples from `running` on; samples before the first `begin` are idle ones."""

    def __init__(
        self, process_id: int | None, read: Callable[[], SensorReading] | None = None, interval_s: float = _INTERVAL_S
    ) -> None:
        self._process_id = process_id
        self._read = read or Sensors().read
        self._interval_s = interval_s
        self._samples: list[_Sample] = []
        self._began_at: float | None = None

    @contextlib.asynccontextmanager
    async def running(self, idle_s: float = 0.0) -> AsyncIterator[None]:
        """Samples until the end of the block; before it, `idle_s` seconds without requests."""
        await self._sample()
        reading = asyncio.create_task(self._keep_sampling())
        try:
            await asyncio.sleep(idle_s)
            await self._sample()
            self._began_at = time.perf_counter()
            yield
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._sample()

    async def _sample(self) -> None:
        reading = await asyncio.to_thread(self._read)
        self._samples.append(_Sample(reading, cpu_seconds(self._process_id) if self._process_id else None))

    def figures(self, workload: WorkloadRecord, began_at: float) -> Figures:
        """Figures of a workload whose times count from `began_at`, on the clock of time.perf_counter."""
        timed = [request for request in workload.requests if request.role is not Role.WARM_UP]
        if not timed:
            return {}
        first = began_at + min(request.start_s for request in timed)
        last = began_at + max(request.start_s + request.total_s for request in timed)
        within = [sample for sample in self._samples if first <= sample.reading.at_s <= last]
        if len(within) < _LEAST_SAMPLES:
            return {}
        made = sum(request.completion_tokens or 0 for request in workload.measured)
        return {
            **_power_figures(within, last - first, made),
            **_heat_figures(within),
            **_optional("server_cpu_cores", _cpu_cores(within)),
        }

    @property
    def power(self) -> Power | None:
        """All GPUs together; None without a reading before the run and one during it."""
        idle, busy = (_known(sample.reading.gpu_w for sample in part) for part in self._parts())
        if not idle or not busy:
            return None
        return Power(statistics.fmean(busy), max(busy), statistics.fmean(idle), len(busy), self._interval_s)

    @property
    def sensed(self) -> Sensed | None:
        """Every sensor, idle and while requests ran; None if nothing tells."""
        idle, busy = self._parts()
        if not busy:
            return None
        cores, idle_cores = _cpu_cores(busy), _cpu_cores(idle)
        found = Sensed(
            self._interval_s,
            len(busy),
            _spreads([sample.reading.power_w for sample in idle], [sample.reading.power_w for sample in busy]),
            _spreads([s.reading.temperature_c for s in idle], [s.reading.temperature_c for s in busy]),
            _spreads([s.reading.clock_mhz for s in idle], [s.reading.clock_mhz for s in busy]),
            _throttled(busy),
            idle_cores,
            cores,
        )
        told = found.power_w or found.temperature_c or found.clock_mhz or found.throttled
        return found if told or cores is not None else None

    def _parts(self) -> tuple[list[_Sample], list[_Sample]]:
        begins = self._began_at
        idle = [sample for sample in self._samples if begins is None or sample.reading.at_s <= begins]
        return idle, self._samples[len(idle) :]


def _power_figures(within: Sequence[_Sample], duration_s: float, made: int) -> Figures:
    found: Figures = {}
    sides = {"gpu": [s.reading.gpu_w for s in within], "box": [s.reading.box_w for s in within]}
    for name, told in sides.items():
        watts = _known(told)
        if len(watts) >= _LEAST_SAMPLES:
            found |= {f"{name}_mean_w": statistics.fmean(watts), f"{name}_peak_w": max(watts)}
            if made:
                found[f"{name}_j_per_token"] = statistics.fmean(watts) * duration_s / made
    return found


def _heat_figures(within: Sequence[_Sample]) -> Figures:
    def gpus(values: dict[str, float], suffix: str) -> list[float]:
        return [v for name, v in values.items() if name.startswith("GPU ") and name.endswith(suffix)]

    degrees = [v for sample in within for v in gpus(sample.reading.temperature_c, "")]
    clocks = [v for sample in within for v in gpus(sample.reading.clock_mhz, " SM")]
    found: Figures = {"gpu_max_c": max(degrees)} if degrees else {}
    if clocks:
        found |= {"gpu_sm_mean_mhz": statistics.fmean(clocks), "gpu_sm_min_mhz": min(clocks)}
    told = [sample.reading.throttled for sample in within if sample.reading.throttled]
    return found | ({"throttled_share": statistics.fmean(any(one.values()) for one in told)} if told else {})


def _throttled(samples: Sequence[_Sample]) -> dict[str, float]:
    """Reason -> share of the samples in which it was active."""
    told = [sample.reading.throttled for sample in samples if sample.reading.throttled]
    reasons = {reason for one in told for reason in one}
    return {reason: statistics.fmean(one.get(reason, False) for one in told) for reason in sorted(reasons)}


def _cpu_cores(samples: Sequence[_Sample]) -> float | None:
    """CPU seconds per second between the first and the last sample that has them."""
    told = [(sample.reading.at_s, sample.cpu_s) for sample in samples if sample.cpu_s is not None]
    if len(told) < _LEAST_SAMPLES or told[-1][0] - told[0][0] < _LEAST_CPU_S:
        return None
    return max((told[-1][1] - told[0][1]) / (told[-1][0] - told[0][0]), 0.0)


def _spreads(idle: Sequence[dict[str, float]], busy: Sequence[dict[str, float]]) -> dict[str, SensorSpread]:
    found = {}
    for name in dict.fromkeys(name for values in busy for name in values):
        during, before = (_known(values.get(name) for values in part) for part in (busy, idle))
        mean = statistics.fmean(during)
        found[name] = SensorSpread(mean, min(during), max(during), statistics.fmean(before) if before else None)
    return found


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _optional(name: str, value: float | None) -> Figures:
    return {} if value is None else {name: value}
