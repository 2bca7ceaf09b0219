"""Where the pocket model's text comes from: Debian packages, the files taken from them, and their licences.

English sources come first: a paragraph that a translation left in English is then a duplicate and is dropped.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["SOURCES", "Kind", "TextSource", "packages"]

Kind = Literal["html", "xml", "roff", "text", "messages", "wordnet", "code"]


@dataclass(frozen=True)
class TextSource:
    """Files of one language and one licence.

    `files` are (package, glob below its root) pairs. `max_characters` limits what is taken, so that no large source
    dominates.
    """

    name: str
    language: str
    licence: str
    kind: Kind
    files: tuple[tuple[str, str], ...]
    max_characters: int = 12_000_000


_HELP = "usr/share/libreoffice/help"
_GNOME = "usr/share/help"
_MAN = "usr/share/man"
_MESSAGES = (
    "audacity-data",
    "bash",
    "binutils-common",
    "claws-mail-i18n",
    "coreutils",
    "darktable",
    "digikam-data",
    "evolution-common",
    "gimp-data",
    "gnome-control-center-data",
    "gnucash-common",
    "gnumeric-common",
    "gramps",
    "inkscape",
    "kmymoney-common",
    "krita-l10n",
    "libgtk-3-common",
    "mc-data",
    "orca",
    "pidgin-data",
    "util-linux-locales",
    "vlc-l10n",
)
_HANDBOOK = "usr/share/doc/debian-handbook/html"


def _messages(language: str) -> tuple[tuple[str, str], ...]:
    office = (f"libreoffice-l10n-{language}", f"usr/lib/libreoffice/program/resource/{language}/LC_MESSAGES/*.mo")
    game = ("wesnoth-1.16-data", f"usr/share/games/wesnoth/1.16/locale/{language}/LC_MESSAGES/*.mo")
    return (office, game, *((name, f"usr/share/locale/{language}/LC_MESSAGES/*.mo") for name in _MESSAGES))


_GNOME_PACKAGES = ("gnome-user-docs", "evolution-common", "orca")


def _gnome(directory: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{_GNOME}/{directory}/*/*.page") for name in _GNOME_PACKAGES)


_OFFICE = "MPL-2.0"
_GNOME_LICENCE = "CC-BY-SA-3.0; LGPL-2.1+ (orca)"
_MESSAGE_LICENCE = "MPL-2.0 (LibreOffice); GPL-2+, GPL-3+ and LGPL-2.1+ (the others)"
_MAN_LICENCE = "GPL-2+, GPL-3+, BSD, and the verbatim licence of the Linux man-pages"

SOURCES: tuple[TextSource, ...] = (
    TextSource("office-en", "en", _OFFICE, "html", (("libreoffice-help-en-us", f"{_HELP}/en-US/text/**/*.html"),)),
    TextSource("gnome-en", "en", _GNOME_LICENCE, "xml", _gnome("C")),
    TextSource(
        "debian-en",
        "en",
        "GPL-2+; CC-BY-SA-3.0 or GPL-2+ (handbook); a copyleft notice (FAQ)",
        "html",
        (
            ("debian-handbook", f"{_HANDBOOK}/en-US/*.html"),
            ("installation-guide-amd64", "usr/share/doc/installation-guide-amd64/en/*.html"),
            ("debian-reference-en", "usr/share/debian-reference/*.en.html"),
            ("debian-faq", "usr/share/doc/debian/FAQ/*.html"),
            ("developers-reference", "usr/share/doc/developers-reference/*.html"),
        ),
    ),
    TextSource(
        "man-en",
        "en",
        _MAN_LICENCE,
        "roff",
        tuple((name, f"{_MAN}/man*/*.gz") for name in ("manpages", "manpages-dev")),
    ),
    TextSource(
        "postgresql-en",
        "en",
        "PostgreSQL",
        "html",
        (("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/*.html"),),
    ),
    TextSource("git-en", "en", "GPL-2", "text", (("git-doc", "usr/share/doc/git-doc/**/*.txt"),)),
    TextSource(
        "python-en",
        "en",
        "PSF-2.0",
        "text",
        (("python3.11-doc", "usr/share/doc/python3.11/html/_sources/**/*.rst.txt"),),
    ),
    TextSource("wordnet-en", "en", "WordNet", "wordnet", (("wordnet-base", "usr/share/wordnet/data.*"),), 8_000_000),
    TextSource("office-hu", "hu", _OFFICE, "html", (("libreoffice-help-hu", f"{_HELP}/hu/text/**/*.html"),)),
    TextSource("gnome-hu", "hu", _GNOME_LICENCE, "xml", _gnome("hu")),
    TextSource("man-hu", "hu", "GPL-3+", "roff", (("manpages-hu", f"{_MAN}/hu/man*/*.gz"),)),
    TextSource("messages-hu", "hu", _MESSAGE_LICENCE, "messages", _messages("hu")),
    TextSource("office-tr", "tr", _OFFICE, "html", (("libreoffice-help-tr", f"{_HELP}/tr/text/**/*.html"),)),
    TextSource(
        "debian-tr", "tr", "CC-BY-SA-3.0 or GPL-2+", "html", (("debian-handbook", f"{_HANDBOOK}/tr-TR/*.html"),)
    ),
    TextSource("man-tr", "tr", _MAN_LICENCE, "roff", (("manpages-tr", f"{_MAN}/tr/man*/*.gz"),)),
    TextSource("messages-tr", "tr", _MESSAGE_LICENCE, "messages", _messages("tr")),
    TextSource(
        "python",
        "code",
        "PSF-2.0",
        "code",
        tuple((name, "usr/lib/python3.11/**/*.py") for name in ("libpython3.11-minimal", "libpython3.11-stdlib")),
        16_000_000,
    ),
    TextSource(
        "python-tests",
        "code",
        "PSF-2.0",
        "code",
        (("libpython3.11-testsuite", "usr/lib/python3.11/test/**/*.py"),),
        8_000_000,
    ),
)


def packages(sources: Iterable[TextSource] = SOURCES) -> list[str]:
    """The sorted names of all packages that the sources need."""
    return sorted({package for source in sources for package, _ in source.files})
