"""Stage 1, `python -m recipes.pocket.prepare`: collects text, trains the tokenizer, writes token files."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from onebox.model.random_text import text_files
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.text.chat import ChatTemplate
from recipes.pocket.command import run_command
from recipes.pocket.data.collect import collect
from recipes.pocket.data.sources import SOURCES
from recipes.pocket.data.tokens import (
    balance_groups,
    split_held_out,
    train_tokenizer,
    write_text_files,
    write_token_files,
)
from recipes.pocket.synthetic.workloads import WORKLOADS, prompt_text

__all__ = ["main", "prepare"]

_CHARACTERS_PER_LANGUAGE = 4_000_000
_EXAMPLES_PER_WORKLOAD = 1_500


def prepare(packages: Path, output: Path, model: Path, tokenizer_of: Path | None = None) -> dict[str, dict[str, Any]]:
    """Downloads to `packages`, writes token files and their index to `output`, the tokenizer to `model`.

    The tokenizer is trained, or that of the model in `tokenizer_of`. Returns the index: for each source its language,
    licence, and numbers of training and held-out tokens.
    """
    documents = collect(packages)
    if tokenizer_of:
        tokenizer = Tokenizer.from_file(str(tokenizer_of / "tokenizer.json"))
    else:
        tokenizer = _train_tokenizer(documents)
    write_text_files(tokenizer, model)
    return write_token_files(documents, SOURCES, tokenizer, output)


def _train_tokenizer(documents: Mapping[str, list[str]]) -> Tokenizer:
    """Of the training documents, all languages alike, and of examples."""
    by_language: dict[str, list[str]] = {"generated": _generated()}
    for source in SOURCES:
        training, _ = split_held_out(documents[source.name])
        by_language.setdefault(source.language, []).extend(training)
    for language in by_language.values():
        Random(0).shuffle(language)  # noqa: S311 - a fixed order, nothing secret
    return train_tokenizer(balance_groups(by_language, _CHARACTERS_PER_LANGUAGE))


def _generated() -> list[str]:
    """Examples as text, so that the vocabulary has tokens for JSON, XML tags and invoices."""
    template = ChatTemplate(text_files()["chat_template.jinja"])
    examples = (WORKLOADS[name](Random(seed)) for name in WORKLOADS for seed in range(_EXAMPLES_PER_WORKLOAD))  # noqa: S311
    return [prompt_text(example, template) + example.answer for example in examples]


def _report(index: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'source':16}{'language':10}{'tokens':>12}{'held out':>10}"]
    for name, entry in index.items():
        lines.append(f"{name:16}{entry['language']:10}{entry['tokens']:12,}{entry['heldout_tokens']:10,}")
    total, held_out = (sum(entry[key] for entry in index.values()) for key in ("tokens", "heldout_tokens"))
    lines.append(f"{'all':26}{total:12,}{held_out:10,}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.prepare", description=__doc__)
    parser.add_argument("--packages", type=Path, default=Path("build/pocket"), help="where Debian packages are kept")
    parser.add_argument("--output", type=Path, default=Path(".pocket"), help="where token files and index go")
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY, help="where the tokenizer goes")
    parser.add_argument("--tokenizer", type=Path, help="a model whose tokenizer is taken instead of training one")
    given = parser.parse_args(arguments)

    def run() -> int:
        index = prepare(given.packages, given.output, given.model, given.tokenizer)
        sys.stdout.write(_report(index) + "\n")
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
