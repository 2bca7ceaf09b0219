"""One reading of all sensors. A sensor that does not tell is absent, never 0."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from onebox.sensors import sysfs
from onebox.sensors.nvidia import GpuReading, read_gpus

__all__ = ["SensorReading", "Sensors"]


@dataclass(frozen=True)
class SensorReading:
    """What the sensors told at `at_s`, on the clock of time.perf_counter."""

    at_s: float
    power_w: dict[str, float] = field(default_factory=dict)
    """By source: "box" is the whole machine, "GPU 0" a GPU, "CPU package-0" a RAPL domain, others by hwmon channel."""
    temperature_c: dict[str, float] = field(default_factory=dict)
    clock_mhz: dict[str, float] = field(default_factory=dict)
    throttled: dict[str, bool] = field(default_factory=dict)
    """Whether clocks are reduced, by reason; empty if nothing tells."""

    @property
    def gpu_w(self) -> float | None:
        """All GPUs together; None unless all of them tell."""
        told = [watts for name, watts in self.power_w.items() if name.startswith("GPU ")]
        return sum(told) if told else None

    @property
    def box_w(self) -> float | None:
        return self.power_w.get("box")


class Sensors:
    """Reads the machine's sensors; power of energy counters is that since the previous reading."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._energy: dict[str, tuple[float, float]] = {}
        self._energy_at = 0.0
        self._throttle_count: float | None = None

    def read(self) -> SensorReading:
        """Takes up to some tenths of a second, for nvidia-smi: not for an event loop."""
        gpus = read_gpus()
        power = {f"GPU {gpu.number}": gpu.power_w for gpu in gpus if gpu.power_w is not None}
        if len(power) < len(gpus):
            power = {}  # a sum of some of the GPUs would look like all of them
        # A meter of the whole machine goes before the platform's counter.
        power = {**self._counted_w(), **sysfs.hwmon_power_w(self._root), **power}
        clock = sysfs.cpu_clock_mhz(self._root)
        return SensorReading(
            time.perf_counter(),
            power,
            {**_gpu_temperatures(gpus), **sysfs.temperatures_c(self._root)},
            {**_gpu_clocks(gpus), **({} if clock is None else {"CPU": clock})},
            {**_gpu_throttling(gpus), **self._platform_throttling()},
        )

    def _counted_w(self) -> dict[str, float]:
        now, counters = time.perf_counter(), sysfs.energy_j(self._root)
        before, self._energy = self._energy, counters
        elapsed, self._energy_at = now - self._energy_at, now
        found = {}
        for name, (joules, most) in counters.items():
            if name in before and elapsed > 0:
                used = joules - before[name][0]
                # The counter starts again at its maximum.
                used += most if used < 0 else 0.0
                if used >= 0:
                    found[name] = used / elapsed
        return found

    def _platform_throttling(self) -> dict[str, bool]:
        found = {}
        count = sysfs.throttle_counts(self._root)
        if count is not None and self._throttle_count is not None:
            found["CPU: thermal"] = count > self._throttle_count
        self._throttle_count = count
        held = sysfs.platform_throttled(self._root)
        return found if held is None else {**found, "box: PROCHOT": held}


def _gpu_temperatures(gpus: list[GpuReading]) -> dict[str, float]:
    told = {f"GPU {gpu.number}": gpu.temperature_c for gpu in gpus}
    told |= {f"GPU {gpu.number} memory": gpu.memory_temperature_c for gpu in gpus}
    return {name: value for name, value in told.items() if value is not None}


def _gpu_clocks(gpus: list[GpuReading]) -> dict[str, float]:
    told = {f"GPU {gpu.number} SM": gpu.sm_clock_mhz for gpu in gpus}
    told |= {f"GPU {gpu.number} memory": gpu.memory_clock_mhz for gpu in gpus}
    return {name: value for name, value in told.items() if value is not None}


def _gpu_throttling(gpus: list[GpuReading]) -> dict[str, bool]:
    """Every reason that is active; a GPU that tells and has none counts as one that is not throttled."""
    found = {}
    for gpu in gpus:
        if gpu.throttled is not None:
            found[f"GPU {gpu.number}: any"] = bool(gpu.throttled)
            found |= {f"GPU {gpu.number}: {reason}": True for reason in gpu.throttled}
    return found
