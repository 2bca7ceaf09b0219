"""`python -m recipes.pocket.pictures.fonts`: fonts for rendering, from Debian's packages, cut to the letters we draw.

Every family is under a free licence that allows changed copies (OFL, Apache, GPL with font exception, Bitstream Vera,
LPPL). The cut files are not distributed: `prepare` makes them, a few KB each, so that they can be copied to the machine
that trains. Families are split into those that training draws with and those that are held out for the
evaluation; no style of a held-out family is ever trained on.
"""

import argparse
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError
from onebox.spec.model import read_json
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.data.collect import download, unpack

__all__ = [
    "CHARACTERS",
    "CHARACTER_INDEX",
    "FAMILIES",
    "FontFamily",
    "FontShelf",
    "SizedFont",
    "make_fonts",
    "write_characters",
]

CHARACTERS = (
    "".join(chr(code) for code in range(32, 127)) + "áéíóöőúüűÁÉÍÓÖŐÚÜŰçğışâîûÇĞİŞÂÎÛ" + "€£§°×±–—„”“’•…²µ½ñèàêëïäßôøåæ"
)
"""All characters that pictures show; index 0, the space, also stands for no character."""
CHARACTER_INDEX = "characters.json"
"""Beside the fonts: what each has. A picture never shows what its font lacks."""


@dataclass(frozen=True)
class FontFamily:
    """A family: its package, the files of it, and whether the evaluation alone may draw with it."""

    name: str
    package: str
    files: tuple[str, ...]
    held_out: bool = False


def _family(name: str, package: str, *files: str, held_out: bool = False) -> FontFamily:
    return FontFamily(name, package, files, held_out)


FAMILIES: tuple[FontFamily, ...] = (
    _family("dejavu-sans", "fonts-dejavu-core", "DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
    _family("dejavu-serif", "fonts-dejavu-core", "DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf"),
    _family("dejavu-mono", "fonts-dejavu-core", "DejaVuSansMono.ttf"),
    _family("dejavu-condensed", "fonts-dejavu-extra", "DejaVuSansCondensed.ttf", "DejaVuSerifCondensed-Italic.ttf"),
    _family(
        "liberation-sans", "fonts-liberation2", "LiberationSans-Regular.ttf", "LiberationSans-Bold.ttf",
        "LiberationSans-Italic.ttf",
    ),
    _family(
        "liberation-serif", "fonts-liberation2", "LiberationSerif-Regular.ttf", "LiberationSerif-Bold.ttf",
        "LiberationSerif-Italic.ttf",
    ),
    _family("liberation-mono", "fonts-liberation2", "LiberationMono-Regular.ttf", "LiberationMono-Bold.ttf"),
    _family("carlito", "fonts-crosextra-carlito", "Carlito-Regular.ttf", "Carlito-Bold.ttf", "Carlito-Italic.ttf"),
    _family("open-sans", "fonts-open-sans", "OpenSans-Regular.ttf", "OpenSans-Semibold.ttf", "OpenSans-Italic.ttf"),
    _family("roboto", "fonts-roboto-unhinted", "Roboto-Regular.ttf", "Roboto-Bold.ttf", "Roboto-Italic.ttf"),
    _family("roboto-condensed", "fonts-roboto-unhinted", "RobotoCondensed-Regular.ttf", "RobotoCondensed-Bold.ttf"),
    _family("roboto-slab", "fonts-roboto-slab", "RobotoSlab-Regular.otf", "RobotoSlab-Bold.otf"),
    _family("cantarell", "fonts-cantarell", "Cantarell-Regular.otf", "Cantarell-Bold.otf"),
    _family("free-sans", "fonts-freefont-ttf", "FreeSans.ttf", "FreeSansBold.ttf"),
    _family("free-serif", "fonts-freefont-ttf", "FreeSerif.ttf", "FreeSerifItalic.ttf"),
    _family("free-mono", "fonts-freefont-ttf", "FreeMonoBold.ttf"),
    _family("libertine", "fonts-linuxlibertine", "LinLibertine_R.otf", "LinLibertine_RB.otf", "LinLibertine_RI.otf"),
    _family("biolinum", "fonts-linuxlibertine", "LinBiolinum_R.otf", "LinBiolinum_RB.otf"),
    _family("charis", "fonts-sil-charis", "CharisSIL-Regular.ttf", "CharisSIL-Bold.ttf"),
    _family("andika", "fonts-sil-andika", "Andika-Regular.ttf"),
    _family("garamond", "fonts-ebgaramond", "EBGaramond12-Regular.otf", "EBGaramond12-Italic.otf"),
    _family("inconsolata", "fonts-inconsolata", "Inconsolata.otf"),
    _family("hack", "fonts-hack", "Hack-Regular.ttf", "Hack-Bold.ttf"),
    _family("fira-code", "fonts-firacode", "FiraCode-Regular.ttf", "FiraCode-Bold.ttf"),
    _family("comfortaa", "fonts-comfortaa", "Comfortaa-Regular.ttf"),
    _family("quicksand", "fonts-quicksand", "Quicksand-Medium.ttf", "Quicksand-Bold.ttf"),
    _family("play", "fonts-play", "Play-Regular.ttf", "Play-Bold.ttf"),
    _family("nimbus-sans", "fonts-urw-base35", "NimbusSans-Regular.otf", "NimbusSans-Bold.otf"),
    _family("nimbus-mono", "fonts-urw-base35", "NimbusMonoPS-Bold.otf"),
    _family("gothic", "fonts-urw-base35", "URWGothic-Book.otf", "URWGothic-Demi.otf"),
    _family("bookman", "fonts-urw-base35", "URWBookman-Light.otf"),
    _family("pagella", "fonts-texgyre", "texgyrepagella-regular.otf", "texgyrepagella-italic.otf"),
    _family("schola", "fonts-texgyre", "texgyreschola-regular.otf", "texgyreschola-bold.otf"),
    _family("modern-roman", "fonts-lmodern", "lmroman10-regular.otf", "lmroman10-bold.otf", "lmsans10-regular.otf"),
    _family("noto-sans", "fonts-noto-core", "NotoSans-Regular.ttf", "NotoSans-Bold.ttf", "NotoSans-Italic.ttf"),
    _family("noto-serif", "fonts-noto-core", "NotoSerif-Regular.ttf", "NotoSerif-Bold.ttf"),
    _family("noto-mono", "fonts-noto-mono", "NotoSansMono-Regular.ttf"),
    _family("inter", "fonts-inter", "Inter-Regular.otf", "Inter-SemiBold.otf"),
    _family("karla", "fonts-karla", "Karla-Regular.otf", "Karla-Bold.otf"),
    _family("sora", "fonts-sora", "Sora-Regular.otf"),
    _family("dosis", "fonts-dosis", "Dosis-Medium.otf", "Dosis-Bold.otf"),
    _family("go", "fonts-go", "Go-Regular.ttf", "Go-Mono.ttf"),
    _family("anonymous-pro", "fonts-anonymous-pro", "Anonymous Pro.ttf", "Anonymous Pro B.ttf"),
    _family("courier-prime", "fonts-courier-prime", "Courier Prime.otf", "Courier Prime Sans.otf"),
    _family("mononoki", "fonts-mononoki", "mononoki-Regular.ttf"),
    _family("yrsa", "fonts-yrsa-rasa", "Yrsa-Medium.ttf", "Rasa-Regular.ttf"),
    _family("old-standard", "fonts-oldstandard", "OldStandard-Regular.ttf"),
    _family("spartan", "fonts-league-spartan", "LeagueSpartan-Regular.otf"),
    _family("manrope", "fonts-manrope", "Manrope-Regular.ttf", "Manrope-Bold.ttf"),
    _family("vollkorn", "fonts-vollkorn", "Vollkorn-Regular.ttf", "Vollkorn-Bold.ttf"),
    _family("lato", "fonts-lato", "Lato-Regular.ttf", "Lato-Bold.ttf", "Lato-Italic.ttf", held_out=True),
    _family("pt-sans", "fonts-paratype", "PTS55F.ttf", "PTS75F.ttf", held_out=True),
    _family("pt-serif", "fonts-paratype", "PTF55F.ttf", "PTF75F.ttf", held_out=True),
    _family("gentium", "fonts-sil-gentiumplus", "GentiumPlus-Regular.ttf", "GentiumPlus-Bold.ttf", held_out=True),
    _family(
        "jetbrains-mono", "fonts-jetbrains-mono", "JetBrainsMono-Regular.ttf", "JetBrainsMono-Bold.ttf", held_out=True
    ),
    _family("caladea", "fonts-crosextra-caladea", "Caladea-Regular.ttf", "Caladea-Italic.ttf", held_out=True),
    _family("clear-sans", "fonts-clear-sans", "ClearSans-Regular.ttf", "ClearSans-Bold.ttf", held_out=True),
    _family("oxygen", "fonts-oxygen", "Oxygen-Sans.ttf", "OxygenMono-Regular.ttf", held_out=True),
)  # fmt: skip
"""Of Debian 12. The recipe's README states their licences."""


def make_fonts(packages: Path, output: Path) -> int:
    """Downloads the families' packages to `packages` and writes the cut fonts to `output`; returns their number."""
    archives = download(sorted({family.package for family in FAMILIES}), packages / "packages")
    roots = {name: unpack(archive, packages / "unpacked" / name) for name, archive in archives.items()}
    known: dict[Path, dict[str, str]] = {output / "training": {}, output / "held-out": {}}
    for family in FAMILIES:
        folder = output / ("held-out" if family.held_out else "training")
        folder.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(family.files):
            [found] = sorted(roots[family.package].rglob(name))[:1]
            cut = cut_font(found.read_bytes())
            file_name = f"{family.name}-{number}.otf"
            (folder / file_name).write_bytes(cut)
            known[folder][file_name] = drawn_characters(cut)
    for folder, characters in known.items():
        write_characters(folder, characters)
    return sum(map(len, known.values()))


def write_characters(folder: Path, characters: Mapping[str, str]) -> None:
    """Writes down what each font of the folder has."""
    text = json.dumps(characters, ensure_ascii=False, indent=1)
    (folder / CHARACTER_INDEX).write_text(text + "\n", encoding="utf-8")


def cut_font(data: bytes) -> bytes:
    """The font with the glyphs of CHARACTERS alone, without hints, kerning and substitutions.

    So a line of text is as wide as its characters together, and each character's place in a picture is known.
    """
    from fontTools import subset  # type: ignore[import-untyped]
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    logging.getLogger("fontTools.subset").setLevel(logging.ERROR)  # it warns of each table that it drops
    options = subset.Options(
        hinting=False,
        layout_features=[],
        name_IDs=[],
        notdef_outline=True,
        drop_tables=["kern", "GPOS", "GSUB", "GDEF"],
    )
    options.drop_tables += ["DSIG", "FFTM", "PfEd", "BDF ", "meta", "SVG ", "COLR", "CPAL", "TeX ", "JSTF", "BASE"]
    font = TTFont(io.BytesIO(data), fontNumber=0, lazy=False)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text=CHARACTERS)
    subsetter.subset(font)
    out = io.BytesIO()
    font.save(out)
    return out.getvalue()


class FontShelf:
    """The cut fonts of a folder, opened at a size when first drawn with."""

    def __init__(self, folder: Path) -> None:
        self.paths: Sequence[Path] = sorted(folder.glob("*.otf"))
        if not self.paths:
            raise UnreadableError(f"{folder} has no fonts: run `python -m recipes.pocket.pictures.fonts`.")

    def open(self, place: int, size: int) -> "SizedFont":
        return _open(self.paths[place % len(self.paths)], size)


@dataclass(frozen=True)
class SizedFont:
    """A font at a size in pixels: what it can draw, and how wide each character is."""

    font: Any
    size: int
    widths: Mapping[str, float]
    """Of all characters that it has, in pixels."""
    ascent: int
    descent: int

    def width(self, text: str) -> float:
        return sum(self.widths[character] for character in text)

    def can_draw(self, text: str) -> bool:
        return all(character in self.widths for character in text)


@cache
def _open(path: Path, size: int) -> SizedFont:
    from PIL import ImageFont

    font = ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
    widths = {character: font.getlength(character) for character in _characters(path.parent)[path.name]}
    ascent, descent = font.getmetrics()
    return SizedFont(font, size, widths, ascent, descent)


@cache
def _characters(folder: Path) -> Mapping[str, str]:
    """The characters that each file of a folder has, by its name."""
    return {name: str(known) for name, known in read_json(folder / CHARACTER_INDEX).items()}


def drawn_characters(data: bytes) -> str:
    """The characters of CHARACTERS for which a font has a glyph."""
    from fontTools.ttLib import TTFont

    known = TTFont(io.BytesIO(data), fontNumber=0).getBestCmap()
    return "".join(character for character in CHARACTERS if ord(character) in known)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.pictures.fonts", description=__doc__)
    parser.add_argument("--packages", type=Path, default=Path("build/pocket"), help="where Debian packages are kept")
    parser.add_argument("--out", type=Path, default=Path(".pocket/fonts"), help="where the cut fonts go")
    given = parser.parse_args(arguments)
    count = make_fonts(given.packages, given.out)
    size = sum(path.stat().st_size for path in given.out.rglob("*.otf"))
    log_progress(f"{count} fonts of {len(FAMILIES)} families, {size / 1e6:.1f} MB in {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
