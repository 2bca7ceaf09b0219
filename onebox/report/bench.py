"""Report sections of `onebox bench` runs: failures, speeds, TTFT, drafts, load, memory, start."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from onebox.bench.timing import DELIVERY_S
from onebox.report import plots
from onebox.report.document import Block, Cell, Plot, ReportSection, Sentence, Table
from onebox.report.source import ResultFile, pointer

__all__ = ["bench_failures", "bench_sections"]

GIB = 2**30
_SHOWN_FAILURES = 20
_Column = tuple[str, str, str]
"""Heading, key relative to a workload, format."""

_SINGLE: tuple[_Column, ...] = (
    ("prompt tokens", "figures/prompt_tokens", ",.0f"),
    ("answer tokens", "figures/completion_tokens", ",.0f"),
    ("decode tok/s", "figures/decode_p50_tok_s", ",.1f"),
    ("lowest", "figures/decode_min_tok_s", ",.1f"),
    ("highest", "figures/decode_max_tok_s", ",.1f"),
    ("mean", "figures/decode_mean_tok_s", ",.1f"),
    ("deviation", "figures/decode_std_tok_s", ",.2f"),
    ("end to end tok/s", "figures/e2e_p50_tok_s", ",.1f"),
    ("end to end, warm", "figures/e2e_warm_p50_tok_s", ",.1f"),
    ("first token, cold", "figures/ttft_cold_p50_s", "s"),
    ("first token, warm", "figures/ttft_warm_p50_s", "s"),
    ("prefill tok/s", "figures/prefill_tok_s", ",.0f"),
)
_LOAD: tuple[_Column, ...] = (
    ("completed", "figures/completed", ",.0f"),
    ("failed", "figures/failed", ",.0f"),
    ("tok/s together", "figures/aggregate_tok_s", ",.1f"),
    ("requests/s", "figures/requests_s", ",.3g"),
    ("tok/s each", "figures/decode_p50_tok_s", ",.1f"),
    *((f"first token p{share}", f"figures/ttft_p{share}_s", "s") for share in (50, 95, 99)),
    *((f"between tokens p{share}", f"figures/itl_p{share}_s", "s") for share in (50, 95, 99)),
    ("goodput requests/s", "figures/goodput_req_s", ",.3g"),
    ("within SLO", "figures/slo_share", ".1%"),
    ("sent late p95", "figures/late_p95_s", "s"),
)
_SWEEP: tuple[_Column, ...] = (
    ("prompt", "settings/prompt", ",d"),
    ("answer", "settings/answer", ",d"),
    ("depth", "settings/depth", ",d"),
    ("at once", "settings/concurrency", ",d"),
    ("prefill tok/s", "figures/prefill_tok_s", ",.0f"),
    ("first token", "figures/ttft_p50_s", "s"),
    ("decode tok/s each", "figures/decode_p50_tok_s", ",.1f"),
    ("decode tok/s together", "figures/aggregate_tok_s", ",.1f"),
    *(
        (f"{title}{kind}", f"figures/{name}_{key}", form)
        for title, name, unit, form in (
            ("pp t/s", "pp", "tok_s", ",.2f"),
            ("tg t/s", "tg", "tok_s", ",.2f"),
            ("peak t/s", "peak", "tok_s", ",.2f"),
            ("ttfr", "ttfr", "s", "s"),
            ("est_ppt", "est_ppt", "s", "s"),
            ("e2e_ttft", "e2e_ttft", "s", "s"),
        )
        for kind, key in (("", f"mean_{unit}"), (" ±", f"std_{unit}"))
    ),
)
_SENSED = (("power_w", " W", ".1f"), ("temperature_c", " °C", ".0f"), ("clock_mhz", " MHz", ",.0f"))
"""Key of a record's `sensed`, unit, format."""
_POWER: tuple[_Column, ...] = (
    ("GPU mean W", "figures/gpu_mean_w", ",.1f"),
    ("GPU peak W", "figures/gpu_peak_w", ",.1f"),
    ("box mean W", "figures/box_mean_w", ",.1f"),
    ("GPU J/token", "figures/gpu_j_per_token", ".3g"),
    ("box J/token", "figures/box_j_per_token", ".3g"),
    ("GPU max °C", "figures/gpu_max_c", ".0f"),
    ("SM MHz", "figures/gpu_sm_mean_mhz", ",.0f"),
    ("throttled", "figures/throttled_share", ".0%"),
    ("server's cores", "figures/server_cpu_cores", ".2f"),
)
_DRAFTS: tuple[_Column, ...] = (
    ("tokens a step", "acceptance/tokens_per_step", ".2f"),
    ("accepted", "acceptance/accepted", ",d"),
    ("drafted", "acceptance/drafted", ",d"),
)


def bench_failures(source: ResultFile) -> Iterator[Block]:
    """Failures, shown before everything else."""
    if source.body["interrupted"]:
        yield Sentence(f"{source.name}: the run was interrupted; its figures cover only a part.", is_alarm=True)
    kinds: Counter[tuple[str, str, str, str]] = Counter()
    first: dict[tuple[str, str, str, str], str] = {}
    for number, workload in enumerate(source.body["workloads"]):
        for index, request in enumerate(workload["requests"]):
            failure = request["failure"]
            if failure:
                kind = (workload["name"], failure["reason"], str(failure["status"] or "-"), failure["message"])
                kinds[kind] += 1
                first.setdefault(kind, pointer("workloads", number, "requests", index, "failure", "reason"))
    if not kinds:
        return
    total = sum(len(workload["requests"]) for workload in source.body["workloads"])
    yield Sentence(
        f"{source.name}: {sum(kinds.values())} of {total} requests FAILED. The figures below cover only the others and "
        "do not represent this server.",
        is_alarm=True,
    )
    rows = [
        (workload, source.value(first[kind]), status, str(count), message)
        for kind, count in kinds.most_common(_SHOWN_FAILURES)
        for workload, _, status, message in [kind]
    ]
    yield Table(("workload", "reason", "status", "times", "for example"), tuple(rows))


def bench_sections(sources: Sequence[ResultFile]) -> Iterator[ReportSection]:
    """Sections over all runs; empty sections are omitted."""
    parts: list[tuple[str, Callable[[Sequence[ResultFile]], Iterator[Block]]]] = [
        ("Speed by workload", _speed),
        ("Time to the first token", _first_tokens),
        ("Accepted drafts", _drafts),
        ("Under load", _under_load),
        ("Distribution of latencies", _latencies),
        ("Sweep", _sweep),
        ("Memory", _memory),
        ("Start", _start),
        ("Power and heat", _power),
        ("Skipped and scaled", _notes),
    ]
    for title, make in parts:
        blocks = tuple(make(sources))
        if blocks:
            yield ReportSection(title, blocks)


def _workloads(
    sources: Sequence[ResultFile], kind: str | None = None
) -> Iterator[tuple[ResultFile, int, dict[str, Any]]]:
    """Every workload with figures, its run and its index in it."""
    for source in sources:
        for number, workload in enumerate(source.body["workloads"]):
            if workload["figures"] and kind in (None, workload["kind"]):
                yield source, number, workload


def _table(sources: Sequence[ResultFile], kind: str | None, columns: Sequence[_Column]) -> Iterator[Table]:
    rows: list[tuple[Cell, ...]] = []
    for source, number, workload in _workloads(sources, kind):
        cells = [source.value(pointer("workloads", number) + f"/{key}", form) for _, key, form in columns]
        if any(cell != "-" for cell in cells):
            rows.append((source.name, workload["name"], *cells))
    if not rows:
        return
    used = [0, *range(1, 2), *(i for i in range(2, len(columns) + 2) if any(row[i] != "-" for row in rows))]
    kept = used if len(sources) > 1 else used[1:]
    names = ("run", "workload", *(name for name, _, _ in columns))
    yield Table(tuple(names[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows))


def _points(sources: Sequence[ResultFile], kind: str, stem: str, unit: str) -> dict[str, dict[str, plots.Point | None]]:
    """Run -> workload -> median with lowest and highest."""
    found: dict[str, dict[str, plots.Point | None]] = {source.name: {} for source in sources}
    for source, _, workload in _workloads(sources, kind):
        figures = workload["figures"]
        if f"{stem}_p50_{unit}" in figures:
            ends = (figures.get(f"{stem}_{end}_{unit}", figures[f"{stem}_p50_{unit}"]) for end in ("p50", "min", "max"))
            found[source.name][workload["name"]] = plots.Point(*ends)
    return found


def _bars(series: dict[str, dict[str, plots.Point | None]], axis: str, *, is_log: bool = False) -> str:
    labels = list(dict.fromkeys(label for points in series.values() for label in points))
    kept = {name: [points.get(label) for label in labels] for name, points in series.items() if points}
    return plots.grouped_bars(labels, kept, axis, is_log=is_log) if labels else ""


def _speed(sources: Sequence[ResultFile]) -> Iterator[Block]:
    svg = _bars(_points(sources, "single", "decode", "tok_s"), "decode, tokens per second")
    if svg:
        yield Plot(svg, "Decode speed of one stream: median, with the lowest and the highest run.")
    yield from _table(sources, "single", _SINGLE)


def _first_tokens(sources: Sequence[ResultFile]) -> Iterator[Block]:
    series: dict[str, dict[str, plots.Point | None]] = {}
    for stem, name in (("ttft_cold", "cold"), ("ttft_warm", "warm")):
        for run, points in _points(sources, "single", stem, "s").items():
            series[f"{run}, {name}" if len(sources) > 1 else name] = points
    svg = _bars(series, "seconds to the first token", is_log=True)
    if svg:
        yield Plot(
            svg, "Cold: the prompt has a unique beginning. Warm: the same prompt again. Medians, as in the table above."
        )


def _drafts(sources: Sequence[ResultFile]) -> Iterator[Block]:
    series: dict[str, dict[str, plots.Point | None]] = {}
    rows: list[tuple[Cell, ...]] = []
    for source, number, workload in _workloads(sources):
        accepted = workload["acceptance"]
        if not accepted or not accepted["drafted"]:
            continue
        label = f"{source.name}: {workload['name']}" if len(sources) > 1 else workload["name"]
        shares = accepted["by_position"] or [accepted["accepted"] / accepted["drafted"]]
        for place, share in enumerate(shares):
            name = f"draft {place + 1}" if accepted["by_position"] else "all drafts"
            series.setdefault(name, {})[label] = plots.Point(share, share, share)
        base = pointer("workloads", number, "acceptance")
        places = [source.value(f"{base}/by_position/{place}", ".1%") for place in range(4)]
        cells = [source.value(pointer("workloads", number) + f"/{key}", form) for _, key, form in _DRAFTS]
        rows.append((label, *cells, *places, accepted["source"]))
    if rows:
        yield Plot(
            _bars(series, "share of steps in which the draft was accepted"), "Accepted drafts by position in a step."
        )
        names = tuple(name for name, _, _ in _DRAFTS)
        yield Table(("workload", *names, "1st", "2nd", "3rd", "4th", "counted by"), tuple(rows))


def _under_load(sources: Sequence[ResultFile]) -> Iterator[Block]:
    yield from _table(sources, "load", _LOAD)


def _latencies(sources: Sequence[ResultFile]) -> Iterator[Block]:
    """Distributions from the raw requests: they show what percentiles hide."""
    firsts: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    for source, _, workload in _workloads(sources, "load"):
        name = f"{source.name}: {workload['name']}" if len(sources) > 1 else workload["name"]
        for request in workload["requests"]:
            arrivals = request["arrivals_s"]
            if request["failure"] is None and request["role"] != "warm-up" and arrivals:
                firsts.setdefault(name, []).append(arrivals[0])
                gaps.setdefault(name, []).extend(_gaps(arrivals))
    gaps = {name: values for name, values in gaps.items() if values}
    keys = "/workloads/*/requests/*/arrivals_s"
    if firsts:
        yield Plot(
            plots.distributions(firsts, "seconds to the first token"),
            f"Each step of the curve is a request ({keys}/0).",
        )
    if gaps:
        caption = (
            f"Gaps between deliveries of one request, over all requests ({keys}). A delivery may hold several tokens."
        )
        yield Plot(plots.distributions(gaps, "seconds between deliveries"), caption)


def _gaps(arrivals: Sequence[float]) -> Iterator[float]:
    """Gaps between deliveries: chunks within `DELIVERY_S` are one."""
    last = arrivals[0]
    for arrived in arrivals:
        if arrived - last >= DELIVERY_S:
            yield arrived - last
            last = arrived


def _sweep(sources: Sequence[ResultFile]) -> Iterator[Block]:
    svg = _bars(_points(sources, "sweep", "decode", "tok_s"), "decode of each stream, tokens per second")
    if svg:
        yield Plot(svg, "Each cell of the sweep: median, lowest and highest.")
    yield from _table(sources, "sweep", _SWEEP)


def _memory(sources: Sequence[ResultFile]) -> Iterator[Block]:
    bars: dict[str, dict[str, float]] = {}
    rows: list[tuple[Cell, ...]] = []
    for source in sources:
        parts = source.body["memory_bytes"]
        for part, size in parts.items():
            key = pointer("memory_bytes", part)
            rows.append((source.name, part, f"{size / GIB:.3f}", source.value(key, ",d")))
        planned = {part: size / GIB for part, size in parts.items() if part not in ("resident", "unused")}
        if planned:
            bars[source.name] = planned
    if bars:
        caption = "The server's memory plan by part, without unused memory. Resident is the process's resident memory."
        yield Plot(plots.stacked_bar(bars, "GiB"), caption)
    if rows:
        yield Table(("run", "part", "GiB", "bytes"), tuple(rows))


def _start(sources: Sequence[ResultFile]) -> Iterator[Block]:
    rows: list[tuple[Cell, ...]] = []
    for source in sources:
        phases = source.body["startup_s"]
        rows += [(source.name, phase, source.value(pointer("startup_s", phase), "s")) for phase in phases]
    if rows:
        yield Table(("run", "what", "measured"), tuple(rows))


def _power(sources: Sequence[ResultFile]) -> Iterator[Block]:
    """What the sensors told: over the run, and by workload."""
    rows: list[tuple[Cell, ...]] = []
    for source in sources:
        sensed = source.body.get("sensed")
        if not sensed and source.body["power"]:
            keys = (pointer("power", key) for key in ("idle_w", "mean_w", "peak_w"))
            idle, mean, peak = (source.value(key, ".1f", " W") for key in keys)
            rows.append((source.name, "all GPUs", idle, mean, "-", peak))
        for kind, unit, form in (
            ("power_w", " W", ".1f"),
            ("temperature_c", " °C", ".0f"),
            ("clock_mhz", " MHz", ",.0f"),
        ):
            for name in (sensed or {}).get(kind, {}):
                ends = ("idle", "mean", "lowest", "highest")
                cells = (source.value(pointer("sensed", kind, name, end), form, unit) for end in ends)
                rows.append((source.name, name, *cells))
        for reason in (sensed or {}).get("throttled", {}):
            share = source.value(pointer("sensed", "throttled", reason), ".0%")
            rows.append((source.name, f"throttled: {reason}", "-", share, "-", "-"))
        idle, busy = (source.value(pointer("sensed", key), ".1%") for key in ("idle_cpu_cores", "cpu_cores"))
        if idle != "-" or busy != "-":
            rows.append((source.name, "server's CPU, of a core", idle, busy, "-", "-"))
    if rows:
        yield Table(("run", "sensor", "idle", "mean", "lowest", "highest"), tuple(rows))
    yield from _table(sources, None, _POWER)


def _notes(sources: Sequence[ResultFile]) -> Iterator[Block]:
    for source in sources:
        for note in source.body["notes"]:
            yield Sentence(f"{source.name}: {note}", is_note=True)
        for workload in source.body["workloads"]:
            if workload["skipped"]:
                yield Sentence(f"{source.name}: {workload['name']} did not run: {workload['skipped']}", is_note=True)
            for note in workload["notes"]:
                yield Sentence(f"{source.name}: {workload['name']}: {note}", is_note=True)
