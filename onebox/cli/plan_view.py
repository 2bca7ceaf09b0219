"""`onebox plan`'s report as text: tables of 100 columns."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from onebox.planner.report import PlanReport

__all__ = ["render"]

GIB = 1024**3
BAR_CELLS = 24


def render(report: "PlanReport") -> "list[RenderableType]":
    """The readable report: about 50 lines of 100 columns."""
    from rich.text import Text

    weights, box = report.weights, report.box
    shared = "unified memory" if box.unified else "its own memory"
    title = Text.assemble((weights.model, "bold"), " on ", (box.name, "bold"), f" ({box.device}, {shared})")
    lines: list[RenderableType] = [title, Text(f"weights: {weights.source}", style="dim")]
    # Titles are lines of their own: a table's own title would wrap at the table's width.
    for heading, table in (
        ("Memory", _memory_table(report)),
        ("What fits: tokens of KV, and sequences at once of each length", _fit_table(report)),
        (_traffic_heading(report), _traffic_table(report)),
        ("Speed, projected, tok/s over all streams", _speed_table(report)),
    ):
        lines += [Text(f"\n{heading}", style="bold cyan"), table]
    lines.append(Text(f"assumes {'; '.join(report.assumptions)}", style="dim"))
    if report.depths and report.projections[-1].workload.drafter:
        lines += [Text(f"\n{_depths_heading(report)}", style="bold cyan"), _depths_table(report)]
    if report.prompts:
        lines += [Text(f"\n{_prompts_heading(report)}", style="bold cyan"), _prompts_table(report)]
    lines.append(Text.assemble(("Binds ", "bold cyan"), report.projections[-1].binds))
    return lines + [Text(f"note: {note}", style="yellow") for note in report.notes]


def _table() -> "Table":
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")


def _memory_table(report: "PlanReport") -> "Table":
    memory = report.memory
    table = _table()
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("", width=BAR_CELLS, no_wrap=True)
    table.add_column("", style="dim")
    total = report.box.memory_bytes
    for part in memory.parts:
        if part.name == "unused" and part.bytes < 0.005 * GIB:
            continue
        table.add_row(part.name, f"{part.bytes / GIB:.2f}", _bar(part.bytes / total), part.note)
    table.add_row("total", f"{total / GIB:.2f}", "", report.box.memory_source, style="bold")
    return table


def _fit_table(report: "PlanReport") -> "Table":
    chosen = report.memory.request.kv
    table = _table()
    for name in ("KV cache", "bytes a token", "tokens"):
        table.add_column(name, justify="left" if name == "KV cache" else "right")
    for length in report.fits[0].users:
        table.add_column(f"at {length:,}", justify="right")
    for fit in report.fits:
        marked = fit.kv == chosen
        figures = ["does not fit" if users is None else f"{users:,}" for users in fit.users.values()]
        tokens = "-" if fit.kv_tokens is None else f"{fit.kv_tokens:,}"
        name = f"{fit.kv.name} (chosen)" if marked else fit.kv.name
        table.add_row(name, f"{fit.bytes_per_token:,}", tokens, *figures, style="bold" if marked else "")
    return table


def _traffic_heading(report: "PlanReport") -> str:
    workload = report.projections[-1].workload
    many = f"{workload.streams} stream{'s' if workload.streams > 1 else ''}"
    kind = "block" if workload.drafter else "MTP"
    drafts = f", {workload.drafts} {kind} drafts" if workload.drafts else ""
    context = f"{workload.context_tokens:,} tokens of context"
    return f"GB a step: {many}{drafts}, {context}; and this engine with one lever changed"


def _traffic_table(report: "PlanReport") -> "Table":
    projection = report.projections[-1]
    rate = projection.engine_rate
    table = _table()
    for name in ("part", "least", "expected", "now", "instead", "saves", "tok/s" if rate else "ms a step"):
        table.add_column(name, justify="left" if name in ("part", "now", "instead") else "right")
    for least, expected in zip(projection.least.parts, projection.expected.parts, strict=True):
        if expected.bytes < 0.5e6:  # would print as 0.000: the embedding's few rows, or no context
            continue
        levers = [lever for lever in report.levers if lever.part == least.name]
        now = levers[0].now if levers else _format_of(report, least.name)
        left = (least.name, f"{least.bytes / 1e9:.3f}", f"{expected.bytes / 1e9:.3f}", now)
        if not levers:
            table.add_row(*left)
        for lever in levers:
            speed = _speed(lever.tokens_per_second, lever.step_seconds)
            table.add_row(*left, lever.instead, f"{lever.saved_bytes / 1e9:+.3f}", speed)
            left = ("", "", "", "")
    totals = [f"{traffic.total_bytes / 1e9:.3f}" for traffic in (projection.least, projection.expected)]
    speed = _speed(rate.tokens_per_second if rate else None, projection.engine_step_seconds)
    table.add_row("total", *totals, "as planned", "", "", speed, style="bold")
    return table


def _format_of(report: "PlanReport", part: str) -> str:
    """The format of a part without a lever; nothing where it has none."""
    from onebox.planner.levers import class_of_part

    kind = class_of_part(part)
    return "" if kind is None else report.weights.formats.get(kind, "")


def _speed(tokens_per_second: float | None, step_seconds: float | None) -> str:
    """Tokens a second, or without an acceptance the milliseconds of a step."""
    if tokens_per_second is not None:
        return f"{tokens_per_second:,.1f}"
    return "-" if step_seconds is None else f"{step_seconds * 1e3:,.1f}"


def _speed_table(report: "PlanReport") -> "Table":
    box = report.box
    table = _table()
    table.add_column("")
    table.add_column("tokens a step", justify="right")
    for name, bandwidth in (("limit", box.peak), ("expected", box.usable)):
        at = "bandwidth unknown" if bandwidth is None else f"at {bandwidth.bytes_per_second / 1e9:,.0f} GB/s"
        table.add_column(f"{name} {at}", justify="right")
    table.add_column("this engine", justify="right")
    for projection in report.projections:
        workload = projection.workload
        kind = "DFlash" if workload.drafter else "MTP"
        name = f"{kind}, {workload.drafts} drafts" if workload.drafts else "plain"
        rates = (projection.limit, projection.expected_rate, projection.engine_rate)
        cells = [
            "-" if rate is None else f"{rate.tokens_per_second:,.1f}  ({rate.step_seconds * 1e3:.1f} ms)"
            for rate in rates
        ]
        table.add_row(name, f"{workload.streams * workload.tokens_per_step:.2f}", *cells)
    return table


def _depths_heading(report: "PlanReport") -> str:
    from onebox.planner.depths import best_depth

    best, asked = best_depth(report.depths), report.depths[-1]
    gain = best.tokens_per_second / asked.tokens_per_second - 1
    brings = f"{gain:.0%} over {asked.drafts}" if gain >= 0.005 else "nothing to gain"
    return f"This engine by depth on this acceptance: best with {best.drafts} drafts, {brings}"


def _depths_table(report: "PlanReport") -> "Table":
    table = _table()
    table.add_column("drafts")
    for rate in report.depths:
        table.add_column(str(rate.drafts), justify="right")
    table.add_row("tokens a step", *[f"{rate.tokens_per_step:.2f}" for rate in report.depths])
    table.add_row("ms a step", *[f"{rate.step_seconds * 1e3:.0f}" for rate in report.depths])
    table.add_row("tok/s", *[f"{rate.tokens_per_second:.1f}" for rate in report.depths])
    return table


def _prompts_heading(report: "PlanReport") -> str:
    step, disk = report.memory.request.max_batched_tokens, report.disk_bytes_per_second / 1e9
    return f"First tokens, projected for this engine, {step:,} prompt tokens a step; a disk of {disk:g} GB/s"


def _prompts_table(report: "PlanReport") -> "Table":
    from onebox.planner.prompts import NEW_TOKENS

    table = _table()
    table.add_column("prompt")
    for times in report.prompts:
        table.add_column(f"{times.num_tokens:,} tokens", justify="right")
    cold = [f"{times.cold_seconds:,.2f} s  ({times.tokens_per_second:,.0f}/s)" for times in report.prompts]
    table.add_row("nothing cached", *cold)
    table.add_row(f"all but {NEW_TOKENS} cached", *[f"{times.cached_seconds:,.2f} s" for times in report.prompts])
    disk = [f"{prefix.first_token_seconds:,.2f} s  ({prefix.num_bytes / 1e9:.2f} GB)" for prefix in report.prefixes]
    missing = [""] * (len(report.prompts) - len(disk))
    table.add_row("the same on disk", *missing, *disk)
    return table
