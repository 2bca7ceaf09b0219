"""Questions about pictures with their right answers, by name, and how often training draws each.

Training draws with the seeds from 0 on and the fonts of `fonts/training`; the evaluation with the seeds from
HELD_OUT_SEED on, the fonts of `fonts/held-out` and passages of held-out documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from recipes.pocket.pictures.charts import draw_chart, draw_table
from recipes.pocket.pictures.drawing import Drawing
from recipes.pocket.pictures.fonts import FontShelf
from recipes.pocket.pictures.invoices import draw_invoice
from recipes.pocket.pictures.lines import draw_line, draw_paragraph, line_text
from recipes.pocket.pictures.scenes import draw_scene
from recipes.pocket.synthetic.example import Example, answer_json, json_value, text_is
from recipes.pocket.synthetic.invoice import ask_for_fields

__all__ = ["PAGES", "PICTURES", "SMALL", "PictureSource", "SeenExample"]


@dataclass(frozen=True)
class SeenExample:
    """An example whose one user message begins with a picture."""

    example: Example
    drawing: Drawing


@dataclass(frozen=True)
class PictureSource:
    """What pictures are drawn with."""

    shelf: FontShelf
    held_out: bool = False
    """Whether passages come from held-out documents."""


def _seen(drawing: Drawing, question: str, answer: Example) -> SeenExample:
    content = [{"type": "image"}, {"type": "text", "text": question}]
    messages = [*answer.messages[:-1], {"role": "user", "content": content}]
    return SeenExample(Example(messages, None, answer.answer, answer.check, answer.thinking), drawing)


_READ_LINE = (
    "Read the text.", "What does the picture say?", "Read this line.", "Transcribe the text in the picture.", "OCR",
    "Olvasd fel a képen lévő szöveget.", "Mi áll a képen?", "Resimdeki metni oku.", "Resimde ne yazıyor?",
)  # fmt: skip
_READ_PAGE = (
    "Read the whole picture line by line.", "Transcribe every line.", "Write down all the text in this picture.",
    "Read the document in the picture and write down every line of it, exactly as it stands.",
    "Írd le a kép összes sorát.", "Resimdeki bütün satırları yaz.",
)  # fmt: skip


def line(rng: Random, source: PictureSource) -> SeenExample:
    drawing, text = draw_line(rng, source.shelf, line_text(rng, held_out=source.held_out))
    return _read(rng, drawing, text, _READ_LINE)


def short_line(rng: Random, source: PictureSource) -> SeenExample:
    """A word or two: what is learned first."""
    drawing, text = draw_line(rng, source.shelf, line_text(rng, 2, 16, held_out=source.held_out))
    return _read(rng, drawing, text, _READ_LINE)


def paragraph(rng: Random, source: PictureSource) -> SeenExample:
    lines = [line_text(rng, 8, 28, held_out=source.held_out) for _ in range(rng.randint(2, 4))]
    drawing, lines = draw_paragraph(rng, source.shelf, lines)
    return _read(rng, drawing, "\n".join(lines), _READ_PAGE)


def page(rng: Random, source: PictureSource) -> SeenExample:
    lines = [line_text(rng, 12, 44, held_out=source.held_out) for _ in range(rng.randint(5, 12))]
    drawing, lines = draw_paragraph(rng, source.shelf, lines)
    return _read(rng, drawing, "\n".join(lines), _READ_PAGE)


def _read(rng: Random, drawing: Drawing, text: str, asks: tuple[str, ...]) -> SeenExample:
    question = rng.choice(asks)
    return _seen(drawing, question, Example.ask(question, text, text_is(text)))


def invoice_text(rng: Random, source: PictureSource) -> SeenExample:
    """All lines of an invoice: every character of the picture teaches."""
    drawn = draw_invoice(rng, source.shelf)
    return _read(rng, drawn.drawing, "\n".join(drawn.lines), _READ_PAGE)


def invoice(rng: Random, source: PictureSource) -> SeenExample:
    """An invoice as JSON."""
    drawn = draw_invoice(rng, source.shelf)
    keys, question, _ = ask_for_fields(rng, drawn.language)
    value = {key: drawn.facts[key] for key in keys}
    thought = f"{', '.join(keys)}." if rng.random() < 0.2 else ""
    return _seen(drawn.drawing, question, Example.ask(question, answer_json(value), json_value(value), thought))


def chart(rng: Random, source: PictureSource) -> SeenExample:
    drawing, values = draw_chart(rng, source.shelf)
    names = list(values)
    way = rng.random()
    if way < 0.5:
        question = rng.choice(("Give the values of the chart as JSON.", "Read the chart as JSON."))
        return _seen(drawing, question, Example.ask(question, answer_json(values), json_value(values)))
    if way < 0.8:
        name = rng.choice(names)
        question, answer = f"What is the value of {name}?", str(values[name])
    else:
        most = max(values.values())
        question = "Which one is the largest?"
        answer = next(name for name in names if values[name] == most)
    listed = ", ".join(f"{name} {value}" for name, value in values.items())
    thought = listed + "." if rng.random() < 0.5 else ""
    return _seen(drawing, question, Example.ask(question, answer, text_is(answer), thought))


def table(rng: Random, source: PictureSource) -> SeenExample:
    drawing, rows = draw_table(rng, source.shelf)
    value = {name: float(price) for name, price in rows.items()}
    if rng.random() < 0.6:
        question = rng.choice(
            ("Read the table as JSON.", "Give the table as a JSON object.", "Turn this table into JSON.")
        )
        return _seen(drawing, question, Example.ask(question, answer_json(value), json_value(value)))
    name = rng.choice(list(rows))
    question = rng.choice(("What is the price of {}?", "How much is {}?", "Mennyibe kerül: {}?", "{} kaç para?"))
    question = question.format(name)
    return _seen(drawing, question, Example.ask(question, rows[name], text_is(rows[name])))


def scene(rng: Random, _: PictureSource) -> SeenExample:
    drawing, shapes = draw_scene(rng)
    way = rng.random()
    described = "; ".join(f"a {shape.name} at the {shape.place}" for shape in shapes) + "."
    if way < 0.5:
        question = rng.choice(("Describe the picture.", "What do you see?", "What is in this picture?"))
        answer = described[0].upper() + described[1:]
    elif way < 0.75:
        question, answer = "How many shapes are there?", str(len(shapes))
    else:
        chosen = rng.choice(shapes)
        question, answer = f"What is at the {chosen.place}?", f"A {chosen.name}."
    thought = described if rng.random() < 0.3 and way >= 0.5 else ""
    return _seen(drawing, question, Example.ask(question, answer, text_is(answer), thought))


Maker = Callable[[Random, PictureSource], SeenExample]
PICTURES: dict[str, Maker] = {
    "line": line,
    "short line": short_line,
    "paragraph": paragraph,
    "page": page,
    "invoice text": invoice_text,
    "invoice picture": invoice,
    "chart": chart,
    "table": table,
    "scene": scene,
}
SMALL: dict[str, float] = {"line": 5.0, "short line": 2.0}
"""Workloads whose pictures are one line, and their shares in rows of such pictures."""
PAGES: dict[str, float] = {
    "paragraph": 1.5, "page": 1.0, "invoice text": 1.5, "invoice picture": 4.0,
    "chart": 0.8, "table": 0.8, "scene": 0.6,
}  # fmt: skip
"""The same for larger pictures."""
