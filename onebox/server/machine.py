"""The machine in GET /metrics: watts, temperatures, clocks, throttling, CPU time of the server.

Values come from a thread that reads the sensors every few seconds while /metrics is read. A sensor that does not tell
has no sample, never a 0.
"""

import os
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onebox.sensors import SensorWatch, cpu_seconds

__all__ = ["MachineCollector"]


class MachineCollector(Collector):
    """Reads the latest sample at each scrape."""

    def __init__(self, sensors: SensorWatch, model_name: str) -> None:
        self._sensors = sensors
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        used = cpu_seconds(os.getpid())
        if used is not None:
            text = "CPU time of the server and its processes."
            family = CounterMetricFamily("onebox:cpu_seconds", text, labels=("model_name",))
            family.add_metric((self._model_name,), used)
            yield family
        found = self._sensors.latest()
        if found is None:
            return
        hertz = {name: value * 1e6 for name, value in found.clock_mhz.items()}
        throttled = {name: float(value) for name, value in found.throttled.items()}
        for name, text, label, values in (
            ("onebox:power_watts", "Power by source; box is the whole machine.", "source", found.power_w),
            ("onebox:temperature_celsius", "Temperature by sensor.", "sensor", found.temperature_c),
            ("onebox:clock_hertz", "Clock by device.", "clock", hertz),
            ("onebox:throttled", "1 while clocks are reduced, by reason.", "reason", throttled),
        ):
            if values:
                yield self._gauge(name, text, label, values)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the sensors."""
        return iter(())

    def _gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model_name, key), value)
        return family
