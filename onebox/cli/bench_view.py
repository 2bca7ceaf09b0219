"""Terminal output of `onebox bench`: progress bars during the run, tables after it. Failures always come first.

Figures are taken from the record; only their number formats are chosen here.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onebox.bench.figures import failure_counts
from onebox.bench.record import Run, WorkloadKind, WorkloadRecord
from onebox.cli.power_view import cost_notes, power_cells, power_lines, prices_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from onebox.bench.answer import StreamedAnswer
    from onebox.bench.cost import Prices
    from onebox.bench.record import Figures

__all__ = ["Bars", "bars", "show", "summary"]

_MESSAGE_CHARS = 160
_FILE_WIDTH = 200
_WIDE_SINGLE, _WIDE_LOAD, _WIDE_SWEEP = 140, 158, 150
"""Terminal width from which the less important columns of a table are shown too."""
_LESS = ("accepted\nby position",)


class Bars:
    """Shows progress: one bar for all workloads, one for the current workload, a line for each completed one."""

    def __init__(self, progress: "Progress", console: "Console", num_workloads: int) -> None:
        self._progress = progress
        self._console = console
        self._whole = progress.add_task("all", total=num_workloads)
        self._current: TaskID | None = None
        self._name = ""
        self._total: int | None = None
        self._num_failed = self._num_answered = 0

    def begin(self, name: str, total: int | None) -> None:
        self._name, self._total, self._num_failed, self._num_answered = name, total, 0, 0
        self._current = self._progress.add_task(name, total=total)

    def answered(self, answer: "StreamedAnswer") -> None:
        self._num_failed += answer.failure is not None
        if self._current is not None:
            failed = f" ({self._num_failed} failed)" if self._num_failed else ""
            self._num_answered += 1
            # Warm-up requests are added to the announced total.
            total = None if self._total is None else max(self._total, self._num_answered)
            self._progress.update(self._current, advance=1, total=total, description=f"{self._name}{failed}")

    def end(self, workload: WorkloadRecord) -> None:
        if self._current is not None:
            self._progress.remove_task(self._current)
        self._current = None
        self._progress.update(self._whole, advance=1)
        self._console.print(_line(workload), markup=False, highlight=False)


@contextmanager
def bars(num_workloads: int) -> Iterator[Bars]:
    """On stderr; without a terminal only the lines, no bars."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    options: dict[str, Any] = {"console": console, "disable": not console.is_terminal, "transient": True}
    # Low refresh rate: drawing takes CPU time from the client that does the timing.
    with Progress(*columns, refresh_per_second=2, **options) as progress:
        yield Bars(progress, console, num_workloads)


def _line(workload: WorkloadRecord) -> str:
    """Summary line of a completed workload."""
    if workload.skipped:
        return f"{workload.name}: skipped, {workload.skipped}"
    if workload.failed:
        return f"{workload.name}: {len(workload.failed)} of {len(workload.requests)} requests FAILED"
    found = workload.figures
    speed = found.get("aggregate_tok_s", found.get("decode_p50_tok_s"))
    return f"{workload.name}: {len(workload.requests)} requests" + (f", {speed:.1f} tok/s" if speed else "")


def show(run: Run, prices: "Prices | None" = None) -> None:
    """Prints the complete report on stdout, at other prices than those it was measured with if given."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        # A file or a pipe has no width, so lines are not wrapped.
        console = Console(highlight=False, width=_FILE_WIDTH)

    def say(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    _show_failures(console, run)
    for line in _head(run):
        say(line)
    prices = prices or prices_of(run)
    power = power_cells(run, prices)
    tables = [_single_table(run, console), _load_table(run, console), _sweep_table(run, console)]
    tables.append(_filled("power and cost", power, ()) if power else None)
    for table in tables:
        if table is not None:
            say()
            console.print(table)
    notes = [*_notes(run), *cost_notes(run, prices)]
    if notes:
        say()
    for note in notes:
        say(note)
    say()
    say(verdict(run))


def _show_failures(console: "Console", run: Run) -> None:
    failed = run.failed
    if not failed and not run.interrupted:
        return
    if run.interrupted:
        console.print("INTERRUPTED: this run is incomplete.", style="bold red", markup=False)
    if failed:
        console.print(_failure_headline(run), style="bold red", markup=False)
        table = _table("workload", "reason", "status", "times", "for example")
        for workload in run.workloads:
            for reason, status, message, count in failure_counts(workload.failed):
                table.add_row(workload.name, reason, str(status or "-"), str(count), message[:_MESSAGE_CHARS])
        console.print(table)
    console.print()


def _failure_headline(run: Run) -> str:
    return f"FAILED: {len(run.failed)} of {_num_requests(run)} requests."


def _num_requests(run: Run) -> int:
    return sum(len(workload.requests) for workload in run.workloads)


def verdict(run: Run) -> str:
    """The last line; never reports success if a request failed."""
    if run.failed:
        return f"{_failure_headline(run)} The figures above cover only the others and do not represent this server."
    if run.interrupted:
        return f"Interrupted after {run.duration_s:.0f} s and {_num_requests(run)} requests."
    if not run.is_success:
        return "Nothing was measured: every workload was skipped."
    return f"All {_num_requests(run)} requests were answered completely, in {run.duration_s:.0f} s."


def _head(run: Run) -> Iterator[str]:
    server, machine = run.server, run.hardware
    context = f", context {server.max_model_len:,}" if server.max_model_len else ""
    yield f"{server.model} at {server.url} ({server.kind} {server.version}{context})"
    load = "" if machine.load_average is None else f", load {machine.load_average:.1f}"
    gpus = f", {', '.join(machine.gpus)}" if machine.gpus else ""
    place = "client on the server's machine" if server.is_local else "client on another machine"
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB"
    yield f"{machine.cpu}, {machine.num_cores} cores, {memory}{gpus}{load}; {place}, {run.started}"
    yield f"onebox {run.versions.get('onebox')}, commit {run.commit or 'unknown'}, seed {run.config.get('seed')}"
    if run.startup_s:
        yield "start-up: " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in run.startup_s.items())
    if run.memory_bytes:
        yield "memory: " + ", ".join(f"{part} {size / 2**30:.3f} GiB" for part, size in run.memory_bytes.items())
    yield from power_lines(run)


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        is_text = place == 0 or column in ("reason", "for example")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table


def _filled(head: str, rows: Iterable[tuple[str, dict[str, str]]], left_out: Sequence[str]) -> "Table":
    """A table of rows keyed by column, without the excluded columns."""
    kept = [(name, {key: cell for key, cell in cells.items() if key not in left_out}) for name, cells in rows]
    table = _table(head, *kept[0][1])
    for name, cells in kept:
        table.add_row(name, *cells.values())
    return table


def _of_kind(run: Run, kind: WorkloadKind) -> list[WorkloadRecord]:
    return [workload for workload in run.workloads if workload.kind is kind]


def _single_table(run: Run, console: "Console") -> "Table | None":
    found = [(_name(workload), _single_cells(workload)) for workload in _of_kind(run, WorkloadKind.SINGLE)]
    left_out = () if console.width >= _WIDE_SINGLE else ("prefill\ntok/s", "min-max", "mean ± std", *_LESS)
    return _filled("single stream", found, left_out) if found else None


def _single_cells(workload: WorkloadRecord) -> dict[str, str]:
    get = workload.figures.get
    return {
        "prompt": _count(get("prompt_tokens")),
        "answer": _count(get("completion_tokens")),
        "TTFT\ncold": _seconds(get("ttft_cold_p50_s")),
        "TTFT\nwarm": _seconds(get("ttft_warm_p50_s")),
        "prefill\ntok/s": _speed(get("prefill_tok_s")),
        "decode\ntok/s": _speed(get("decode_p50_tok_s")),
        "min-max": _range(workload),
        "mean ± std": _mean(workload.figures, "decode", "tok_s"),
        "e2e\ntok/s": _speed(get("e2e_p50_tok_s")),
        "e2e\nwarm": _speed(get("e2e_warm_p50_tok_s")),
        **_draft_cells(workload),
    }


def _draft_cells(workload: WorkloadRecord) -> dict[str, str]:
    drafts = workload.acceptance
    places = " ".join(f"{share * 100:.0f}" for share in drafts.by_position) if drafts else ""
    return {
        "drafts\naccepted": f"{drafts.rate:.0%}" if drafts else "-",
        "accepted\nby position": f"{places} %" if places else "-",
        "tokens\na step": f"{drafts.tokens_per_step:.2f}" if drafts else "-",
    }


def _range(workload: WorkloadRecord) -> str:
    low, high = (workload.figures.get(f"decode_{end}_tok_s") for end in ("min", "max"))
    return "-" if low is None or high is None else f"{low:.1f}-{high:.1f}"


def _load_table(run: Run, console: "Console") -> "Table | None":
    found = [(_name(workload), _load_cells(workload)) for workload in _of_kind(run, WorkloadKind.LOAD)]
    narrow = ("late\np95", "TTFT\np99", "ITL\np99", "goodput\nreq/s", "drafts\naccepted", "tokens\na step", *_LESS)
    return _filled("load", found, () if console.width >= _WIDE_LOAD else narrow) if found else None


def _load_cells(workload: WorkloadRecord) -> dict[str, str]:
    get = workload.figures.get
    good, share = get("goodput_req_s"), get("slo_share")
    return {
        "done": _count(get("completed", 0)),
        "failed": str(len(workload.failed)),
        "all\ntok/s": _speed(get("aggregate_tok_s")),
        "each\ntok/s": _speed(get("decode_p50_tok_s")),
        **{
            f"{title}\np{percent}": _seconds(get(f"{name}_p{percent}_s"))
            for title, name in (("TTFT", "ttft"), ("ITL", "itl"))
            for percent in (50, 95, 99)
        },
        "goodput\nreq/s": "-" if good is None else f"{good:.2f}",
        "in SLO": "-" if share is None else f"{share:.0%}",
        "late\np95": _seconds(get("late_p95_s")),
        **_draft_cells(workload),
    }


def _sweep_table(run: Run, console: "Console") -> "Table | None":
    """llama-benchy's table: a row for prompts and one for answers, mean and deviation."""
    cells = _of_kind(run, WorkloadKind.SWEEP)
    together = max((cell.settings.get("concurrency", 1) for cell in cells), default=1) > 1
    found = [
        row for cell in cells for row in _sweep_rows(cell, f" (c{cell.settings.get('concurrency', 1)})" * together)
    ]
    left_out = () if together else ("t/s\n(req)", "peak t/s\n(req)")
    narrow = () if console.width >= _WIDE_SWEEP else ("peak t/s\n(req)", "drafts\naccepted", *_LESS)
    return _filled("sweep", found, (*left_out, *narrow)) if found else None


def _sweep_rows(workload: WorkloadRecord, suffix: str) -> Iterator[tuple[str, dict[str, str]]]:
    if workload.skipped or not workload.figures:
        yield _name(workload), _benchy_cells({}, ("", "")) | dict.fromkeys(_draft_cells(workload), "")
        return
    failed = f" (FAILED: {len(workload.failed)})" if workload.failed else ""
    prompt, answer, depth = (workload.settings[name] for name in ("prompt", "answer", "depth"))
    place = f" @ d{depth}{suffix}" if depth else suffix
    no_drafts = dict.fromkeys(_draft_cells(workload), "")
    if "ctx_pp_mean_tok_s" in workload.figures:
        yield f"ctx_pp{place}", _benchy_cells(workload.figures, ("ctx_pp", "")) | no_drafts
    yield f"pp{prompt}{place}{failed}", _benchy_cells(workload.figures, ("pp", "")) | no_drafts
    yield f"tg{answer}{place}{failed}", _benchy_cells(workload.figures, ("tg", "peak")) | _draft_cells(workload)


def _benchy_cells(figures: "Figures", names: tuple[str, str]) -> dict[str, str]:
    """A row of speeds (`names`: the speed and the peak) and, of a prompt, its times."""
    speed, peak = names
    prefix = "ctx_" if speed.startswith("ctx_") else ""
    times = () if peak else ("ttfr", "est_ppt", "e2e_ttft")
    return {
        "t/s": _mean(figures, speed, "tok_s"),
        "t/s\n(req)": _mean(figures, f"{speed}_req", "tok_s"),
        "peak t/s": _mean(figures, peak, "tok_s"),
        "peak t/s\n(req)": _mean(figures, f"{peak}_req", "tok_s"),
        **{
            f"{name}\n(ms)": _mean(figures, f"{prefix}{name}", "s", 1000) if name in times else ""
            for name in ("ttfr", "est_ppt", "e2e_ttft")
        },
    }


def _mean(figures: "Figures", name: str, unit: str, scale: float = 1.0) -> str:
    """Mean and deviation as llama-benchy prints them; empty if absent."""
    mean, deviation = (figures.get(f"{name}_{kind}_{unit}") for kind in ("mean", "std"))
    if mean is None:
        return ""
    return f"{mean * scale:.2f}" if deviation is None else f"{mean * scale:.2f} ± {deviation * scale:.2f}"


def _name(workload: WorkloadRecord) -> str:
    if workload.failed:
        return f"{workload.name} (FAILED: {len(workload.failed)})"
    return f"{workload.name} (skipped)" if workload.skipped else workload.name


def _notes(run: Run) -> Iterator[str]:
    yield from run.notes
    for workload in run.workloads:
        if workload.skipped:
            yield f"{workload.name}: skipped, {workload.skipped}"
        yield from (f"{workload.name}: {note}" for note in workload.notes)
        turns = [value for name, value in workload.figures.items() if name.startswith("ttft_turn")]
        if turns:
            cached = workload.figures.get("cached_share")
            share = "" if cached is None else f"; {cached:.0%} of the prompt tokens were cached"
            yield f"{workload.name}: TTFT by turn {', '.join(map(_seconds, turns))}{share}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def summary(run: Run) -> dict[str, Any]:
    """The run without its requests, for programs."""
    workloads: list[dict[str, Any]] = [
        {
            "name": workload.name,
            "kind": workload.kind,
            "requests": len(workload.requests),
            "failed": len(workload.failed),
            "skipped": workload.skipped,
            "figures": workload.figures,
            "acceptance": workload.acceptance.rate if workload.acceptance else None,
            "tokens_per_step": workload.acceptance.tokens_per_step if workload.acceptance else None,
            "notes": workload.notes,
        }
        for workload in run.workloads
    ]
    failures = [
        {"reason": reason, "status": status, "times": count, "message": message}
        for reason, status, message, count in failure_counts(run.failed)
    ]
    return {
        "success": run.is_success,
        "requests": _num_requests(run),
        "failed": len(run.failed),
        "failures": failures,
        "interrupted": run.interrupted,
        "server": {"url": run.server.url, "model": run.server.model, "kind": run.server.kind},
        "started": run.started,
        "duration_s": run.duration_s,
        "sensed": None if run.sensed is None else asdict(run.sensed),
        "workloads": workloads,
    }
