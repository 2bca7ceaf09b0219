"""GPUs by nvidia-smi: watts, temperatures, clocks, reasons for reduced clocks. What a GPU does not tell is absent."""

import shutil
import subprocess
from typing import NamedTuple

__all__ = ["GpuReading", "parse_gpus", "read_gpus"]

_QUICK_S = 5.0
_FIELDS = ("index", "power.draw", "temperature.gpu", "temperature.memory", "clocks.sm", "clocks.mem")
_REASONS_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The name since driver 535, and before."""
_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of NVML's nvmlClocksEventReasons that are throttling. Idle, set clocks, sync boost and display are not."""


class GpuReading(NamedTuple):
    """One GPU; None: not told."""

    number: int
    power_w: float | None
    temperature_c: float | None
    memory_temperature_c: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    throttled: tuple[str, ...] | None


def read_gpus() -> list[GpuReading]:
    """All GPUs of the machine; none without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    for reasons in _REASONS_FIELDS:
        query = f"--query-gpu={','.join((*_FIELDS, reasons))}"
        try:
            done = subprocess.run(
                [program, query, "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=_QUICK_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode == 0:
            return parse_gpus(done.stdout)
    return []


def parse_gpus(text: str) -> list[GpuReading]:
    """Lines of nvidia-smi's CSV without header and units; "[N/A]" and the like are None."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_FIELDS) + 1 and cells[0].isdigit():
            power, heat, memory_heat, sm_clock, memory_clock = map(_number, cells[1:-1])
            throttled = _throttled(cells[-1])
            found.append(GpuReading(int(cells[0]), power, heat, memory_heat, sm_clock, memory_clock, throttled))
    return found


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _throttled(cell: str) -> tuple[str, ...] | None:
    try:
        bits = int(cell, 16)
    except ValueError:
        return None
    return tuple(name for bit, name in _REASONS.items() if bits & bit)
