"""Pictures of coloured shapes, with their names and places."""

import math
from dataclasses import dataclass
from random import Random

from recipes.pocket.pictures.drawing import COLOURS, FIRST_COLOUR, Drawing, Sheet

__all__ = ["SHAPES", "Shape", "draw_scene"]

SHAPES = ("circle", "square", "triangle", "star", "rectangle")
_PLACES = ("top left", "top right", "bottom left", "bottom right")
_SIDE = 192


@dataclass(frozen=True)
class Shape:
    """One shape of a scene."""

    colour: str
    shape: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


def draw_scene(rng: Random) -> tuple[Drawing, list[Shape]]:
    """One to four shapes, each in a corner of its own, in reading order."""
    count = rng.randint(1, 4)
    places = sorted(rng.sample(_PLACES, count), key=_PLACES.index)
    shapes = [Shape(rng.choice(list(COLOURS)), rng.choice(SHAPES), place) for place in places]
    sheet = Sheet(_SIDE, _SIDE)
    for each in shapes:
        corner = _PLACES.index(each.place)
        middle_x = _SIDE * (0.25 + 0.5 * (corner % 2)) + rng.randint(-8, 8)
        middle_y = _SIDE * (0.25 + 0.5 * (corner // 2)) + rng.randint(-8, 8)
        _draw(sheet, each, middle_x, middle_y, rng.randint(18, 36))
    return sheet.finish(rng, turn=False, dark=False), shapes


def _draw(sheet: Sheet, shape: Shape, x: float, y: float, radius: int) -> None:
    colour = FIRST_COLOUR + list(COLOURS).index(shape.colour)
    if shape.shape == "circle":
        sheet.draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape.shape == "square":
        sheet.draw.rectangle((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape.shape == "rectangle":
        sheet.draw.rectangle((x - 1.3 * radius, y - 0.55 * radius, x + 1.3 * radius, y + 0.55 * radius), fill=colour)
    else:
        corners = 3 if shape.shape == "triangle" else 10
        radii = [radius * (1.1 if corners == 3 or place % 2 == 0 else 0.45) for place in range(corners)]
        angles = [2 * math.pi * place / corners - math.pi / 2 for place in range(corners)]
        points = [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
        sheet.draw.polygon(points, fill=colour)
