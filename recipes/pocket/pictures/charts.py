"""Pictures of bar and line charts, and of tables, with the numbers that they show."""

from random import Random

from recipes.pocket.pictures.drawing import COLOURS, FIRST_COLOUR, INK, Drawing, Sheet, round_up
from recipes.pocket.pictures.fonts import FontShelf
from recipes.pocket.pictures.lines import drawable, open_font
from recipes.pocket.synthetic.words import CITIES, GOODS, LANGUAGES, MONTHS, WORDS

__all__ = ["draw_chart", "draw_table"]

_SIDE = 256


def _names(rng: Random, count: int) -> list[str]:
    language = rng.choice(LANGUAGES)
    words = rng.choice((CITIES[language], [month[:3] for month in MONTHS[language]], WORDS[language]))
    words = [word for word in words if len(word) <= 8]
    return rng.sample(words, min(count, len(words)))


def draw_chart(rng: Random, shelf: FontShelf) -> tuple[Drawing, dict[str, int]]:
    """A chart of 256 x 256 pixels with 2 to 5 values, each written beside its bar or point."""
    names = _names(rng, rng.randint(2, 5))
    font = open_font(rng, shelf, "".join(names) + "0123456789", rng.choice((13, 14, 15)))
    names = list(dict.fromkeys(drawable(name, font)[: int(230 / len(names) / font.size * 1.9)] for name in names))
    values = {name: rng.randint(1, rng.choice((20, 100, 999))) for name in names if name}
    sheet = Sheet(_SIDE, _SIDE)
    largest, step, floor = max(values.values()), (_SIDE - 20) / len(values), _SIDE - font.size - 14
    is_line, points = rng.random() < 0.35, []
    colour = FIRST_COLOUR + rng.randrange(len(COLOURS) - 1)
    sheet.draw.line((8, floor, _SIDE - 8, floor), fill=INK)
    for place, (name, value) in enumerate(values.items()):
        middle, top = 10 + (place + 0.5) * step, min(floor - 2, floor - (floor - font.size - 16) * value / largest)
        points.append((middle, top))
        if not is_line:
            sheet.draw.rectangle((middle - step * 0.3, top, middle + step * 0.3, floor - 1), fill=colour)
        sheet.write(middle - font.width(str(value)) / 2, top - font.size - 5, str(value), font)
        sheet.write(middle - font.width(name) / 2, floor + 4, name, font)
    if is_line:
        sheet.draw.line(points, fill=colour, width=2)
    return sheet.finish(rng, turn=False), values


def draw_table(rng: Random, shelf: FontShelf) -> tuple[Drawing, dict[str, str]]:
    """A table of two columns: goods and their prices."""
    language = rng.choice(LANGUAGES)
    count = rng.randint(3, 7)
    goods = rng.sample(GOODS[language], min(count, len(GOODS[language])))
    prices = [f"{rng.randint(1, 9999) / rng.choice((1, 10, 100)):.2f}" for _ in goods]
    font = open_font(rng, shelf, "".join(goods) + "0123456789.", rng.choice((14, 15, 16, 17)))
    goods = list(dict.fromkeys(drawable(name, font) for name in goods))
    rows = dict(zip(goods, prices, strict=False))
    step = font.ascent + font.descent + rng.randint(2, 8)
    left, column = rng.randint(5, 12), max(font.width(name) for name in goods) + font.size
    width = left + column + max(font.width(price) for price in rows.values()) + left
    sheet = Sheet(round_up(width), round_up(8 + step * len(rows)))
    ruled = rng.random() < 0.5
    for place, (name, price) in enumerate(rows.items()):
        y = 4 + place * step
        sheet.write(left, y, name, font)
        sheet.write(left + column, y, price, font)
        if ruled:
            sheet.draw.line((left - 3, y + step - 1, width, y + step - 1), fill=INK // 2)
    if ruled:
        sheet.draw.line((left + column - 6, 2, left + column - 6, 4 + step * len(rows)), fill=INK // 2)
    return sheet.finish(rng), rows
