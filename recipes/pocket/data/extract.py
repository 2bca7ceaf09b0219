"""Extracts plain text from documentation: HTML, Mallard and DocBook XML, man pages, message catalogues, WordNet.

Each function takes the bytes of one file and returns its paragraphs and headings in reading order. Paragraphs have no
empty lines, so an empty line always separates two of them. Program listings keep their line breaks.
"""

import gettext
import io
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from xml.etree import ElementTree

__all__ = [
    "html_paragraphs",
    "message_pairs",
    "roff_paragraphs",
    "text_paragraphs",
    "wordnet_glosses",
    "xml_paragraphs",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SPACES = re.compile(r"[ \t\r\n\f\v\u00a0\u200b]+")


def _flow(text: str) -> str:
    """Flowing text on one line."""
    return _SPACES.sub(" ", text).strip()


def _kept(text: str) -> str:
    """Preformatted text, without empty lines and without spaces at line ends."""
    return "\n".join(line.rstrip() for line in text.expandtabs(4).splitlines() if line.strip())


class _Html(HTMLParser):
    """Collects the paragraphs of a page, without its navigation."""

    BLOCKS = _names(
        "p div li dt dd h1 h2 h3 h4 h5 h6 tr table ul ol dl section article blockquote caption br hr pre body main"
    )
    SKIPPED = _names("script style head nav noscript form button svg select footer")
    VOID = _names("br hr img input link meta col area base embed source track wbr")
    NAVIGATION = re.compile(
        r"\b(navheader|navfooter|docnav|toc|related|sphinxsidebar|sphinxsidebarwrapper|headerlink|footer|index|banner|"
        r"relatedtopics|list-of-\w+|legalnotice|copyright|authorgroup|revhistory|SearchFrame|Contents|BottomLeft|"
        r"TopRight|TopLeft|donation|modules|languages|search-\w+|embeddedhelp|closebutton|indexterm|breadcrumbs)\b"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._pieces: list[str] = []
        self._open: list[tuple[str, bool]] = []  # (tag, whether its content is skipped)
        self._skip_depth = 0
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS:
            self.end_paragraph()
        if tag in self.VOID:
            return
        labels = " ".join(value or "" for name, value in attrs if name in ("class", "id"))
        skips = tag in self.SKIPPED or (tag not in ("html", "body") and bool(self.NAVIGATION.search(labels)))
        self._open.append((tag, skips))
        self._skip_depth += skips
        self._preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self.end_paragraph()
        if tag in self.VOID or not any(tag == name for name, _ in self._open):
            return
        while self._open:
            name, skips = self._open.pop()
            self._skip_depth -= skips
            self._preformatted -= name == "pre"
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        if not self._skip_depth:
            self._pieces.append(data)

    def end_paragraph(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        text = _kept(text) if self._preformatted else _flow(text)
        if text:
            self.paragraphs.append(text)


def html_paragraphs(data: bytes) -> list[str]:
    """Paragraphs of a web page, without menus, tables of contents and footers."""
    parser = _Html()
    parser.feed(data.decode("utf-8", errors="replace"))
    parser.close()
    parser.end_paragraph()
    return parser.paragraphs


_XML_BLOCKS = _names(
    "title p para cite term screen code programlisting synopsis td entry desc caption simpara literallayout"
)
_XML_SKIPPED = _names("info articleinfo bookinfo indexterm credit legalnotice revhistory comment include")
_XML_KEPT = _names("screen programlisting literallayout synopsis")


def xml_paragraphs(data: bytes) -> list[str]:
    """Paragraphs of a Mallard page or a DocBook file, without credits. None of a file that is not valid XML.

    A file that uses entities of a DTD counts as not valid.
    """
    try:
        root = ElementTree.fromstring(data)  # noqa: S314 - verified packages; expat resolves no external entity
    except ElementTree.ParseError:
        return []
    return [text for text in _xml_blocks(root) if text]


def _xml_blocks(element: ElementTree.Element) -> Iterator[str]:
    name = _local(element)
    if name in _XML_SKIPPED:
        return
    children = [child for child in element.iter() if child is not element and _local(child) in _XML_BLOCKS - {"code"}]
    if name in _XML_BLOCKS and not children:
        yield (_kept if name in _XML_KEPT else _flow)("".join(element.itertext()))
        return
    if name in _XML_BLOCKS and element.text:
        yield _flow(element.text)
    for child in element:
        yield from _xml_blocks(child)


def _local(element: ElementTree.Element) -> str:
    """The tag without its namespace; the tag of a comment or processing instruction is a function, not a string."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else "comment"


_ROFF_CHARS = {
    "aq": "'", "dq": "\"", "em": "—", "en": "–", "co": "©", "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "bu": "•",
    "rs": "\\", "ti": "~", "ha": "^", "ga": "`", "mu": "×", "pl": "+", "mi": "-", "eq": "=", "->": "→", "<=": "≤",
    ">=": "≥", "+-": "±", "la": "<", "ra": ">", "lB": "[", "rB": "]", "bv": "|", "sl": "/", "at": "@", "sh": "#",
    "Do": "$", "hy": "-", "de": "°", "Fo": "«", "Fc": "»", "ss": "ß", "tm": "™", "rg": "®", "if": "∞", "!=": "≠",
    "..": "…",
}  # fmt: skip
_ROFF_ESCAPE = re.compile(
    r"\\(?:f(?:\[\w*\]|\(..|.)|s(?:[-+]?\d{1,2}|\[[^]]*\])|m\[[^]]*\]|[Ffm]\([a-zA-Z]{2}|"
    r"\*(?:\[([^]]*)\]|\((..)|(.))|\((..)|\[([^]]*)\]|[hvwXZlL]'[^']*'|n(?:\[[^]]*\]|\(..|.)|(.))"
)
_ROFF_SINGLE = {"-": "-", "e": "\\", "\\": "\\", " ": " ", "~": " ", "0": " ", "t": " ", "'": "'", "`": "`", ".": "."}
_ALTERNATING = frozenset(("BR", "BI", "IR", "RB", "RI", "IB"))


def roff_paragraphs(data: bytes) -> list[str]:
    """Paragraphs of a page written in the man macros. None of pages in mdoc and of pages that only include another."""
    text = data.decode("utf-8", errors="replace")
    if re.search(r"^\.(Dd|Sh|so) ", text, re.MULTILINE):
        return []
    text = re.sub(r"^\.ig\b.*?^\.\.$", "", text, flags=re.MULTILINE | re.DOTALL)
    return _Roff().read(re.sub(r"(?<!\\)\\\n", "", text))


class _Roff:
    """One pass over the lines: requests start or end paragraphs, other lines are text of the current paragraph."""

    def __init__(self) -> None:
        self.paragraphs: list[str] = []
        self._lines: list[str] = []
        self._kept = False
        self._label_next = False
        self._skips_to_end = False

    def read(self, text: str) -> list[str]:
        for line in text.splitlines():
            if self._skips_to_end:  # tables and macro definitions
                self._skips_to_end = not re.match(r"^\.(TE|EE|\.)", line)
            elif line.startswith((".", "'")):
                self._request(line)
            elif text_line := _roff_text(line):
                self._text(text_line)
            elif self._kept is False:
                self._end()
        self._end()
        return self.paragraphs

    def _request(self, line: str) -> None:
        name, _, rest = line[1:].strip().partition(" ")
        arguments = _roff_arguments(rest)
        if name in ("SH", "SS"):
            self._end()
            self._text(" ".join(arguments))
            if arguments:
                self._end()
        elif name in ("B", "I", "SM", "SB"):
            self._text(" ".join(arguments))
        elif name in _ALTERNATING:
            self._text("".join(arguments))
        elif name in ("PP", "P", "LP", "sp", "IP", "TP", "TQ", "HP", "RS", "RE", "br"):
            self._end()
            self._label_next = name in ("TP", "TQ")
            if name == "IP" and arguments and arguments[0]:
                self._text(arguments[0] + (" " if arguments[0] in "•-*" else ":"))
        elif name in ("nf", "EX", "fi", "EE"):
            self._end()
            self._kept = name in ("nf", "EX")
        elif name in ("TS", "de", "de1", "am"):
            self._skips_to_end = True

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._label_next and not self._kept:
            self._label_next = False
            text += ":"
        self._lines.append(text)

    def _end(self) -> None:
        text = _kept("\n".join(self._lines)) if self._kept else _flow(" ".join(self._lines))
        self._lines.clear()
        if text:
            self.paragraphs.append(text)


def _roff_arguments(rest: str) -> list[str]:
    """Arguments of a request: separated by spaces; quoted arguments may contain spaces."""
    found = re.findall(r'"((?:[^"]|"")*)"?|((?:\\ |[^\s"])(?:\\ |\S)*)', rest)
    return [_roff_text(quoted.replace('""', '"') or plain) for quoted, plain in found]


def _roff_text(line: str) -> str:
    """A line with its escapes resolved and its comments removed."""
    line = re.sub(r'\\["#].*$', "", line)
    return _ROFF_ESCAPE.sub(_roff_character, line)


def _roff_character(match: re.Match[str]) -> str:
    *strings, pair, bracket, single = match.groups()
    if single is not None:
        return _ROFF_SINGLE.get(single, "")
    name = pair or bracket or next((s for s in strings if s), "")
    if re.fullmatch(r"u[0-9A-F]{4,5}", name):
        return chr(int(name[1:], 16))
    return _ROFF_CHARS.get(name, "")


def text_paragraphs(data: bytes) -> list[str]:
    """Paragraphs of plain text, reStructuredText or AsciiDoc, separated by empty lines."""
    text = data.decode("utf-8", errors="replace")
    return [kept for block in re.split(r"\n\s*\n", text) if (kept := _kept(block))]


def message_pairs(data: bytes) -> list[tuple[str, str]]:
    """(English, translation) of the sentences in a compiled message catalogue; one-word entries are skipped."""
    catalogue = gettext.GNUTranslations(io.BytesIO(data))
    pairs = []
    # The library has no public way to list the messages.
    for original, translation in vars(catalogue)["_catalog"].items():
        if isinstance(original, str) and " " in original.strip():
            english, other = _message(original.rpartition("\x04")[2]), _message(translation)
            if english != other and other:
                pairs.append((english, other))
    return pairs


def _message(text: str) -> str:
    """A message without its keyboard mnemonics and markup."""
    return _flow(re.sub(r"<[^<>]*>", "", re.sub(r"[_~&](?=\w)", "", text)))


def wordnet_glosses(data: bytes) -> list[str]:
    """One line per meaning in a data file of WordNet: its words, the definition, examples."""
    lines = []
    for line in data.decode("utf-8", errors="replace").splitlines():
        if line.startswith("  ") or "|" not in line:
            continue  # the licence at the head of the file
        fields, gloss = line.split("|", 1)
        columns = fields.split()
        words = [columns[4 + 2 * index].partition("(")[0].replace("_", " ") for index in range(int(columns[3], 16))]
        lines.append(f"{', '.join(words)}: {_flow(gloss)}")
    return lines
