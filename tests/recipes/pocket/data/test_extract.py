"""Readable text out of documentation, on small samples."""

import struct

from recipes.pocket.data.extract import (
    html_paragraphs,
    message_pairs,
    roff_paragraphs,
    text_paragraphs,
    wordnet_glosses,
    xml_paragraphs,
)


def test_a_page_gives_its_paragraphs_without_menus_scripts_and_footers():
    page = """<html><head><title>no</title><script>no()</script></head><body class="toc">
      <div class="navheader"><a>Next</a></div><h1>Árvíztűrő <b>fúrógép</b></h1>
      <p>One sentence,<br>then   another &amp; more.</p><ul><li>first</li><li>second</li></ul>
      <pre>a = 1\n\n  b = 2</pre><div id="footer">Impressum</div></body></html>"""
    assert html_paragraphs(page.encode()) == [
        "Árvíztűrő fúrógép",
        "One sentence,",
        "then another & more.",
        "first",
        "second",
        "a = 1\n  b = 2",
    ]


def test_an_unclosed_paragraph_inside_a_menu_does_not_silence_the_rest():
    assert html_paragraphs(b'<body><div class="toc"><p>menu</div><p>text</body>') == ["text"]


def test_a_mallard_page_gives_its_text_without_credits():
    page = """<page xmlns="http://projectmallard.org/1.0/">
      <info><desc>no</desc><credit><name>No One</name></credit></info>
      <title>Dosyaları bul</title><p>Bir <gui>düğmeye</gui>
      basın.</p><steps><item><p>Önce</p></item></steps><screen>ls\n  -l</screen></page>"""
    assert xml_paragraphs(page.encode()) == ["Dosyaları bul", "Bir düğmeye basın.", "Önce", "ls\n  -l"]


def test_a_file_that_is_no_xml_gives_nothing():
    assert xml_paragraphs(b"<page><p>half") == []


def test_a_man_page_becomes_headings_labels_and_paragraphs():
    page = r""".\" a comment
.ig
hidden
..
.TH TEST 1
.SH NÉV
test \- megnéz\(em\fBfélkövér\fP
.SH OPTIONS
.TP
.BR \-a ", " \-\-all
shows
everything
.IP \(bu
point
.nf
if (x)
    y();
.fi
.PP
The
.I end\c
"""
    assert roff_paragraphs(page.encode()) == [
        "NÉV",
        "test - megnéz—félkövér",
        "OPTIONS",
        "-a, --all: shows everything",
        "• point",
        "if (x)\n    y();",
        "The end",
    ]


def test_a_page_that_only_names_another_gives_nothing():
    assert roff_paragraphs(b".so man2/open.2\n") == []


def test_plain_text_is_cut_at_empty_lines():
    assert text_paragraphs(b"a\nb  \n\n \n\tc\n") == ["a\nb", "    c"]


def catalogue(messages: dict[str, str]) -> bytes:
    """A compiled catalogue, laid out as GNU gettext's manual says."""
    keys = [key.encode() for key in messages]
    values = [value.encode() for value in messages.values()]
    header = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    place, tables, strings = 28 + 16 * len(keys), b"", b""
    for text in (*keys, *values):
        tables += struct.pack("<2I", len(text), place + len(strings))
        strings += text + b"\0"
    return header + tables + strings


def test_a_catalogue_gives_sentences_with_their_translation():
    messages = {
        "": "Content-Type: text/plain; charset=UTF-8\n",
        "Open _file": "Fájl _megnyitása",
        "menu\x04Save <b>all</b>": "Mind mentése",
        "Quit": "Kilépés",
        "Not done": "Not done",
    }
    pairs = message_pairs(catalogue(messages))
    assert pairs == [("Open file", "Fájl megnyitása"), ("Save all", "Mind mentése")]


def test_a_wordnet_meaning_comes_with_its_words():
    data = (
        b'  1 a licence\n00001740 03 n 02 living_thing 0 animate(a) 1 001 @ 0 n 0000 | a living  entity; "it lives"  \n'
    )
    assert wordnet_glosses(data) == ['living thing, animate: a living entity; "it lives"']
