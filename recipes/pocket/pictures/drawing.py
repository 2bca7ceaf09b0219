"""A picture while it is drawn: palette indexes, and where each character stands.

Pixels are one byte, an index into the picture's own palette of 256 colours, so that a picture travels to the trainer in
a third of its bytes. Indexes 0 to INK are a ramp from the background to the ink, which text is drawn with; those from
FIRST_COLOUR on are colours of shapes. The places of characters are labels for
`reader_loss` in `training/vision.py`.
"""

from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from recipes.pocket.pictures.fonts import CHARACTERS, SizedFont

__all__ = ["CELL", "COLOURS", "FIRST_COLOUR", "INK", "Drawing", "Sheet", "round_up"]

CELL = 32
"""Pixels of a token's side: sides of pictures are multiples of it."""
PATCH = 16
SLOTS = 4
"""Places for characters in a patch, side by side."""
INK = 191
FIRST_COLOUR = 200
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "blue": (31, 90, 200),
    "green": (44, 150, 60),
    "yellow": (240, 200, 30),
    "orange": (245, 130, 30),
    "purple": (135, 70, 170),
    "black": (25, 25, 25),
    "grey": (140, 140, 140),
}
_INDEX_OF = {character: index for index, character in enumerate(CHARACTERS)}
_NOISE_SIDE = 1024


@dataclass(frozen=True)
class Drawing:
    """A finished picture. Both sides are multiples of CELL."""

    pixels: NDArray[np.uint8]
    """[height, width]: indexes into `palette`."""
    palette: NDArray[np.uint8]
    """[256, 3]."""
    characters: list[tuple[int, float, float]] = field(default_factory=list)
    """(index into CHARACTERS, x, y) of the centre of each character that is not a space."""

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in height and width."""
        return self.pixels.shape[0] // PATCH, self.pixels.shape[1] // PATCH

    @property
    def num_tokens(self) -> int:
        height, width = self.grid
        return height * width // 4

    def image(self) -> Image.Image:
        return Image.fromarray(self.palette[self.pixels], "RGB")

    def patches(self) -> NDArray[np.uint8]:
        """[patches, PATCH * PATCH]: squares of four patches stay together, as the family's processor orders them."""
        height, width = self.grid
        split = self.pixels.reshape(height // 2, 2, PATCH, width // 2, 2, PATCH)
        return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 2, 5)).reshape(-1, PATCH * PATCH)

    def labels(self) -> NDArray[np.uint8]:
        """[patches, SLOTS]: the character whose centre is in each of a patch's slots from left to right; 0 is none."""
        height, width = self.grid
        labels = np.zeros((height, width, SLOTS), np.uint8)
        for index, x, y in self.characters:
            row, column = int(y) // PATCH, int(x) // PATCH
            if 0 <= row < height and 0 <= column < width:
                labels[row, column, int(x) % PATCH * SLOTS // PATCH] = index
        split = labels.reshape(height // 2, 2, width // 2, 2, SLOTS)
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3, 4)).reshape(-1, SLOTS)


def round_up(size: float) -> int:
    """The next multiple of CELL."""
    return max(CELL, -(-int(np.ceil(size)) // CELL) * CELL)


class Sheet:
    """A picture of `width` x `height` pixels to draw on."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._image = Image.new("L", (width, height), 0)
        self.draw = ImageDraw.Draw(self._image)
        self.draw.fontmode = "L"
        self._characters: list[tuple[int, float, float]] = []

    def write(self, x: float, y: float, text: str, font: SizedFont, ink: int = INK) -> float:
        """Writes a line whose top left is (x, y); returns where it ends."""
        left = int(x)
        self.draw.text((left, int(y)), text, font=font.font, fill=ink)
        at, middle = float(left), int(y) + font.ascent - 0.32 * font.size
        for character in text:
            width = font.widths[character]
            if character != " ":
                self._characters.append((_INDEX_OF[character], at + width / 2, middle))
            at += width
        return at

    def finish(self, rng: Random, *, turn: bool = True, dark: bool = True) -> Drawing:
        """The picture with some contrast, noise, blur and, of some, a small angle."""
        image, characters = self._image, self._characters
        if turn and rng.random() < 0.35:
            angle = rng.uniform(-1.2, 1.2)
            image = image.rotate(angle, Image.Resampling.BILINEAR)
            characters = _turned(characters, angle, self.width / 2, self.height / 2)
        if rng.random() < 0.25:
            image = image.filter(ImageFilter.BoxBlur(rng.uniform(0.2, 0.7)))
        return Drawing(_noisy(np.asarray(image), rng), palette(rng, dark=dark), characters)


def _turned(
    characters: list[tuple[int, float, float]], degrees: float, middle_x: float, middle_y: float
) -> list[tuple[int, float, float]]:
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return [
        (
            index,
            middle_x + (x - middle_x) * cos + (y - middle_y) * sin,
            middle_y - (x - middle_x) * sin + (y - middle_y) * cos,
        )
        for index, x, y in characters
    ]


_noise: list[NDArray[np.int16]] = []


def _noisy(pixels: NDArray[np.uint8], rng: Random) -> NDArray[np.uint8]:
    """Pixels of the ramp with noise; those of shapes stay as they are."""
    strength = rng.choice((0, 0, 0, 4, 8, 14))
    if strength == 0:
        return pixels.copy()
    if not _noise:
        drawn = np.random.default_rng(0).standard_normal((_NOISE_SIDE, _NOISE_SIDE)) * 64
        _noise.append(drawn.astype(np.int16))
    height, width = pixels.shape
    top, left = rng.randrange(_NOISE_SIDE - height + 1), rng.randrange(_NOISE_SIDE - width + 1)
    noise = _noise[0][top : top + height, left : left + width] * strength >> 6
    noisy = np.clip(pixels + noise, 0, INK).astype(np.uint8)
    return np.where(pixels <= INK, noisy, pixels)


def palette(rng: Random, *, dark: bool = True) -> NDArray[np.uint8]:
    """A ramp from a light background to a dark ink, or with `dark` sometimes the other way round, and the colours."""
    light = np.array([rng.randint(205, 255)] * 3) - np.array([rng.randint(0, 25) for _ in range(3)])
    ink = np.array([rng.randint(0, 80) for _ in range(3)])
    if dark and rng.random() < 0.1:
        light, ink = ink, light
    colours = np.zeros((256, 3), np.uint8)
    share = (np.arange(FIRST_COLOUR) / INK).clip(0, 1)[:, None]
    colours[:FIRST_COLOUR] = (light * (1 - share) + ink * share).round()
    for place, colour in enumerate(COLOURS.values()):
        colours[FIRST_COLOUR + place] = colour
    return colours
