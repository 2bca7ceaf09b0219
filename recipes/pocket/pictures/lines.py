"""Pictures of one to three lines of text, to be read word for word."""

from random import Random

from recipes.pocket.pictures.drawing import CELL, Drawing, Sheet, round_up
from recipes.pocket.pictures.fonts import CHARACTERS, FontShelf, SizedFont
from recipes.pocket.synthetic.filler import passage
from recipes.pocket.synthetic.words import LANGUAGES, company, number_name, person, pick

__all__ = ["draw_line", "draw_paragraph", "line_text"]

_SIZES = (13, 14, 15, 16, 17, 18, 19, 20, 22, 24)


def line_text(rng: Random, least: int = 20, most: int = 60, *, held_out: bool = False) -> str:
    """`least` to `most` characters: a piece of a document, names and words, random characters."""
    wanted = rng.randint(least, most)
    language = rng.choice(LANGUAGES)
    way = rng.random()
    if way < 0.5:
        text = " ".join(passage(rng, 4 * most, held_out=held_out).split())
        text = text[text.find(" ") + 1 :]
    elif way < 0.8:
        text = " ".join(_word(rng, language) for _ in range(12))
    else:
        text = "".join(rng.choice(CHARACTERS[:95]) for _ in range(most))
    text = " ".join("".join(c for c in text if c in CHARACTERS).split())
    while len(text) < least:
        text = f"{text} {_word(rng, language)}".strip()
    cut = text[:wanted]
    if len(text) > wanted and " " in cut[least:]:
        cut = cut[: cut.rindex(" ")]
    return cut.strip() or text[:least]


def _word(rng: Random, language: str) -> str:
    way = rng.random()
    if way < 0.5:
        return pick(rng, language)
    if way < 0.65:
        return person(rng, language)
    if way < 0.8:
        return company(rng, language)
    if way < 0.9:
        return number_name(rng)
    return f"{rng.randrange(10 ** rng.randint(1, 6)) / rng.choice((1, 10, 100)):,}"


def open_font(rng: Random, shelf: FontShelf, text: str, size: int) -> SizedFont:
    """A font of the shelf that has all of the text's characters, or the last that was tried."""
    for _ in range(12):
        font = shelf.open(rng.randrange(len(shelf.paths)), size)
        if font.can_draw(text):
            break
    return font


def drawable(text: str, font: SizedFont) -> str:
    return "".join(c for c in text if c in font.widths)


def draw_line(rng: Random, shelf: FontShelf, text: str) -> tuple[Drawing, str]:
    """The text on one line, and what the picture shows of it."""
    font = open_font(rng, shelf, text, rng.choice(_SIZES))
    text = drawable(text, font)
    sheet = Sheet(round_up(font.width(text) + rng.randint(4, 30)), CELL)
    room_x, room_y = sheet.width - font.width(text), CELL - font.ascent - font.descent
    sheet.write(rng.uniform(1, max(1, room_x - 1)), room_y / 2 + rng.uniform(-2, 2), text, font)
    return sheet.finish(rng), text


def draw_paragraph(rng: Random, shelf: FontShelf, lines: list[str]) -> tuple[Drawing, list[str]]:
    """Lines one below the other."""
    font = open_font(rng, shelf, "".join(lines), rng.choice((14, 15, 16, 17, 18, 20)))
    lines = [drawable(line, font) for line in lines]
    step = font.ascent + font.descent + rng.randint(0, 10)
    left, top = rng.randint(3, 20), rng.randint(2, 12)
    width = max(font.width(line) for line in lines) + left + 4
    sheet = Sheet(round_up(width), round_up(top + step * len(lines)))
    for number, line in enumerate(lines):
        sheet.write(left, top + number * step, line, font)
    return sheet.finish(rng), lines
