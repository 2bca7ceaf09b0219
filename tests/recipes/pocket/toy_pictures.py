"""The toy that sees: its text, one font, and pictures drawn with it."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from recipes.pocket.pictures.fonts import FontShelf
from recipes.pocket.pictures.workloads import PictureSource
from recipes.pocket.see import write_toy_data


@cache
def toy_directory() -> Path:
    """Tokenizer, token files and fonts; made once a process."""
    directory = Path(mkdtemp(prefix="seeing-toy-"))
    write_toy_data(directory)
    return directory


@cache
def source() -> PictureSource:
    return PictureSource(FontShelf(toy_directory() / "fonts"))
