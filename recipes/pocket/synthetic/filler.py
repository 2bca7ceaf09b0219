"""Filler text for examples: paragraphs of collected documents, or generated sentences.

A training process calls `use_documents` once. Without it, as in tests, all text is generated.
"""

import re
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from onebox.text.tokenizer import Tokenizer
from recipes.pocket.synthetic.words import CITIES, GOODS, LANGUAGES, MONTHS, company, person, pick

__all__ = ["Documents", "documents", "filler", "passage", "use_documents"]

_SENTENCES = {
    "en": (
        "{person} went to {city} in {month} to see the {word} {word2}.",
        "The {word} near {city} belongs to {company}.",
        "In {month} the price of {goods} was {number} again.",
        "{person} said that the {word} was not ready before {month}.",
        "Nobody at {company} knew where the {goods} had gone.",
        "There are {number} ways to paint a {word}, and {person} knows them all.",
    ),
    "hu": (
        "{person} {month} hónapban {city} városában járt, és vett egy {word} tárgyat.",
        "A {word} és a {word2} a {company} tulajdona.",
        "{month} végén {number} darab {goods} érkezett ide: {city}.",
        "{person} szerint a {word} nem készült el időben.",
    ),
    "tr": (
        "{person} {month} ayında {city} şehrine gitti ve bir {word} aldı.",
        "{company} için {number} adet {goods} gerekiyor.",
        "{city} yakınındaki {word} ile {word2} çok eski.",
        "{person}, {month} ayından önce {word} hazır olmaz dedi.",
    ),
}


class Documents:
    """Collected documents, from the token files that `prepare` wrote."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        [end] = tokenizer.encode("<|endoftext|>")
        self._end = end
        self._files = {path.stem: _open(path, end) for path in sorted((directory / "tokens").glob("*.bin"))}
        self._prose = [n for n in self._files if not n.startswith(("heldout-", "python"))]

    def text(self, rng: Random, source: str) -> str:
        """A random document of a source."""
        ids, bounds = self._files[source]
        index = rng.randrange(len(bounds) - 1)
        return self._tokenizer.decode(ids[bounds[index] : bounds[index + 1] - 1].tolist())

    def prose(self, rng: Random) -> str:
        """A random document of all sources except code."""
        counts = [len(self._files[name][1]) for name in self._prose]
        return self.text(rng, rng.choices(self._prose, counts)[0])

    def passage(self, rng: Random, num_tokens: int, *, held_out: bool = False) -> str:
        """About `num_tokens` tokens out of the middle of a random source, which costs no more than they do."""
        names = [name for name in self._files if name.startswith("heldout-") == held_out and len(self._files[name][0])]
        ids, _ = self._files[rng.choice(names)]
        start = rng.randrange(max(1, len(ids) - num_tokens))
        return self._tokenizer.decode([int(i) for i in ids[start : start + num_tokens] if i < self._end])

    def has(self, source: str) -> bool:
        return source in self._files and len(self._files[source][1]) > 1


def _open(path: Path, end_token_id: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """The ids of a file, and the bounds of its documents."""
    ids = np.fromfile(path, dtype=np.uint16)
    starts = np.flatnonzero(ids == end_token_id) + 1
    return ids, np.concatenate((np.zeros(1, np.int64), starts))


_documents: Documents | None = None


def use_documents(directory: Path, tokenizer: Tokenizer) -> None:
    """Makes this process take filler text from the documents in `directory`."""
    global _documents
    _documents = Documents(directory, tokenizer)


def documents() -> Documents | None:
    return _documents


def filler(rng: Random, characters: int, *, is_generated: bool = False) -> list[str]:
    """Paragraphs of about `characters` characters in total; `is_generated`: none of them from documents."""
    paragraphs: list[str] = []
    length = 0
    known = None if is_generated else _documents
    while length < characters:
        some = _generated(rng) if known is None or rng.random() < 0.1 else known.prose(rng)
        for paragraph in re.split(r"\n\n+", some):
            paragraphs.append(paragraph[: characters - length])
            length += len(paragraph) + 2
            if length >= characters:
                break
    return [paragraph for paragraph in paragraphs if paragraph.strip()]


def passage(rng: Random, characters: int, *, held_out: bool = False) -> str:
    """One piece of about `characters` characters, of a document or generated; with `held_out` of held-out documents."""
    if _documents is None or rng.random() < 0.1:
        return _generated(rng)
    return _documents.passage(rng, characters // 2, held_out=held_out)


def _generated(rng: Random) -> str:
    language = rng.choice(LANGUAGES)
    sentences = [
        rng.choice(_SENTENCES[language]).format(
            person=person(rng, language),
            city=rng.choice(CITIES[language]),
            month=rng.choice(MONTHS[language]),
            word=pick(rng, language),
            word2=pick(rng, language),
            company=company(rng, language, ordinary=0.0),
            goods=rng.choice(GOODS[language]),
            number=rng.randint(2, 9000),
        )
        for _ in range(rng.randint(3, 9))
    ]
    return " ".join(sentences)
