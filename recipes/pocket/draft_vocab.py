"""`python -m recipes.pocket.draft_vocab [DIR] [--requests 200] [--examples 24]`: what a draft vocabulary costs.

Prints a Markdown table: for each workload the share of first drafts that is accepted, and of second ones after it, on
held-out examples, with drafts from all tokens and from lists of a sixth of them: the lowest ids; what an engine lists
after answering so many other requests; and after answering none of this workload. The last two follow what is said.
Answers are the same in all columns. The exit code is 1 if the counted list loses more than 2 points of first drafts.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import onebox
from onebox.engine.api import AcceptanceCounts, SamplingParams, kept_counts_path
from onebox.pocket.ready import pocket_checkpoint
from onebox.spec.draft_vocab import default_draft_vocab_size, first_tokens
from onebox.spec.model import read_config
from onebox.spec.token_counts import KeptCounts, write_kept_counts, write_token_list
from onebox.text.chat import ChatTemplate
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.evaluation.tasks import TaskResult, workload_task
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, SHARES, prompt_text

__all__ = ["main"]

_COUNTED_SEED = HELD_OUT_SEED + 10**6
"""Requests that are counted are none of those that are measured."""
_MAX_TOKENS = 512
_MOST_LOST = 0.02
Results = dict[str, TaskResult]


def _open(directory: Path, draft_vocab: str) -> onebox.LLM:
    options = {"speculation": "mtp", "num_speculative_tokens": 2, "max_num_seqs": 32, "device": "cpu"}
    return onebox.LLM(directory, draft_vocab=draft_vocab, **options)


def _measured(llm: onebox.LLM, directory: Path, num_examples: int, names: Sequence[str] = tuple(MEASURED)) -> Results:
    return {name: workload_task(llm, directory, name, num_examples, _MAX_TOKENS) for name in names}


def _count(llm: onebox.LLM, directory: Path, num_requests: int) -> dict[str, Counter[int]]:
    """What the model said in so many requests, mixed as in training, by workload."""
    template, rng = ChatTemplate.load(directory), Random(0)  # noqa: S311
    names = rng.choices([*SHARES], [*SHARES.values()], k=num_requests)
    examples = [MEASURED[name](Random(_COUNTED_SEED + place)) for place, name in enumerate(names)]  # noqa: S311
    prompts = [prompt_text(example, template) for example in examples]
    said: dict[str, Counter[int]] = {name: Counter() for name in SHARES}
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS))
    for name, answer in zip(names, answers, strict=True):
        said[name].update(answer.token_ids)
    return said


def _apart(directory: Path, said: Mapping[str, Counter[int]], name: str, num_examples: int) -> Results:
    """A workload that comes to an engine which has only answered others; the list follows it as it is answered."""
    vocab_size, others = read_config(directory).vocab_size, [each for other, each in said.items() if other != name]
    path, model = kept_counts_path(directory)
    write_kept_counts(path, KeptCounts(model, vocab_size, dict(sum(others, Counter()))))
    with _open(directory, "auto") as llm:
        return _measured(llm, directory, num_examples, [name])


def _lowest(directory: Path, path: Path, listed: Sequence[int], num_examples: int) -> Results:
    write_token_list(path, dict.fromkeys(listed, 0))
    with _open(directory, str(path)) as llm:
        return _measured(llm, directory, num_examples)


def _measure(directory: Path, num_requests: int, num_examples: int, scratch: Path) -> dict[str, Results]:
    columns: dict[str, Results] = {}
    with _open(directory, "full") as llm:
        columns["all tokens"] = _measured(llm, directory, num_examples)
        added, vocab_size = llm.tokenizer.added_token_ids, llm.engine.vocab_size
    log_progress("measured with all tokens")
    size = default_draft_vocab_size(vocab_size) or vocab_size
    lowest = first_tokens(vocab_size, size, added)
    columns["the lowest ids"] = _lowest(directory, scratch / "lowest", lowest, num_examples)
    log_progress("measured with the lowest ids")
    with _open(directory, "auto") as llm:
        said = _count(llm, directory, num_requests)
        total, coverage = sum(map(Counter.total, said.values())), llm.engine.stats().draft_vocab
        log_progress(f"counted {total:,} tokens: {coverage}")
        columns[f"after {num_requests} requests"] = _measured(llm, directory, num_examples)
    log_progress("measured with the counted list")
    apart: Results = {}
    for name in MEASURED:
        apart |= _apart(directory, said, name, num_examples)
        log_progress(f"measured {name} after the others")
    return columns | {f"after {num_requests} of other workloads": apart}


def _total(results: Results) -> TaskResult:
    tasks = results.values()
    drafts = sum((task.drafts for task in tasks), AcceptanceCounts())
    return TaskResult("all", sum(task.num for task in tasks), {}, drafts)


def _table(columns: Mapping[str, Results]) -> Iterator[str]:
    yield "| 1st / 2nd draft accepted | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    totals = {name: _total(results) for name, results in columns.items()}
    for workload in (*MEASURED, None):
        row = [results[workload] if workload else totals[name] for name, results in columns.items()]
        cells = " | ".join(task.acceptance_text.replace(" | ", " / ") for task in row)
        yield f"| {row[0].name} ({row[0].num}) | {cells} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.draft_vocab", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, help="the checkpoint; default: the one that is served")
    parser.add_argument("--requests", type=int, default=200, help="answered and counted before measuring")
    parser.add_argument("--examples", type=int, default=24, help="measured of each workload")
    given = parser.parse_args(arguments)
    directory = given.directory or pocket_checkpoint()
    with tempfile.TemporaryDirectory(prefix="pocket-draft-vocab-") as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch  # nothing was counted before
        columns = _measure(directory, given.requests, given.examples, Path(scratch))
    sys.stdout.write("\n".join(_table(columns)) + "\n")
    whole, _, counted, _ = (_total(results).acceptance(0) or 0.0 for results in columns.values())
    lost = whole - counted
    sys.stdout.write(f"\nFirst drafts lost by the counted list: {100 * lost:.2f} points.\n")
    return int(lost > _MOST_LOST)


if __name__ == "__main__":
    sys.exit(run_command(main))
