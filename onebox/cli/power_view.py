"""Power, heat and cost of a bench run as text: lines for the head, a table by workload. What is not known is a dash."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from onebox.bench.record import Run, SensorSpread, WorkloadRecord

if TYPE_CHECKING:
    from onebox.bench.cost import Prices

__all__ = ["cost_notes", "power_cells", "power_lines", "prices_of"]

_FIGURES = ("gpu_mean_w", "box_mean_w", "gpu_max_c", "server_cpu_cores")


def prices_of(run: Run) -> "Prices":
    """The prices that a run was measured with."""
    from onebox.bench.cost import Prices

    return Prices(**(run.config.get("prices") or {}))


def power_lines(run: Run) -> Iterator[str]:
    """What the sensors told over the whole run."""
    sensed = run.sensed
    if sensed is None:
        return
    if sensed.power_w:
        yield "power: " + "; ".join(_told(sensed.power_w, ".1f", "W"))
    if sensed.temperature_c:
        hottest = dict(sorted(sensed.temperature_c.items(), key=lambda item: -item[1].highest)[:4])
        yield "heat: " + "; ".join(_told(hottest, ".0f", "°C"))
    if sensed.clock_mhz:
        clocks = (f"{name} {one.mean:,.0f} MHz, lowest {one.lowest:,.0f}" for name, one in sensed.clock_mhz.items())
        yield "clocks: " + "; ".join(clocks)
    if sensed.throttled:
        active = [f"{name} in {share:.0%} of the samples" for name, share in sensed.throttled.items() if share]
        yield "throttled: " + ("; ".join(active) or f"in none of {sensed.num_samples} samples")
    parts = (("idle", sensed.idle_cpu_cores), ("while requests ran", sensed.cpu_cores))
    cores = [f"{name} {value:.1%} of a core" for name, value in parts if value is not None]
    if cores:
        yield "server's CPU: " + ", ".join(cores)


def _told(spreads: Mapping[str, SensorSpread], form: str, unit: str) -> Iterator[str]:
    for name, one in spreads.items():
        idle = "" if one.idle is None else f", idle {one.idle:{form}}"
        yield f"{name} mean {one.mean:{form}} {unit}, peak {one.highest:{form}}{idle}"


def power_cells(run: Run, prices: "Prices") -> list[tuple[str, dict[str, str]]]:
    """A row for each workload with figures; empty if there is nothing to tell."""
    workloads = [workload for workload in run.workloads if workload.figures]
    is_told = any(name in workload.figures for workload in workloads for name in _FIGURES)
    if not is_told and not prices.is_set:
        return []
    rows = [(workload.name, _cells(workload) | _cost_cells(workload, prices)) for workload in workloads]
    told = {column for _, cells in rows for column, cell in cells.items() if cell != "-"}
    return [(name, {column: cell for column, cell in cells.items() if column in told}) for name, cells in rows]


def cost_notes(run: Run, prices: "Prices") -> Iterator[str]:
    """A price that could not be applied."""
    told = any(f"{name}_j_per_token" in workload.figures for workload in run.workloads for name in ("box", "gpu"))
    if prices.kwh is not None and not told:
        yield "no cost of energy: no sensor of the server's machine tells its watts"


def _cells(workload: WorkloadRecord) -> dict[str, str]:
    get = workload.figures.get
    return {
        "GPU\nmean W": _shown(get("gpu_mean_w"), ".1f"),
        "peak W": _shown(get("gpu_peak_w"), ".1f"),
        "box\nmean W": _shown(get("box_mean_w"), ".1f"),
        "GPU\nJ/token": _shown(get("gpu_j_per_token"), ".3g"),
        "box\nJ/token": _shown(get("box_j_per_token"), ".3g"),
        "GPU\nmax °C": _shown(get("gpu_max_c"), ".0f"),
        "SM MHz\nmean": _shown(get("gpu_sm_mean_mhz"), ",.0f"),
        "lowest": _shown(get("gpu_sm_min_mhz"), ",.0f"),
        "throttled": _shown(get("throttled_share"), ".0%"),
        "server's\ncores": _shown(get("server_cpu_cores"), ".2f"),
    }


def _cost_cells(workload: WorkloadRecord, prices: "Prices") -> dict[str, str]:
    from onebox.bench.cost import TokenCost, token_cost

    if not prices.is_set:
        return {}
    cost = token_cost(workload, prices) or TokenCost("", None, None, None)
    cells = {
        "energy\na Mtok": _shown(cost.energy, ".4g"),
        "of": cost.power or "-",
        "hardware\na Mtok": _shown(cost.hardware, ".4g"),
        "cost\na Mtok": _shown(cost.total, ".4g"),
    }
    if prices.api is not None:
        days = cost.paid_after_days
        cells["paid for\nafter"] = "-" if days is None else f"{days:,.0f} days"
    return cells


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
