"""Documents rendered as images, to be read back; the truth is known from the generator.

The font is DejaVu Sans, which has every accent of the three languages. It ships with matplotlib, whose files are
located without importing it. PIL is imported on first use.
"""

import base64
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onebox.eval.invoices import LANGUAGES, Invoice, make_invoice
from onebox.eval.question import Check, Question, Truth, TruthKind
from onebox.spec.errors import UnsupportedError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["draw", "drawn_page", "font_file", "ocr_questions"]

_WIDTH, _MARGIN, _LINE, _LETTER = 720, 40, 34, 22
_KEYS = ("invoice_number", "vendor", "customer", "total")
_REQUEST = "Read this invoice. Extract the following as JSON: {}. The total is a number."
_MAX_TOKENS = 400


def draw(invoice: Invoice) -> bytes:
    """The invoice as a PNG."""
    buffer = io.BytesIO()
    drawn_page(invoice.lines).save(buffer, "PNG")
    return buffer.getvalue()


def drawn_page(lines: Sequence[str]) -> "Image.Image":
    """Black letters on white, in shades of grey."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(font_file()), _LETTER)
    picture = Image.new("L", (_WIDTH, 2 * _MARGIN + _LINE * len(lines)), 255)
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        pen.text((_MARGIN, _MARGIN + row * _LINE), line, fill=0, font=font)
    return picture


def font_file() -> Path:
    found = importlib.util.find_spec("matplotlib")
    path = Path(found.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf" if found and found.origin else None
    if path is None or not path.is_file():
        raise UnsupportedError("DejaVu Sans, which ships with matplotlib, was not found; documents cannot be drawn.")
    return path


def ocr_questions(count: int, seed: int) -> list[Question]:
    """`count` drawn invoices; four fields of each are requested."""
    return [_question(number, seed + 2_000_000 + number) for number in range(count)]


def _question(number: int, seed: int) -> Question:
    language = LANGUAGES[number % len(LANGUAGES)]
    invoice = make_invoice(seed, language)
    url = f"data:image/png;base64,{base64.b64encode(draw(invoice)).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": _REQUEST.format(", ".join(_KEYS))},
    ]
    truth = Truth(TruthKind.JSON, {key: invoice.truth[key] for key in _KEYS}, language)
    body = {"messages": [{"role": "user", "content": parts}]}
    return Question(f"ocr/{number:03d}", Check.OCR, language, body, truth, _MAX_TOKENS)
