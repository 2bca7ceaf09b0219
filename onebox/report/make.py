"""Assembles a report: title, failures, sections, and the origin of the data."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onebox.report.bench import bench_failures, bench_sections
from onebox.report.ceiling import Ceiling, roofline_section
from onebox.report.document import Block, Cell, ReportSection, Sentence, Table
from onebox.report.evaluation import eval_failures, eval_sections
from onebox.report.html import page
from onebox.report.markdown import text
from onebox.report.source import ResultFile, pointer

__all__ = ["RenderedReport", "make_report"]


@dataclass(frozen=True)
class RenderedReport:
    """A report in both formats."""

    html: str
    markdown: str


def make_report(sources: Sequence[ResultFile], title: str = "", ceiling: Ceiling | None = None) -> RenderedReport:
    """One report over all runs of `onebox bench` and `onebox eval`."""
    named = _told_apart(sources)
    bench = [source for source in named if not source.is_eval]
    sections = [ReportSection("Failures", tuple(_failures(named)))]
    for source in named:
        if source.is_eval:
            sections += eval_sections(source)
    sections += bench_sections(bench)
    if bench and ceiling is not None:
        sections += roofline_section(bench, ceiling)
    sections.append(ReportSection("Origin of the data", tuple(_provenance(named))))
    heading = title or f"onebox: {', '.join(source.name for source in named)}"
    return RenderedReport(page(heading, sections), text(heading, sections))


def _told_apart(sources: Sequence[ResultFile]) -> list[ResultFile]:
    """Files with the same name are named by their paths."""
    names = [source.name for source in sources]
    return [
        ResultFile(source.path, source.path, source.sha256, source.body) if names.count(source.name) > 1 else source
        for source in sources
    ]


def _failures(sources: Sequence[ResultFile]) -> Iterator[Block]:
    found = [block for source in sources for block in (eval_failures if source.is_eval else bench_failures)(source)]
    yield from found or [Sentence("Nothing failed.")]


def _provenance(sources: Sequence[ResultFile]) -> Iterator[Block]:
    yield Sentence(
        "Every figure above links to its file and its key: hover over it or follow the link. The files hold every "
        "request and answer.",
        is_note=True,
    )
    for source in sources:
        rows: list[tuple[Cell, ...]] = [("file", source.path), ("sha256", source.sha256)]
        rows += [(key, source.value(pointer(key))) for key in ("format", "started", "commit")]
        rows.append(("command", " ".join(source.body["command"])))
        for part in ("versions", "hardware"):
            rows += [(f"{part}: {key}", source.value(pointer(part, key))) for key in source.body[part]]
        rows += _servers(source)
        for key, value in source.body["config"].items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((f"config: {key}", shown))
        yield Table((source.name, ""), tuple(rows))


def _servers(source: ResultFile) -> Iterator[tuple[Cell, ...]]:
    places = [("server", "/server")]
    if source.is_eval:
        places = [(side["target"]["name"], f"/sides/{index}/server") for index, side in enumerate(source.body["sides"])]
    for name, place in places:
        for key in source.at(place) or {}:
            yield f"{name}: {key}", source.value(place + pointer(key))
