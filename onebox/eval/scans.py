"""Documents as noisy scans, to be read back: invoices and signature circulars, in three languages, at three levels.

A page is drawn as `ocr.py` draws it, stamped with a round stamp whose text runs along the ring, laid askew on a dark
plate, shaded, blurred, speckled and saved as JPEG. Everything depends on the seed alone; what is asked for is what was
drawn. PIL is imported on first use.
"""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from onebox.eval.circulars import SignatureCircular, make_circular
from onebox.eval.invoices import LANGUAGES, Invoice, make_invoice
from onebox.eval.ocr import drawn_page, font_file
from onebox.eval.question import Check, Json, Question, Truth, TruthKind

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["LEVELS", "Scan", "ScanNoise", "make_scan", "ring_text", "scan_questions", "upper"]

_STAMP_RADIUS, _STAMP_LETTER, _STAMP_MARGIN = 105, 20, 135
_STAMP_INKS = ((38, 52, 150), (150, 30, 45), (60, 40, 120))
_PLATE, _PAPER = 70, 246
_INVOICE_KEYS = ("invoice_number", "vendor", "customer", "total")
_INVOICE_REQUEST = "Read this scanned invoice. Extract the following as JSON: {}. The total is a number; {}."
_CIRCULAR_REQUEST = "Read this scanned signature circular. Extract the following as JSON: {}. {}."
_STAMP_REQUEST = "stamp is the text around the ring of the round stamp"
_SIGNERS_REQUEST = (
    "signatories is a list of the two names; authority is joint if they sign together, sole if each may sign alone; "
    + _STAMP_REQUEST
)
_MAX_TOKENS = 500
_OFFICES = {
    "en": ("Tax Office Leeds", "County Court York", "Trade Registry Bath"),
    "hu": ("Adóhivatal Győr", "Kormányhivatal Pécs", "Cégbíróság Szűcsi"),
    "tr": ("Kadıköy Vergi Dairesi", "Üsküdar Vergi Dairesi", "Çankaya Vergi Dairesi"),
}


@dataclass(frozen=True)
class ScanNoise:
    """How bad a scan is: angles in degrees, lengths in pixels of a page 880 wide, depths as shares of brightness."""

    angle: float
    """Largest rotation of the page; at least half of it is used."""
    blur: float
    """Radius of the Gaussian blur."""
    shadow: float
    """Brightness lost in the darkest corner, and half of it along a fold."""
    grain: float
    """Standard deviation of the noise of each pixel, of 255."""
    specks: int
    """Grains of dust."""
    fade: float
    """Contrast lost between ink and paper."""
    quality: int
    """Of the JPEG."""


LEVELS = {
    "light": ScanNoise(angle=0.8, blur=0.5, shadow=0.12, grain=3, specks=20, fade=0.1, quality=80),
    "medium": ScanNoise(angle=2.0, blur=0.9, shadow=0.28, grain=8, specks=80, fade=0.25, quality=50),
    "heavy": ScanNoise(angle=4.0, blur=1.1, shadow=0.45, grain=13, specks=240, fade=0.35, quality=30),
}


@dataclass(frozen=True)
class Scan:
    """A page before and after: `clean` has text and stamp, `noisy` is the JPEG; `angle` turned it, in degrees."""

    clean: "Image"
    noisy: bytes
    angle: float
    lines: tuple[str, ...]
    truth: Json

    @property
    def url(self) -> str:
        return f"data:image/jpeg;base64,{base64.b64encode(self.noisy).decode()}"


def make_scan(document: Invoice | SignatureCircular, level: str, seed: int) -> Scan:
    """The document as a scan of this level; the stamp's text joins its truth as `stamp`."""
    rng, noise = Random(f"scan {seed} {document.language} {level}"), LEVELS[level]  # noqa: S311  # no secret
    if isinstance(document, Invoice):
        said = Random(f"stamp {seed}").choice(_OFFICES[document.language])  # noqa: S311  # the same at every level
    else:
        said = document.truth["notary"]
    stamp = upper(said, document.language)
    clean = _stamped(document.lines, stamp, Random(f"stamp {seed}"))  # noqa: S311
    angle = rng.choice((-1, 1)) * rng.uniform(noise.angle / 2, noise.angle)
    noisy = _scanned(clean, noise, angle, np.random.default_rng(rng.getrandbits(64)))
    return Scan(clean, noisy, angle, document.lines, {**document.truth, "stamp": stamp})


def upper(text: str, language: str) -> str:
    """Capital letters; in Turkish those of i and ı are İ and I."""
    return (text.replace("i", "İ").replace("ı", "I") if language == "tr" else text).upper()


def _stamped(lines: Sequence[str], text: str, rng: Random) -> "Image":
    """The drawn lines with a round stamp beside them or over the end of one; its ink darkens what it covers."""
    from PIL import Image, ImageChops

    page, side = drawn_page(lines), 2 * _STAMP_MARGIN
    mask = ring_text(text).rotate(rng.uniform(-18, 18), Image.Resampling.BICUBIC)
    wide = Image.new("RGB", (page.width + side - 100, max(page.height, side + 60)), (_PAPER,) * 3)
    wide.paste(page.convert("RGB").point(lambda value: value * _PAPER // 255), (0, 0))
    white = Image.new("RGB", mask.size, (255, 255, 255))
    layer = Image.new("RGB", wide.size, (255, 255, 255))
    ink = Image.composite(Image.new("RGB", mask.size, rng.choice(_STAMP_INKS)), white, mask)
    layer.paste(ink, _stamp_place(page, wide.size, rng))
    return ImageChops.multiply(wide, layer)


def _stamp_place(page: "Image", size: tuple[int, int], rng: Random) -> tuple[int, int]:
    """The upper left corner of the stamp: over the end of a line if one can be covered by its lower half, else beside.

    The text around the ring is in the upper half, where no line may cross it.
    """
    side, ink = 2 * _STAMP_MARGIN, np.asarray(page) < 128
    beside = (size[0] - side - rng.randint(0, 20), rng.randint(10, size[1] - side))
    rows = np.flatnonzero(ink.any(axis=1))
    overs = []
    for row in rows[np.diff(rows, prepend=-9) > 5]:
        end = int(np.flatnonzero(ink[row : row + 20].any(axis=0))[-1])
        left, top = end - rng.randint(35, 60), int(row) - _STAMP_MARGIN - rng.randint(15, 60)
        is_on_page = top >= 0 and top + side <= size[1]
        if is_on_page and not ink[top : top + _STAMP_MARGIN, left : left + side].any():
            overs.append((left, top))
    return rng.choice(overs) if overs else beside


def ring_text(text: str) -> "Image":
    """The mask of a stamp: two rings, and between them the text clockwise from the left over the top."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(font_file()), _STAMP_LETTER)
    mask = Image.new("L", (2 * _STAMP_MARGIN, 2 * _STAMP_MARGIN), 0)
    pen, middle = ImageDraw.Draw(mask), _STAMP_MARGIN
    for radius in (_STAMP_RADIUS + 24, _STAMP_RADIUS - 20):
        pen.ellipse((middle - radius, middle - radius, middle + radius, middle + radius), outline=220, width=3)
    spacing = 2.0
    lengths = [font.getlength(letter) + spacing for letter in text]
    angle = math.radians(270) - sum(lengths) / _STAMP_RADIUS / 2
    for letter, length in zip(text, lengths, strict=True):
        turn = angle + length / _STAMP_RADIUS / 2
        tile = Image.new("L", (48, 48), 0)
        ImageDraw.Draw(tile).text((24, 24), letter, fill=225, font=font, anchor="mm")
        tile = tile.rotate(-math.degrees(turn) - 90, Image.Resampling.BICUBIC)
        place = (middle + _STAMP_RADIUS * math.cos(turn) - 24, middle + _STAMP_RADIUS * math.sin(turn) - 24)
        mask.paste(255, (round(place[0]), round(place[1])), tile)
        angle += length / _STAMP_RADIUS
    return mask


def _scanned(page: "Image", noise: ScanNoise, angle: float, rng: np.random.Generator) -> bytes:
    from PIL import Image, ImageFilter

    turned = page.rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor=(_PLATE,) * 3)
    blurred = turned.filter(ImageFilter.GaussianBlur(noise.blur))
    pixels = np.asarray(blurred, dtype=np.float32)
    pixels = _PAPER - (_PAPER - pixels) * (1 - noise.fade)
    pixels *= _shadow(pixels.shape[0], pixels.shape[1], noise.shadow, rng)[:, :, None]
    for shape, share in (((*pixels.shape[:2], 1), 1.0), (pixels.shape, 0.3)):
        pixels += share * noise.grain * rng.standard_normal(shape, dtype=np.float32)
    rows, columns = (rng.integers(0, size - 2, noise.specks) for size in pixels.shape[:2])
    for row, column in zip(rows, columns, strict=True):
        pixels[row : row + 2, column : column + rng.integers(1, 3)] = rng.choice((40, 90, 250))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=noise.quality)
    return buffer.getvalue()


def _shadow(height: int, width: int, depth: float, rng: np.random.Generator) -> Any:
    """Brightness of each pixel: falls towards one corner, and along a fold across the page."""
    rows, columns = (np.linspace(0, 1, size, dtype=np.float32) for size in (height, width))
    rows, columns = (axis if rng.random() < 0.5 else 1 - axis for axis in (rows[:, None], columns[None, :]))
    corner = ((rows + columns) / 2) ** 2
    fold = np.exp(-(((rows - rng.uniform(0.3, 0.7) + 0.1 * (columns - 0.5)) / 0.02) ** 2))
    return 1 - depth * corner - depth / 2 * fold


def scan_questions(count: int, seed: int) -> list[Question]:
    """`count` scans: languages in turn, then levels; every fourth is a signature circular."""
    return [_question(number, seed + 3_000_000 + number) for number in range(count)]


def _question(number: int, seed: int) -> Question:
    language = LANGUAGES[number % len(LANGUAGES)]
    level = list(LEVELS)[number // len(LANGUAGES) % len(LEVELS)]
    if number % 4 == 3:
        scan = make_scan(make_circular(seed, language), level, seed)
        wanted, request = scan.truth, _CIRCULAR_REQUEST.format(", ".join(scan.truth), _SIGNERS_REQUEST)
    else:
        scan = make_scan(make_invoice(seed, language), level, seed)
        wanted = {key: scan.truth[key] for key in (*_INVOICE_KEYS, "stamp")}
        request = _INVOICE_REQUEST.format(", ".join(wanted), _STAMP_REQUEST)
    parts = [{"type": "image_url", "image_url": {"url": scan.url}}, {"type": "text", "text": request}]
    body = {"messages": [{"role": "user", "content": parts}]}
    truth = Truth(TruthKind.JSON, wanted, language)
    return Question(f"scans/{number:03d}", Check.SCANS, f"{language}, {level}", body, truth, _MAX_TOKENS)
