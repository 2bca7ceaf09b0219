"""Linux's own sensors: hwmon (board, PSU, a Spark's power telemetry), RAPL, thermal zones, CPU clocks and throttling.

Paths are below a root, so that a test can give a tree of its own. A file that is missing or cannot be read (RAPL often
needs root, a process may be out of descriptors) is a sensor that does not tell.
"""

from pathlib import Path

__all__ = ["cpu_clock_mhz", "energy_j", "hwmon_power_w", "platform_throttled", "temperatures_c", "throttle_counts"]

_BOX_LABELS = ("sys_total", "psys", "vdd_in", "dc_input")
"""hwmon labels of the whole machine's power: a Spark's `spbm` driver, Jetson's INA3221; the first that is there."""
_BOX_DEVICES = ("power_meter",)
"""hwmon devices whose only channel is the whole machine: ACPI's power meter."""
_NOT_DRAWN = ("budget", "pl1", "pl2", "syspl")
"""Beginnings of `spbm` labels that are limits and averages, not power that is drawn."""
_NOT_TEMPERATURES = ("tj_max_c",)
_COOLEST_C, _HOTTEST_C = -40.0, 150.0
"""Outside, a sensor is not connected."""
_MOST = 32


def _paths(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _value(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _channels(root: Path, kind: str, endings: tuple[str, ...]) -> list[tuple[str, str, float]]:
    """(device, label, raw value) of every hwmon channel of a kind, such as power1_average; at most `_MOST`."""
    found: list[tuple[str, str, float]] = []
    for device in _paths(root / "sys/class/hwmon", "hwmon*"):
        name = _text(device / "name") or device.name
        for ending in endings:
            for path in _paths(device, f"{kind}*_{ending}"):
                channel = path.name.removesuffix(f"_{ending}")
                value = _value(path)
                label = _text(device / f"{channel}_label") or channel
                if value is not None and all((name, label) != seen[:2] for seen in found):
                    found.append((name, label, value))
    return found[:_MOST]


def hwmon_power_w(root: Path) -> dict[str, float]:
    """Watts by channel; "box" is the whole machine where a channel is known to be it."""
    drawn = [
        (device, label, microwatts / 1e6)
        for device, label, microwatts in _channels(root, "power", ("average", "input"))
        if not label.lower().startswith(_NOT_DRAWN)
    ]
    found = {f"{device} {label}": watts for device, label, watts in drawn}
    for wanted in _BOX_LABELS:
        for _, label, watts in drawn:
            if label.lower() == wanted:
                return {"box": watts, **found}
    box = [watts for device, _, watts in drawn if device in _BOX_DEVICES]
    return {"box": box[0], **found} if box else found


def energy_j(root: Path) -> dict[str, tuple[float, float]]:
    """RAPL counters: name -> (joules, joules at which the counter starts again). "box" is the platform's (psys)."""
    found = {}
    for zone in _paths(root / "sys/class/powercap", "*rapl*:*"):
        name, joules = _text(zone / "name"), _value(zone / "energy_uj")
        most = _value(zone / "max_energy_range_uj")
        if name and joules is not None and zone.name.count(":") == 1:
            key = "box" if name == "psys" else f"CPU {name}"
            found[key] = (joules / 1e6, (most or 0.0) / 1e6)
    return found


def temperatures_c(root: Path) -> dict[str, float]:
    """Degrees by hwmon channel and thermal zone."""
    found = {
        f"{device} {label}": value / 1000
        for device, label, value in _channels(root, "temp", ("input",))
        if label not in _NOT_TEMPERATURES
    }
    zones = _paths(root / "sys/class/thermal", "thermal_zone*")
    for zone in sorted(zones, key=lambda path: (len(path.name), path.name)):
        value, kind = _value(zone / "temp"), _text(zone / "type") or "zone"
        if value is not None:
            found[f"{kind} {zone.name.removeprefix('thermal_zone')}"] = value / 1000
    plausible = {name: value for name, value in found.items() if _COOLEST_C < value < _HOTTEST_C}
    return dict(list(plausible.items())[:_MOST])


def cpu_clock_mhz(root: Path) -> float | None:
    """Mean over the cores."""
    paths = _paths(root / "sys/devices/system/cpu", "cpu[0-9]*/cpufreq/scaling_cur_freq")
    clocks = [value / 1000 for path in paths if (value := _value(path)) is not None]
    return sum(clocks) / len(clocks) if clocks else None


def throttle_counts(root: Path) -> float | None:
    """How often the CPU packages were throttled for heat since the start; None if not told."""
    paths = _paths(root / "sys/devices/system/cpu", "cpu[0-9]*/thermal_throttle/package_throttle_count")
    counts = [value for path in paths if (value := _value(path)) is not None]
    return max(counts) if counts else None


def platform_throttled(root: Path) -> bool | None:
    """Whether a Spark's firmware holds PROCHOT; None if not told."""
    hwmon = root / "sys/class/hwmon"
    states = [_value(path) for path in _paths(hwmon, "hwmon*/prochot") + _paths(hwmon, "hwmon*/device/prochot")]
    known = [state for state in states if state is not None]
    return any(known) if known else None
