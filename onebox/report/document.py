"""A report before rendering (HTML, Markdown): sections of sentences, tables and plots; cells are texts or figures."""

from dataclasses import dataclass, field

from onebox.report.source import Value

__all__ = ["Block", "Cell", "Plot", "ReportSection", "Sentence", "Table"]

Cell = Value | str


@dataclass(frozen=True)
class Sentence:
    """A line of text; an alarm is highlighted."""

    text: str
    is_alarm: bool = False
    is_note: bool = False


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Plot:
    """A plot as SVG with a caption; its figures are also in a table."""

    svg: str
    caption: str


Block = Sentence | Table | Plot


@dataclass(frozen=True)
class ReportSection:
    title: str
    blocks: tuple[Block, ...] = field(default=())
