"""Plots by matplotlib, as SVG for embedding in a page. The only module that imports matplotlib.

Every plot is a function from numbers to SVG. Text stays text, so that a page can be searched; the output does not
depend on time or machine, so that the same numbers give the same bytes.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

__all__ = ["Point", "Roof", "distributions", "grouped_bars", "intervals", "roofline", "stacked_bar"]

_COLOURS = ("#3b6ea5", "#d98032", "#4f9d69", "#a4508b", "#8a8f98", "#b5413c", "#5aa7a7", "#c2a83e")
_WIDTH = 8.0
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e5e8",
}


@dataclass(frozen=True)
class Point:
    """A value with its lower and upper end; both equal the value if there is no range."""

    middle: float
    low: float
    high: float


def grouped_bars(
    labels: Sequence[str], series: Mapping[str, Sequence[Point | None]], axis: str, *, is_log: bool = False
) -> str:
    """One group per label and one horizontal bar per series, with whiskers from low to high.

    On a logarithmic axis dots replace bars, because bar length has no meaning there.
    """
    thickness = 0.8 / max(1, len(series))
    figure, axes = _figure(0.9 + 0.26 * len(labels) * max(1, len(series)) ** 0.7)
    for number, (name, points) in enumerate(series.items()):
        places = [row + (number - (len(series) - 1) / 2) * thickness for row in range(len(labels))]
        shown = [(place, point) for place, point in zip(places, points, strict=True) if point is not None]
        rows, middles = [place for place, _ in shown], [point.middle for _, point in shown]
        colour = _COLOURS[number % len(_COLOURS)]
        _whiskers(axes, shown, colour if is_log else "#30343a")
        if is_log:
            axes.plot(middles, rows, "o", color=colour, markersize=5, label=name)
        else:
            axes.barh(rows, middles, thickness * 0.92, color=colour, label=name)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(axis)
    axes.grid(axis="y", visible=is_log)
    if is_log:
        _make_log(axes, "x")
    if len(series) > 1:
        _legend(figure, len(series))
    return _svg(figure)


def _whiskers(axes: Axes, shown: Sequence[tuple[float, Point]], colour: str) -> None:
    spread = [(place, point) for place, point in shown if point.low < point.high]
    if not spread:
        return
    below = [max(0.0, point.middle - point.low) for _, point in spread]
    above = [max(0.0, point.high - point.middle) for _, point in spread]
    middles, places = [point.middle for _, point in spread], [place for place, _ in spread]
    axes.errorbar(middles, places, xerr=[below, above], fmt="none", ecolor=colour, elinewidth=1, capsize=2, zorder=3)


def _make_log(axes: Axes, which: str) -> None:
    """A logarithmic axis with plain numbers: 0.2 rather than a power of ten."""
    chosen = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    chosen.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=12))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    chosen.set_minor_locator(NullLocator())


def _legend(figure: Figure, count: int) -> None:
    figure.legend(loc="outside upper left", frameon=False, ncols=min(count, 4), fontsize=8)


def intervals(labels: Sequence[str], points: Sequence[Point], axis: str, neutral: float) -> str:
    """One dot with its interval per row, and a line at the value that means "no difference"."""
    figure, axes = _figure(0.9 + 0.3 * len(labels))
    axes.axvline(neutral, color="#8a8f98", linewidth=1)
    for row, point in enumerate(points):
        holds = point.low <= neutral <= point.high
        colour = _COLOURS[4] if holds else _COLOURS[5]
        axes.plot([point.low, point.high], [row, row], color=colour, linewidth=2)
        axes.plot([point.middle], [row], "o", color=colour, markersize=5)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(axis)
    return _svg(figure)


def distributions(samples: Mapping[str, Sequence[float]], axis: str) -> str:
    """Cumulative distribution of each sample."""
    figure, axes = _figure(3.4)
    for number, (name, values) in enumerate(samples.items()):
        ordered = sorted(values)
        shares = [index / len(ordered) for index in range(len(ordered) + 1)]
        colour, style = _COLOURS[number % len(_COLOURS)], ("-", "--", ":")[number // len(_COLOURS) % 3]
        axes.step([ordered[0], *ordered], shares, where="post", label=name, color=colour, linestyle=style)
    if min(value for values in samples.values() for value in values) > 0:
        _make_log(axes, "x")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(axis)
    axes.set_ylabel("share at or below")
    _legend(figure, len(samples))
    return _svg(figure)


def stacked_bar(parts: Mapping[str, Mapping[str, float]], axis: str) -> str:
    """One stacked horizontal bar per row; parts with the same name have the same colour."""
    names = list(dict.fromkeys(name for row in parts.values() for name in row))
    figure, axes = _figure(1.5 + 0.5 * len(parts))
    for row, sizes in enumerate(parts.values()):
        left = 0.0
        for name, size in sizes.items():
            number = names.index(name)
            axes.barh(row, size, 0.6, left=left, color=_COLOURS[number % len(_COLOURS)], hatch="//" * (number // 8))
            left += size
    for number, name in enumerate(names):
        axes.barh([0], [0], color=_COLOURS[number % len(_COLOURS)], hatch="//" * (number // 8), label=name)
    axes.set_yticks(range(len(parts)), list(parts))
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlabel(axis)
    axes.grid(axis="y", visible=False)
    _legend(figure, len(names))
    return _svg(figure)


@dataclass(frozen=True)
class Roof:
    """Limits of a box: bytes and operations per second."""

    name: str
    bytes_per_second: float
    flops: float | None


def roofline(roofs: Sequence[Roof], points: Mapping[str, tuple[float, float]], axis: str) -> str:
    """Operations per second over operations per byte, both logarithmic; points are (op per byte, op per second)."""
    figure, axes = _figure(3.8)
    intensities = [point[0] for point in points.values()]
    low, high = min(intensities) / 4, max(intensities) * 4
    knees = [roof.flops / roof.bytes_per_second for roof in roofs if roof.flops]
    high = max([high, *(2 * knee for knee in knees)])
    grid = [low * (high / low) ** (step / 60) for step in range(61)]
    for number, roof in enumerate(roofs):
        limits = [min(roof.bytes_per_second * place, roof.flops or math.inf) for place in grid]
        axes.plot(grid, limits, color=_COLOURS[4], linestyle=("-", "--")[number % 2], label=roof.name)
    for number, (name, (intensity, rate)) in enumerate(points.items()):
        axes.plot([intensity], [rate], "o", color=_COLOURS[number % len(_COLOURS)], label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte of a step")
    axes.set_ylabel(axis)
    _legend(figure, 2)
    return _svg(figure)


def _figure(height: float) -> tuple[Figure, Axes]:
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, max(1.6, height)), layout="constrained")
        return figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    """The SVG without the XML preamble. Element ids depend only on the content."""
    buffer = io.StringIO()
    with rc_context({**_STYLE, "svg.hashsalt": "onebox"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return re.sub(r"[ \t]+\n", "\n", text[text.index("<svg") :])
