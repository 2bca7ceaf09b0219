"""Watts, temperatures, clocks, throttling and CPU time, as far as the system tells them. Standard library only."""

from onebox.sensors.process import cpu_seconds, listening_process
from onebox.sensors.reading import SensorReading, Sensors
from onebox.sensors.watch import SensorWatch

__all__ = ["SensorReading", "SensorWatch", "Sensors", "cpu_seconds", "listening_process"]
