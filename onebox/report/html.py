"""A report as one self-contained HTML page: inline style and plots, no scripts, no external URLs."""

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from onebox.report.document import Block, Cell, Plot, ReportSection, Sentence, Table
from onebox.report.source import Value

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light; --ink: #1d2127; --dim: #626a75; --line: #dfe2e6; --alarm: #b5413c; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; vertical-align: bottom; }
td { overflow-wrap: break-word; max-width: 46rem; }
th.figure, td.figure { text-align: right; }
td.figure { white-space: nowrap; }
data[title] { border-bottom: 1px dotted var(--dim); cursor: help; }
.alarm { color: #fff; background: var(--alarm); padding: .6rem .9rem; border-radius: 4px; font-weight: 600; }
.note, figcaption { color: var(--dim); font-size: .86rem; }
figure { margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, sections: Sequence[ReportSection]) -> str:
    """The complete page."""
    drawn = _Drawings()
    body = "\n".join(line for section in sections for line in _section(section, drawn))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _section(section: ReportSection, drawn: "_Drawings") -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    for block in section.blocks:
        yield _block(block, drawn)
    yield "</section>"


def _block(block: Block, drawn: "_Drawings") -> str:
    match block:
        case Sentence(text, is_alarm, is_note):
            style = ' class="alarm"' if is_alarm else ' class="note"' if is_note else ""
            return f"<p{style}>{escape(text)}</p>"
        case Table(columns, rows):
            return _table(columns, rows)
        case Plot(svg, caption):
            return f"<figure>\n{drawn.inlined(svg)}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    numeric = [_is_numeric(column) for column in zip(*rows, strict=True)]
    head = "".join(f"<th{_style(right)}>{escape(name)}</th>" for name, right in zip(columns, numeric, strict=True))
    lines = "\n".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in rows)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>"
    return f'<div class="wide">{table}</div>'


def _is_numeric(column: Sequence[Cell]) -> bool:
    found = [_is_number(cell.raw) for cell in column if isinstance(cell, Value)]
    return bool(found) and all(found)


def _cell(cell: Cell, is_number: bool) -> str:
    if not isinstance(cell, Value):
        return f"<td{_style(is_number)}>{escape(cell)}</td>"
    raw = repr(cell.raw) if _is_number(cell.raw) else str(cell.raw)
    shown = (
        f'<data value="{escape(raw)}" data-file="{escape(cell.file)}" data-key="{escape(cell.key)}" '
        f'title="{escape(cell.file)} {escape(cell.key)}">{escape(cell.text)}</data>'
    )
    return f"<td{_style(is_number)}>{shown}</td>"


def _style(is_number: bool) -> str:
    return ' class="figure"' if is_number else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Drawings:
    """Embeds plots in one page. All plots use the same element ids, so each gets its own prefix."""

    def __init__(self) -> None:
        self._count = 0

    def inlined(self, svg: str) -> str:
        self._count += 1
        prefix = f"p{self._count}-"
        named = re.sub(r'\bid="', f'id="{prefix}', svg)
        named = re.sub(r'href="#', f'href="#{prefix}', named)
        return re.sub(r"url\(#", f"url(#{prefix}", named)
