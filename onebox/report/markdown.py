"""A report as Markdown. A figure is a link to its file with the key as the link's title; plots are in HTML only."""

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from onebox.report.document import Block, Cell, Plot, ReportSection, Sentence, Table
from onebox.report.source import Value

__all__ = ["text"]


def text(title: str, sections: Sequence[ReportSection]) -> str:
    lines = [f"# {_plain(title)}"]
    for section in sections:
        lines += ["", f"## {_plain(section.title)}"]
        for block in section.blocks:
            lines += ["", *_block(block)]
    return "\n".join(lines) + "\n"


def _block(block: Block) -> Iterator[str]:
    match block:
        case Sentence(words, is_alarm, _):
            yield f"**{_plain(words)}**" if is_alarm else _plain(words)
        case Table(columns, rows):
            yield _row(columns)
            yield _row(["---"] * len(columns))
            for row in rows:
                yield _row([_cell(cell) for cell in row])
        case Plot(_, caption):
            yield f"*Plot in the HTML report: {_plain(caption)}*"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Value):
        return _plain(cell)
    key = cell.key.replace("\\", "\\\\").replace('"', '\\"')
    return f'[{_plain(cell.text)}]({quote(cell.file)} "{key}")'


def _plain(words: str) -> str:
    """Escapes Markdown syntax and cell separators."""
    shown = " ".join(words.split())
    for mark in "\\|*_`[]<>":
        shown = shown.replace(mark, f"\\{mark}")
    return shown
