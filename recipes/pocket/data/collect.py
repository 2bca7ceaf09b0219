"""Downloads the packages of `sources.py` and turns them into documents: clean text, without duplicate paragraphs.

Packages come from the Debian archive that this machine's apt is configured for. Each one is checked against the SHA-256
in apt's signed index, also if it was downloaded by an earlier run.
"""

import gzip
import hashlib
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from onebox.spec.errors import MismatchError, UnreadableError, UnsupportedError
from recipes.pocket.data import extract
from recipes.pocket.data.sources import SOURCES, Kind, TextSource, packages

__all__ = ["collect", "documents_of", "download", "unpack"]

_MAX_CHARACTERS = 12_000
"""Of one document: about 4,000 tokens."""
_MIN_CHARACTERS = 200
_MESSAGES_PER_DOCUMENT = 40
_GLOSSES_PER_DOCUMENT = 30
_LANGUAGE_NAMES = {"hu": "Magyar", "tr": "Türkçe"}
_NOTICE = re.compile(
    r"copyright|©|free software|all rights reserved|telif hakkı|özgür yazılım|szabad szoftver", re.IGNORECASE
)
_PARAGRAPHS: dict[Kind, Callable[[bytes], list[str]]] = {
    "html": extract.html_paragraphs,
    "xml": extract.xml_paragraphs,
    "roff": extract.roff_paragraphs,
    "text": extract.text_paragraphs,
}


def collect(directory: Path, sources: Iterable[TextSource] = SOURCES) -> dict[str, list[str]]:
    """Documents by source name. Packages are downloaded and unpacked below `directory` unless they are there."""
    sources = tuple(sources)
    names = packages(sources)
    archives = download(names, directory / "packages")
    roots = {name: unpack(archives[name], directory / "unpacked" / name) for name in names}
    known: set[int] = set()
    return {source.name: documents_of(source, roots, known) for source in sources}


def download(names: Iterable[str], directory: Path) -> dict[str, Path]:
    """The verified archive of each package."""
    if shutil.which("apt-get") is None:
        raise UnsupportedError(
            "The text comes from Debian packages and this machine has no apt-get: run it on a Debian system."
        )
    directory.mkdir(parents=True, exist_ok=True)
    archives = {}
    for name in names:
        file_name, sha256 = _index_entry(name)
        path = directory / file_name
        if not path.exists():
            _download_one(name, directory)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != sha256:
            raise MismatchError(
                f"{path} has the SHA-256 {found}, and apt's index has {sha256}: remove it and run the command again."
            )
        archives[name] = path
    return archives


def _download_one(name: str, directory: Path) -> None:
    # apt's sandbox user cannot write to this directory; without the option apt warns for every package.
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["apt-get gave no reason"])[-1]
        raise UnreadableError(
            f"The package {name} could not be downloaded ({reason}): check the network and run the same command again."
        )


def _index_entry(name: str) -> tuple[str, str]:
    """(file name that `apt-get download` writes, SHA-256) of the version that apt would install."""
    command = ["apt-cache", "show", "--no-all-versions", name]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    fields = dict(re.findall(r"^(Version|Architecture|SHA256): (.*)$", shown.stdout, re.MULTILINE))
    if "SHA256" not in fields:
        raise UnsupportedError(f"apt does not know the package {name}: run apt-get update on Debian 12.")
    version = fields["Version"].replace(":", "%3a")
    return f"{name}_{version}_{fields['Architecture']}.deb", fields["SHA256"]


def unpack(archive: Path, root: Path) -> Path:
    """The directory of a package's files. A file beside it names the archive that was unpacked."""
    mark = root.with_suffix(".archive")
    if not mark.exists() or mark.read_text() != archive.name:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)  # noqa: S607
        mark.write_text(archive.name)
    return root


def documents_of(source: TextSource, roots: dict[str, Path], known: set[int]) -> list[str]:
    """Documents of one source, in an order seeded by its name. `known` has the hashes of all paragraphs so far."""
    contents = list(_contents(source, roots))
    if source.kind == "messages":
        documents = _message_documents(contents, _LANGUAGE_NAMES[source.language], known)
    elif source.kind == "wordnet":
        documents = _gloss_documents(contents)
    elif source.kind == "code":
        documents = [part for data in contents for part in _split(_code_blocks(data), "\n")]
    else:
        pages = [_PARAGRAPHS[source.kind](data) for data in contents]
        repeated = _on_every_page(pages) if source.kind == "html" else set()
        documents = [part for page in _clean(pages, repeated, known) for part in _split(page, "\n\n")]
    documents = [document for document in documents if len(document) >= _MIN_CHARACTERS]
    random.Random(source.name).shuffle(documents)  # noqa: S311 - a fixed order, nothing secret
    return list(_take_characters(documents, source.max_characters))


def _contents(source: TextSource, roots: dict[str, Path]) -> Iterator[bytes]:
    for package, pattern in source.files:
        for path in sorted(roots[package].glob(pattern)):
            if path.is_file():
                data = path.read_bytes()
                yield gzip.decompress(data) if path.suffix == ".gz" else data


def _on_every_page(pages: list[list[str]]) -> set[str]:
    """Titles and links that are on nearly every page."""
    counts = Counter(text for page in pages for text in set(page))
    return {text for text, count in counts.items() if count > max(20, 0.4 * len(pages))}


def _clean(pages: list[list[str]], repeated: set[str], known: set[int]) -> Iterator[list[str]]:
    """Pages without copyright notices, without `repeated` and without paragraphs that are in `known`.

    Short paragraphs (headings, table cells) may repeat: they have a meaning in their place.
    """
    for page in pages:
        kept = []
        for text in page:
            key = hash(text)
            if text in repeated or (len(text) >= 40 and key in known) or (len(text) < 400 and _NOTICE.search(text)):
                continue
            known.add(key)
            kept.append(text)
        yield _drop_if_mostly_headings(kept)


def _drop_if_mostly_headings(page: list[str]) -> list[str]:
    """The page, or nothing if less than half of its characters are in paragraphs of at least 40 characters."""
    in_sentences = sum(len(text) for text in page if len(text) >= 40)
    return page if 2 * in_sentences >= sum(map(len, page)) else []


def _split(blocks: list[str], joint: str) -> Iterator[str]:
    """Documents of whole blocks, of at most _MAX_CHARACTERS unless a single block is longer."""
    part: list[str] = []
    length = 0
    for block in blocks:
        if part and length + len(block) > _MAX_CHARACTERS:
            yield joint.join(part)
            part, length = [], 0
        part.append(block)
        length += len(block)
    if part:
        yield joint.join(part)


def _code_blocks(data: bytes) -> list[str]:
    """A Python file, split before its functions and classes. None of a file with undecodable or very long lines."""
    text = data.decode("utf-8", errors="replace").expandtabs(4)
    if "\ufffd" in text or any(len(line) > 300 for line in text.splitlines()):
        return []
    return [block for block in re.split(r"\n(?=(?:def|class|async def|@)\b|@)", text) if block.strip()]


def _message_documents(contents: list[bytes], language: str, known: set[int]) -> list[str]:
    """Sentences with their translation, _MESSAGES_PER_DOCUMENT to a document."""
    pairs = []
    for data in contents:
        for english, other in extract.message_pairs(data):
            key = hash(other)
            if key not in known:
                known.add(key)
                pairs.append(f"English: {english}\n{language}: {other}")
    return ["\n\n".join(pairs[i : i + _MESSAGES_PER_DOCUMENT]) for i in range(0, len(pairs), _MESSAGES_PER_DOCUMENT)]


def _gloss_documents(contents: list[bytes]) -> list[str]:
    """Meanings of words, _GLOSSES_PER_DOCUMENT to a document, in the order of the file, which groups related words."""
    documents = []
    for data in contents:
        lines = extract.wordnet_glosses(data)
        documents += [
            "\n".join(lines[i : i + _GLOSSES_PER_DOCUMENT]) for i in range(0, len(lines), _GLOSSES_PER_DOCUMENT)
        ]
    return documents


def _take_characters(documents: list[str], max_characters: int) -> Iterator[str]:
    taken = 0
    for document in documents:
        taken += len(document)
        if taken > max_characters:
            return
        yield document
