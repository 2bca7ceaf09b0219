"""Pictures of invoices: to be turned into JSON, or to be read line by line."""

from collections.abc import Sequence
from random import Random
from typing import Any

from recipes.pocket.pictures.drawing import INK, Drawing, Sheet, round_up
from recipes.pocket.pictures.fonts import FontShelf, SizedFont
from recipes.pocket.pictures.lines import drawable, open_font
from recipes.pocket.synthetic.invoice import LABELS, InvoiceStyle, invoice_facts, invoice_style
from recipes.pocket.synthetic.words import LANGUAGES

__all__ = ["DrawnInvoice", "draw_invoice"]

_MAX_WIDTH, _MAX_HEIGHT = 576, 448
"""So that a picture has at most 1,008 patches, 252 tokens."""


class DrawnInvoice:
    """A picture with the fields that it shows, its language, and its lines from top to bottom."""

    def __init__(self, drawing: Drawing, facts: dict[str, Any], language: str, lines: list[str]) -> None:
        self.drawing, self.facts, self.language, self.lines = drawing, facts, language, lines


def draw_invoice(rng: Random, shelf: FontShelf, ordinary: float = 0.5) -> DrawnInvoice:
    """An invoice in one of the three languages; `ordinary` is the share of companies named by ordinary words."""
    language = rng.choice(LANGUAGES)
    style = invoice_style(rng, language)
    facts, items, percent = invoice_facts(rng, style, ordinary)
    fields = _fields(rng, style, facts, percent)
    table = [(name, str(count), style.amount(each), style.amount(count * each)) for name, count, each in items]
    text = "".join(part for row in [*fields["head"], *fields["sums"], *table] for part in row) + fields["title"]
    size = rng.choice((14, 15, 15, 16, 16, 17, 18))
    font = open_font(rng, shelf, text, size)
    while size > 12 and _width(font, fields, table) > _MAX_WIDTH - 16:
        size -= 1
        font = open_font(rng, shelf, text, size)
    layout = _Layout(rng, font, fields, table)
    return DrawnInvoice(layout.draw(), facts, language, layout.lines)


def _fields(rng: Random, style: InvoiceStyle, facts: dict[str, Any], percent: int) -> dict[str, Any]:
    """The title, and pairs of label and value above and below the items."""

    def labelled(field: str, text: str) -> tuple[str, str]:
        return rng.choice(LABELS[field][style.language]), text

    net, tax = facts["_cents"]
    head = [
        labelled("vendor", facts["vendor"]),
        labelled("customer", facts["customer"]),
        labelled("invoice_number", facts["invoice_number"]),
        labelled("date", style.write_date(facts["_issued"])),
        labelled("due_date", style.write_date(facts["_due"])),
        labelled("tax_id", facts["tax_id"]),
        labelled("email", facts["email"]),
    ]
    if rng.random() < 0.5:
        rng.shuffle(head)
    tax_label, tax_amount = labelled("tax", style.amount(tax))
    sums = [
        labelled("subtotal", style.amount(net)),
        (f"{tax_label} ({percent}%)", tax_amount),
        labelled("total", style.amount(net + tax)),
    ]
    return {"title": rng.choice(LABELS["title"][style.language]), "head": head, "sums": sums}


def _columns(font: SizedFont, table: Sequence[tuple[str, ...]]) -> list[float]:
    return [max(font.width(drawable(row[place], font)) for row in table) for place in range(4)]


def _width(font: SizedFont, fields: dict[str, Any], table: Sequence[tuple[str, ...]]) -> float:
    longest = max(
        font.width(drawable(f"{label}: {value}", font)) for label, value in [*fields["head"], *fields["sums"]]
    )
    return max(longest, sum(_columns(font, table)) + 3 * font.size)


class _Layout:
    """Places everything on a sheet, line by line."""

    def __init__(self, rng: Random, font: SizedFont, fields: dict[str, Any], table: Sequence[tuple[str, ...]]) -> None:
        self._rng, self._font, self._fields, self._table = rng, font, fields, table
        self.lines: list[str] = []
        num_lines = 1 + len(fields["head"]) + len(table) + len(fields["sums"])
        natural = font.ascent + font.descent
        room = (_MAX_HEIGHT - 40) // num_lines
        self._step = max(min(natural, room), min(room, natural + rng.randint(0, 10)))
        self._left, self._top = rng.randint(4, 24), rng.randint(3, 14)
        gaps = 16
        width = min(_MAX_WIDTH, self._left + _width(font, fields, table) + rng.randint(4, 90))
        self._sheet = Sheet(round_up(width), min(_MAX_HEIGHT, round_up(self._top + num_lines * self._step + gaps)))
        self._gap = (self._sheet.height - self._top - num_lines * self._step) // 3

    def draw(self) -> Drawing:
        rng, sheet = self._rng, self._sheet
        y = self._top
        title = drawable(self._fields["title"], self._font)
        centred = rng.random() < 0.4
        sheet.write((sheet.width - self._font.width(title)) / 2 if centred else self._left, y, title, self._font)
        self.lines.append(title)
        y = self._pairs(self._fields["head"], y + self._step, aligned=rng.random() < 0.35) + max(0, self._gap)
        if rng.random() < 0.5:
            sheet.draw.line((self._left, y - 3, sheet.width - self._left, y - 3), fill=INK // rng.choice((1, 2)))
        y = self._items(y) + max(0, self._gap)
        self._pairs(self._fields["sums"], y, aligned=rng.random() < 0.5)
        return sheet.finish(rng)

    def _pairs(self, pairs: list[tuple[str, str]], y: int, *, aligned: bool) -> int:
        """Label and value of each pair on a line; aligned values begin in one column, if there is room."""
        column = max(self._font.width(drawable(label + ":  ", self._font)) for label, _ in pairs)
        longest = max(self._font.width(drawable(value, self._font)) for _, value in pairs)
        aligned = aligned and self._left + column + longest < self._sheet.width
        for label, value in pairs:
            label, value = drawable(f"{label}:", self._font), drawable(value, self._font)
            at = self._sheet.write(self._left, y, label, self._font)
            self._sheet.write(self._left + column if aligned else at + self._font.width(" "), y, value, self._font)
            self.lines.append(f"{label} {value}")
            y += self._step
        return y

    def _items(self, y: int) -> int:
        columns = _columns(self._font, self._table)
        for row in self._table:
            x: float = self._left
            parts = [drawable(part, self._font) for part in row]
            for place, part in enumerate(parts):
                space = columns[place] - self._font.width(part) if place else 0
                self._sheet.write(x + space, y, part, self._font)
                x += columns[place] + self._font.size
            self.lines.append(" ".join(parts))
            y += self._step
        return y
