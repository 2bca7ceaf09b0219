"""`python -m recipes.pocket.drafter.prompts --text DIR --out FILE`: the prompts that the drafter learns from.

The prompts are those of the pocket model's workloads, texts to copy, and beginnings of prose and code to continue; the
answers are the target's own, made where it is trained (`target.py`). DIR has token files of the shipped tokenizer; they
are made from Debian's packages if it has none. The file also has documents, which fill long contexts.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RawTokenizer

from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.data.collect import collect
from recipes.pocket.data.sources import SOURCES
from recipes.pocket.data.tokens import INDEX, check_token_files, read_documents, write_token_files
from recipes.pocket.synthetic.example import Example, text_is
from recipes.pocket.synthetic.filler import filler, use_documents
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, SHARES, WORKLOADS, prompt_text, render

__all__ = ["COPYING", "KINDS", "PromptFile", "Prompts", "copying", "main"]

COPYING, PROSE, CODE = "copying", "continued prose", "continued code"
KINDS: tuple[str, ...] = (*SHARES, COPYING, PROSE, CODE)
"""The kinds of prompts; the workloads' own come first."""
_SHARES = {**SHARES, COPYING: 2.0, PROSE: 5.0, CODE: 2.5}
_EXAMPLE_SHARES = {**SHARES, "text": 3.0, COPYING: 10.0}
_SEED = 500_000_000
"""Of the first training prompt: the pocket model itself was trained on the seeds from 0 on."""
_EXAMPLE_SEED = 600_000_000
_MOST_TOKENS = 1200
_DOCUMENT_TOKENS = 3_000_000
Ids = NDArray[np.uint16]


@dataclass(frozen=True)
class Prompts:
    """Prompts one behind the other: prompt i is ids[bounds[i] : bounds[i + 1]], of the kind KINDS[kinds[i]]."""

    ids: Ids
    bounds: NDArray[np.int64]
    kinds: NDArray[np.uint8]

    @classmethod
    def of(cls, prompts: Sequence[tuple[str, Sequence[int]]]) -> "Prompts":
        sizes = [len(ids) for _, ids in prompts]
        flat = np.concatenate([np.asarray(ids, dtype=np.uint16) for _, ids in prompts])
        kinds = np.array([KINDS.index(kind) for kind, _ in prompts], dtype=np.uint8)
        return cls(flat, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[str, Ids]:
        return KINDS[self.kinds[index]], self.ids[self.bounds[index] : self.bounds[index + 1]]


@dataclass(frozen=True)
class PromptFile:
    """Prompts to train on, prompts to measure with, documents for long contexts, and examples with right answers."""

    training: Prompts
    held_out: Prompts
    examples: Prompts
    """Prompt and answer of each; the target reads them where answering itself would take too long."""
    answer_starts: NDArray[np.int32]
    """Where the answer of each example begins."""
    documents: Ids

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = {f"{name}_{field}": getattr(getattr(self, name), field) for name in _SETS for field in _FIELDS}
        with path.open("wb") as file:
            np.savez_compressed(file, documents=self.documents, answer_starts=self.answer_starts, **parts)

    @classmethod
    def load(cls, path: Path) -> "PromptFile":
        with np.load(path) as parts:
            sets = {name: Prompts(*(parts[f"{name}_{field}"] for field in _FIELDS)) for name in _SETS}
            return cls(**sets, answer_starts=parts["answer_starts"], documents=parts["documents"])


_SETS, _FIELDS = ("training", "held_out", "examples"), ("ids", "bounds", "kinds")


def copying(rng: Random, *, is_generated: bool = False) -> Example:
    """A passage to be repeated word for word; `is_generated`: of invented words and names, none from documents."""
    passage = " ".join(" ".join(filler(rng, rng.randint(80, 600), is_generated=is_generated)).split())
    ask = rng.choice(("Repeat: {}", "Copy this: {}", "Say exactly: {}"))
    return Example.ask(ask.format(passage), passage, text_is(passage))


def _example(kind: str, seed: int) -> Example:
    """An example to train on. Every other copy is of invented words: nothing but the prompt tells what comes next."""
    rng = Random(seed)  # noqa: S311 - a fixed choice, nothing secret
    return copying(rng, is_generated=seed % 2 == 0) if kind == COPYING else WORKLOADS[kind](rng)


class _Maker:
    """Makes prompts as token ids, with the shipped tokenizer."""

    def __init__(self, text: Path) -> None:
        self._tokenizer, self._template = Tokenizer.load(MODEL_DIRECTORY), ChatTemplate.load(MODEL_DIRECTORY)
        [self._end] = self._tokenizer.encode("<|endoftext|>")
        use_documents(text, self._tokenizer)
        self._text = text

    def training(self, count: int) -> Iterator[tuple[str, Sequence[int]]]:
        rng = Random(_SEED)  # noqa: S311 - a fixed choice, nothing secret
        documents = {PROSE: self._documents(""), CODE: self._documents("", code=True)}
        for place, kind in enumerate(rng.choices(KINDS, [_SHARES[kind] for kind in KINDS], k=count)):
            if kind in documents:
                yield kind, self._beginning(documents[kind], Random(_SEED + place))  # noqa: S311
            elif len(ids := self._ask(_example(kind, _SEED + place))) <= _MOST_TOKENS:
                yield kind, ids

    def examples(self, count: int) -> Iterator[tuple[str, Sequence[int], int]]:
        """Kind, ids of prompt and right answer, and where the answer begins."""
        rng, names = Random(_EXAMPLE_SEED), list(_EXAMPLE_SHARES)  # noqa: S311
        for place, kind in enumerate(rng.choices(names, list(_EXAMPLE_SHARES.values()), k=count)):
            ids, start = render(_example(kind, _EXAMPLE_SEED + place), self._tokenizer, self._template)
            if len(ids) <= _MOST_TOKENS // 2:
                yield kind, ids, start

    def held_out(self, count: int) -> Iterator[tuple[str, Sequence[int]]]:
        """`count` of each kind, from the seeds and the documents that nothing was trained on."""
        documents = {PROSE: self._documents("heldout-"), CODE: self._documents("heldout-", code=True)}
        for kind in KINDS:
            made = 0
            for number in range(4 * count):
                seed = Random(HELD_OUT_SEED + number)  # noqa: S311
                if kind in documents:
                    ids: Sequence[int] = self._beginning(documents[kind], seed)
                else:
                    ids = self._ask((MEASURED.get(kind) or copying)(seed))
                if len(ids) <= _MOST_TOKENS // 2 and made < count:
                    made += 1
                    yield kind, ids

    def documents(self, rng: Random) -> Ids:
        """Whole documents of all sources in random order, each with its end."""
        chosen, total = self._documents("") + self._documents("", code=True), 0
        rng.shuffle(chosen)
        kept = []
        for document in chosen:
            kept.append(np.append(document, np.uint16(self._end)))
            total += len(document) + 1
            if total >= _DOCUMENT_TOKENS:
                break
        return np.concatenate(kept)

    def _ask(self, example: Example) -> Sequence[int]:
        return self._tokenizer.encode(prompt_text(example, self._template))

    def _documents(self, prefix: str, *, code: bool = False) -> list[Ids]:
        names = [source.name for source in SOURCES if (source.language == "code") == code]
        files = [self._text / "tokens" / f"{prefix}{name}.bin" for name in names]
        return [document for file in files for document in read_documents(file, self._end) if len(document) >= 64]

    @staticmethod
    def _beginning(documents: list[Ids], rng: Random) -> Sequence[int]:
        document = rng.choice(documents)
        size = rng.randint(32, min(256, len(document)))
        start = rng.randrange(max(1, len(document) - size))
        return [int(token_id) for token_id in document[start : start + size]]


def _make_text(text: Path, packages: Path) -> None:
    """Token files of the recipe's sources by the shipped tokenizer, unless they are there."""
    if not (text / INDEX).exists():
        tokenizer = RawTokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
        write_token_files(collect(packages), SOURCES, tokenizer, text)
    check_token_files(text, MODEL_DIRECTORY)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.drafter.prompts", description=__doc__)
    parser.add_argument(
        "--text", type=Path, default=Path(".pocket/shipped"), help="token files of the shipped tokenizer"
    )
    parser.add_argument("--packages", type=Path, default=Path("build/pocket"), help="where Debian packages are kept")
    parser.add_argument("--out", type=Path, default=Path(".pocket/drafter-prompts.npz"))
    parser.add_argument("--count", type=int, default=40_000, help="prompts to train on")
    parser.add_argument("--examples", type=int, default=50_000, help="with right answers")
    parser.add_argument("--held-out", type=int, default=32, help="prompts of each kind to measure with")
    given = parser.parse_args(arguments)
    _make_text(given.text, given.packages)
    maker = _Maker(given.text)
    training, held_out = Prompts.of(list(maker.training(given.count))), Prompts.of(list(maker.held_out(given.held_out)))
    log_progress(f"{len(training):,} prompts of {len(training.ids):,} tokens")
    made = list(maker.examples(given.examples))
    examples = Prompts.of([(kind, ids) for kind, ids, _ in made])
    starts = np.array([start for _, _, start in made], dtype=np.int32)
    PromptFile(training, held_out, examples, starts, maker.documents(Random(0))).save(given.out)  # noqa: S311
    log_progress(f"{len(made):,} examples of {len(examples.ids):,} tokens, {given.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
