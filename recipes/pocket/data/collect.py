"""Downloads the packages of `sources.py` and makes documents of them: clean text, each paragraph once.

Packages come from the Debian archive that this machine's apt is set up for. They are held against the SHA-256 of apt's
signed index, also when they lie there from an earlier run.
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
from recipes.pocket.data.sources import SOURCES, Kind, Source, packages

__all__ = ["collect", "documents_of", "download", "unpack"]

_MOST_CHARACTERS = 12_000  # of one document: about 4,000 tokens
_FEWEST_CHARACTERS = 200
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


def collect(directory: Path, sources: Iterable[Source] = SOURCES) -> dict[str, list[str]]:
    """Documents by source name. Packages are downloaded and unpacked below `directory` if they are not there yet."""
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
            "The text comes from Debian packages and there is no apt-get here: run it on a Debian system."
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
                f"{path} has the SHA-256 {found}, and apt's index says {sha256}: remove it and start again."
            )
        archives[name] = path
    return archives


def _download_one(name: str, directory: Path) -> None:
    # apt's own user may not write here, about which apt would complain once a package.
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["apt-get does not say why"])[-1]
        raise UnreadableError(
            f"The package {name} could not be downloaded ({reason}): check the network and run the same command again."
        )


def _index_entry(name: str) -> tuple[str, str]:
    """(file name as apt-get download writes it, SHA-256) of the version that apt would install."""
    command = ["apt-cache", "show", "--no-all-versions", name]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    fields = dict(re.findall(r"^(Version|Architecture|SHA256): (.*)$", shown.stdout, re.MULTILINE))
    if "SHA256" not in fields:
        raise UnsupportedError(f"apt does not know the package {name}: run apt-get update on Debian 12.")
    version = fields["Version"].replace(":", "%3a")
    return f"{name}_{version}_{fields['Architecture']}.deb", fields["SHA256"]


def unpack(archive: Path, root: Path) -> Path:
    """The root of a package's files; a mark beside it says which archive it was made from."""
    mark = root.with_suffix(".archive")
    if not mark.exists() or mark.read_text() != archive.name:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)  # noqa: S607
        mark.write_text(archive.name)
    return root


def documents_of(source: Source, roots: dict[str, Path], known: set[int]) -> list[str]:
    """Documents of one source in an order that depends on its name alone. `known` holds the paragraphs seen so far."""
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
    documents = [document for document in documents if len(document) >= _FEWEST_CHARACTERS]
    random.Random(source.name).shuffle(documents)  # noqa: S311 - an order, not a secret
    return list(_up_to(documents, source.most_characters))


def _contents(source: Source, roots: dict[str, Path]) -> Iterator[bytes]:
    for package, pattern in source.files:
        for path in sorted(roots[package].glob(pattern)):
            if path.is_file():
                data = path.read_bytes()
                yield gzip.decompress(data) if path.suffix == ".gz" else data


def _on_every_page(pages: list[list[str]]) -> set[str]:
    """Titles and links that a publishing tool put on nearly every page."""
    counts = Counter(text for page in pages for text in set(page))
    return {text for text, count in counts.items() if count > max(20, 0.4 * len(pages))}


def _clean(pages: list[list[str]], repeated: set[str], known: set[int]) -> Iterator[list[str]]:
    """Pages without notices, without `repeated` and without paragraphs that were there before.

    Short paragraphs (headings, table cells) may come again: they mean something where they stand.
    """
    for page in pages:
        kept = []
        for text in page:
            key = hash(text)
            if text in repeated or (len(text) >= 40 and key in known) or (len(text) < 400 and _NOTICE.search(text)):
                continue
            known.add(key)
            kept.append(text)
        yield _without_lone_headings(kept)


def _without_lone_headings(page: list[str]) -> list[str]:
    """A page, or nothing where less than half of its characters stand in sentences."""
    in_sentences = sum(len(text) for text in page if len(text) >= 40)
    return page if 2 * in_sentences >= sum(map(len, page)) else []


def _split(blocks: list[str], joint: str) -> Iterator[str]:
    """Documents of whole blocks, none much longer than _MOST_CHARACTERS."""
    part: list[str] = []
    length = 0
    for block in blocks:
        if part and length + len(block) > _MOST_CHARACTERS:
            yield joint.join(part)
            part, length = [], 0
        part.append(block)
        length += len(block)
    if part:
        yield joint.join(part)


def _code_blocks(data: bytes) -> list[str]:
    """A Python file cut before its functions and classes; a file with lines no person wrote gives none."""
    text = data.decode("utf-8", errors="replace").expandtabs(4)
    if "\ufffd" in text or any(len(line) > 300 for line in text.splitlines()):
        return []
    return [block for block in re.split(r"\n(?=(?:def|class|async def|@)\b|@)", text) if block.strip()]


def _message_documents(contents: list[bytes], language: str, known: set[int]) -> list[str]:
    """Sentences with their translation, some to a document."""
    pairs = []
    for data in contents:
        for english, other in extract.message_pairs(data):
            key = hash(other)
            if key not in known:
                known.add(key)
                pairs.append(f"English: {english}\n{language}: {other}")
    return ["\n\n".join(pairs[i : i + _MESSAGES_PER_DOCUMENT]) for i in range(0, len(pairs), _MESSAGES_PER_DOCUMENT)]


def _gloss_documents(contents: list[bytes]) -> list[str]:
    """Meanings of words, some to a document, in the order of the file: what belongs together stands together."""
    documents = []
    for data in contents:
        lines = extract.wordnet_glosses(data)
        documents += [
            "\n".join(lines[i : i + _GLOSSES_PER_DOCUMENT]) for i in range(0, len(lines), _GLOSSES_PER_DOCUMENT)
        ]
    return documents


def _up_to(documents: list[str], most_characters: int) -> Iterator[str]:
    taken = 0
    for document in documents:
        taken += len(document)
        if taken > most_characters:
            return
        yield document
