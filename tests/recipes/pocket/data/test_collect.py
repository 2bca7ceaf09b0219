"""Documents out of unpacked packages."""

import gzip
import subprocess

import pytest

from onebox.spec.errors import UnreadableError
from recipes.pocket.data.collect import documents_of, download, unpack
from recipes.pocket.data.sources import SOURCES, TextSource, packages

SENTENCE = "This sentence number {} is long enough to be a paragraph that counts as text of its own, and a bit longer."


def source(kind: str, pattern: str, **fields) -> TextSource:
    return TextSource("sample", "en", "none", kind, (("pack", pattern),), **fields)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "doc").mkdir()
    return tmp_path


def write(root, name: str, sentences: range, extra: str = "") -> None:
    paragraphs = "\n\n".join(SENTENCE.format(number) for number in sentences)
    (root / "doc" / name).write_text(paragraphs + "\n\n" + extra)


def test_a_paragraph_is_kept_the_first_time_only(root):
    write(root, "a.txt", range(6))
    write(root, "b.txt", range(3, 12))
    known: set[int] = set()
    documents = documents_of(source("text", "doc/*.txt"), {"pack": root}, known)
    paragraphs = [paragraph for document in documents for paragraph in document.split("\n\n")]
    assert sorted(paragraphs) == sorted(SENTENCE.format(number) for number in range(12))
    assert documents_of(source("text", "doc/*.txt"), {"pack": root}, known) == []


def test_notices_and_short_documents_fall_out(root):
    write(root, "a.txt", range(4), extra="Copyright 2020 by nobody in particular, all of it.")
    (root / "doc" / "b.txt").write_text("Too short.")
    [document] = documents_of(source("text", "doc/*.txt"), {"pack": root}, set())
    assert "Copyright" not in document


def test_long_documents_are_split_between_paragraphs(root):
    write(root, "a.txt", range(400))
    documents = documents_of(source("text", "doc/*.txt"), {"pack": root}, set())
    assert len(documents) > 2
    assert max(map(len, documents)) < 12_500
    assert all(document.startswith("This sentence") and document.endswith("longer.") for document in documents)


def test_a_source_gives_no_more_characters_than_it_may(root):
    write(root, "a.txt", range(400))
    documents = documents_of(source("text", "doc/*.txt", max_characters=15_000), {"pack": root}, set())
    assert 0 < sum(map(len, documents)) <= 15_000


def test_compressed_pages_are_read(root):
    body = "\n.PP\n".join(SENTENCE.format(number) for number in range(4))
    (root / "doc" / "a.1.gz").write_bytes(gzip.compress(f".TH A 1\n.SH NAME\n{body}\n".encode()))
    [document] = documents_of(source("roff", "doc/*.gz"), {"pack": root}, set())
    assert document.startswith("NAME\n\nThis sentence number 0")


def test_code_keeps_its_lines(root):
    text = "import os\n\n\ndef one():\n    return 1\n\n\n@cache\ndef two():\n    return 2\n" * 8
    (root / "doc" / "a.py").write_text(text)
    [document] = documents_of(source("code", "doc/*.py"), {"pack": root}, set())
    assert document == text


def test_a_package_is_unpacked_once_per_archive(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr("recipes.pocket.data.collect.subprocess.run", lambda command, **_: runs.append(command))
    for name in ("a_1.deb", "a_1.deb", "a_2.deb"):
        unpack(tmp_path / name, tmp_path / "a")
    assert [command[2].rpartition("/")[2] for command in runs] == ["a_1.deb", "a_2.deb"]


def test_every_package_has_its_row_in_the_licence_table():
    from onebox.pocket.ready import MODEL_DIRECTORY

    table = (MODEL_DIRECTORY.parent / "LICENCES.md").read_text()
    assert [name for name in packages(SOURCES) if f"| {name} |" not in table] == []


def test_english_sources_come_before_their_translations():
    languages = [source.language for source in SOURCES]
    assert languages.index("hu") > max(place for place, language in enumerate(languages) if language == "en")


def test_a_package_that_cannot_be_downloaded_is_a_sentence(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 100, "", "W: something\nE: Could not resolve 'deb.debian.org'\n")
    monkeypatch.setattr("recipes.pocket.data.collect.shutil.which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr("recipes.pocket.data.collect._index_entry", lambda _: ("a_1_all.deb", "0"))
    monkeypatch.setattr("recipes.pocket.data.collect.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(UnreadableError, match=r"The package a could not be downloaded \(E: Could not resolve"):
        download(["a"], tmp_path)
