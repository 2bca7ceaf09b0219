"""`python -m recipes.pocket.drafters [DIR] [--drafter DIR] [--examples 12]`: tokens a step by workload and drafter.

Prints a Markdown table: the tokens that a decode step of one stream makes, on held-out examples and on documents that
are continued by 64 tokens: without drafts, with the MTP head at depths 1 to 4, with n-gram drafts, with the DFlash
drafter at depths 3, 7 and 15, and with the choice left to the engine. Answers are the same in all columns. Drafts come
from all tokens. With `--long` another table has the DFlash drafter behind documents of about 1,000 and of about 16,000
tokens, and the ratio of the two with the interval that 95 of 100 samples of as many answers would give.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import onebox
from onebox.engine.api import SamplingParams
from onebox.pocket.ready import DRAFTER_DIRECTORY, pocket_checkpoint
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.drafter.prompts import COPYING, copying
from recipes.pocket.synthetic.example import Example
from recipes.pocket.synthetic.filler import filler
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, prompt_text

__all__ = ["main"]

_ROOT = Path(__file__).parent.parent.parent
_DOCUMENTS = "documents, continued"
_WORKLOADS = ("invoice", "records", "tools", "code", COPYING, "arithmetic", "chat", "text", _DOCUMENTS)
_MAX_TOKENS = 256
_DOCUMENT_TOKENS = 128
_LONG = (1_000, 16_000)
_LONG_WORKLOADS = ("invoice", "records", "code", "arithmetic")
_CHARACTERS_PER_TOKEN = 3.2
Prompts = Mapping[str, Sequence[str | Sequence[int]]]


class Answers(NamedTuple):
    """Of one workload: by answer, the tokens after the first, and the steps that made them."""

    tokens: list[int]
    steps: list[int]

    @property
    def tokens_a_step(self) -> float:
        return sum(self.tokens) / sum(self.steps)


@dataclass(frozen=True)
class Column:
    """A way to draft."""

    name: str
    options: dict[str, Any]


def _columns(drafter: Path) -> Iterator[Column]:
    yield Column("plain", {"speculation": "none"})
    for depth in (1, 2, 3, 4):
        yield Column(f"MTP-{depth}", {"speculation": "mtp", "num_speculative_tokens": depth})
    yield Column("n-gram", {"speculation": "ngram", "num_speculative_tokens": 8})
    for depth in (3, 7, 15):
        options = {"speculation": "dflash", "num_speculative_tokens": depth, "draft_model": drafter}
        yield Column(f"DFlash-{depth}", options)
    yield Column("auto", {"speculation": "auto", "num_speculative_tokens": 15, "draft_model": drafter})


def _prompts(directory: Path, count: int) -> Prompts:
    template, tokenizer = ChatTemplate.load(directory), Tokenizer.load(directory)
    asked: dict[str, list[str | Sequence[int]]] = {}
    for name in _WORKLOADS[:-1]:
        generator = MEASURED.get(name) or copying
        examples = (generator(Random(HELD_OUT_SEED + number)) for number in range(count))  # noqa: S311
        asked[name] = [prompt_text(example, template) for example in examples]
    texts = sorted((_ROOT / "docs").glob("*.md"))[:count]
    asked[_DOCUMENTS] = [tokenizer.encode(text.read_text(encoding="utf-8"))[:_DOCUMENT_TOKENS] for text in texts]
    return asked


def _long_prompts(directory: Path, names: Sequence[str], count: int, tokens: int) -> Prompts:
    """The same questions, each behind documents of about so many tokens."""
    template = ChatTemplate.load(directory)

    def behind(example: Example, rng: Random) -> str:
        text = "\n\n".join(filler(rng, int(tokens * _CHARACTERS_PER_TOKEN)))
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "OK."}, *example.messages]
        return template.render(messages, {"enable_thinking": example.thinking}, example.tools or ())

    asked: dict[str, list[str | Sequence[int]]] = {}
    for name in names:
        seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + count)
        asked[name] = [behind(MEASURED[name](Random(seed)), Random(seed)) for seed in seeds]  # noqa: S311
    return asked


def _measured(directory: Path, column: Column, prompts: Prompts, *, longest: int = 4096) -> dict[str, Answers]:
    """The answers of each workload, one stream at a time."""
    options = {"max_num_seqs": 1, "device": "cpu", "draft_vocab": "full", "max_model_len": longest, **column.options}
    results = {}
    with onebox.LLM(directory, **options) as llm:
        for name, asked in prompts.items():
            ignore = name == _DOCUMENTS
            params = SamplingParams(temperature=0.0, max_tokens=64 if ignore else _MAX_TOKENS, ignore_eos=ignore)
            counts = [answer.counts for answer in llm.generate(asked, params) if answer.counts]
            # The first token comes from the prompt's own step. Drafts behind the end of an answer are counted as
            # accepted, so where every step drafts, the number of these is the right one.
            tokens = [each.completion_tokens - 1 for each in counts]
            steps = [
                max(each.drafts.num_steps, number - each.drafts.num_accepted, 1)
                for number, each in zip(tokens, counts, strict=True)
            ]
            results[name] = Answers(tokens, steps)
    log_progress(f"{column.name}: " + ", ".join(f"{name} {found.tokens_a_step:.2f}" for name, found in results.items()))
    return results


def _ratio_interval(before: Answers, after: Answers) -> tuple[float, float]:
    """Within which the ratio of tokens a step, after / before, lies in 95 of 100 samples drawn from the same answers.

    The answers of both are to the same questions, so they are drawn in pairs.
    """
    rng, ratios, count = Random(0), list[float](), len(before.tokens)  # noqa: S311 - a fixed choice, nothing secret
    for _ in range(2000):
        drawn = rng.choices(range(count), k=count)
        speeds = [
            sum(found.tokens[answer] for answer in drawn) / sum(found.steps[answer] for answer in drawn)
            for found in (before, after)
        ]
        ratios.append(speeds[1] / speeds[0])
    ratios.sort()
    return ratios[50], ratios[-51]


def _table(columns: Mapping[str, Mapping[str, Answers]], names: Sequence[str]) -> Iterator[str]:
    yield "| tokens a step | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in names:
        yield f"| {name} | " + " | ".join(f"{found[name].tokens_a_step:.2f}" for found in columns.values()) + " |"


def _long_table(columns: Mapping[str, Mapping[str, Answers]], names: Sequence[str]) -> Iterator[str]:
    """The same with the ratio of the two columns."""
    head, rule, *rows = _table(columns, names)
    yield from (f"{head} ratio | 95% |", f"{rule}---|---|")
    for name, row in zip(names, rows, strict=True):
        before, after = (found[name] for found in columns.values())
        low, high = _ratio_interval(before, after)
        yield f"{row} {after.tokens_a_step / before.tokens_a_step:.3f} | {low:.3f} to {high:.3f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.drafters", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, help="the checkpoint; default: the one that is served")
    parser.add_argument("--drafter", type=Path, default=DRAFTER_DIRECTORY)
    parser.add_argument("--examples", type=int, default=12, help="of each workload")
    parser.add_argument("--only", default="", help="columns, such as MTP-4,auto; of --long, workloads; default: all")
    parser.add_argument("--long", action="store_true", help="the table of long contexts instead")
    given = parser.parse_args(arguments)
    directory = given.directory or pocket_checkpoint()
    with tempfile.TemporaryDirectory(prefix="pocket-drafters-") as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch  # nothing was counted before
        if given.long:
            column = next(each for each in _columns(given.drafter) if each.name == "DFlash-15")
            names = given.only.split(",") if given.only else list(_LONG_WORKLOADS)
            found = {
                f"behind {tokens:,} tokens": _measured(
                    directory, column, _long_prompts(directory, names, given.examples, tokens), longest=32_768
                )
                for tokens in _LONG
            }
            table = _long_table(found, names)
        else:
            prompts = _prompts(directory, given.examples)
            only = given.only.split(",") if given.only else [each.name for each in _columns(given.drafter)]
            columns = [each for each in _columns(given.drafter) if each.name in only]
            found = {each.name: _measured(directory, each, prompts) for each in columns}
            table = _table(found, _WORKLOADS)
    sys.stdout.write("\n".join(table) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
