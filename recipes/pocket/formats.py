"""`python -m recipes.pocket.formats [DIR] [--examples 24]`: what formats of MTP head and shared experts cost.

Two Markdown tables. The first has the share of first drafts that is accepted, and of second ones after it, for each
format of the MTP head behind the same body, so that all columns draft for the same answers. The second has perplexity
and KL of bodies that differ in their shared experts. Texts are this repository's documents, which the pocket model was
not trained on: no data has to be collected.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

import onebox
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.model.load import load_model
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.kv import KVFormat
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.evaluation.predictions import (
    HeldOutPassage,
    ModelVariant,
    PredictionScores,
    compare,
    example_passages,
)
from recipes.pocket.evaluation.tasks import TaskResult, continue_text, workload_task
from recipes.pocket.synthetic.workloads import MEASURED

__all__ = ["HEADS", "SHARED", "acceptance_table", "main"]

_FP8, _INT4, _INT8 = TargetFormat.FP8, TargetFormat.INT4, TargetFormat.INT8


_BODY = Recipe(experts=_INT4, attention=_FP8, delta=_FP8, shared=_FP8, lm_head=_INT8)


HEADS = {
    "bf16": _BODY,
    "fp8": replace(_BODY, mtp=_FP8),
    "auto: int4 experts, fp8 rest": replace(_BODY, mtp=TargetFormat.AUTO),
    "int4": replace(_BODY, mtp=_INT4),
}
SHARED = {
    "master": Recipe(),
    "shared experts bf16": replace(_BODY, shared=TargetFormat.KEEP),
    "shared experts fp8": _BODY,
    "shared experts int4": replace(_BODY, shared=_INT4),
}
_DOCUMENTS = Path(__file__).parents[2] / "docs"
_PASSAGE_TOKENS = 768
_CONTINUED_TOKENS = 64


def _documents(tokenizer: Tokenizer) -> list[HeldOutPassage]:
    """The first tokens of each of the repository's documents."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(_DOCUMENTS.glob("*.md")))
    return [HeldOutPassage("documents", tuple(tokenizer.encode(text)[:_PASSAGE_TOKENS]), 1) for text in texts]


def _make(recipes: Mapping[str, Recipe], master: Path, scratch: Path) -> dict[str, Path]:
    made = {}
    for number, (name, recipe) in enumerate(recipes.items()):
        made[name] = scratch / str(number)
        run_build(plan_build(recipe, BuildSources(base=open_source("base", master))), made[name])
    return made


def _drafted(directory: Path, num_examples: int) -> Iterator[TaskResult]:
    """The answers to every workload, and the continued documents, with two drafts a step."""
    options = {"num_speculative_tokens": 2, "max_num_seqs": 32, "draft_vocab": "full"}
    with onebox.LLM(directory, speculation="mtp", **options) as llm:
        for name in MEASURED:
            yield workload_task(llm, directory, name, num_examples, 512)
        yield continue_text(llm, "documents, continued", _documents(llm.tokenizer), _CONTINUED_TOKENS)


def acceptance_table(found: Mapping[str, list[TaskResult]]) -> Iterator[str]:
    yield "| 1st / 2nd draft accepted | " + " | ".join(found) + " |"
    yield "|---" * (len(found) + 1) + "|"
    for row in zip(*found.values(), strict=True):
        cells = " | ".join(task.acceptance_text.replace(" | ", " / ") for task in row)
        yield f"| {row[0].name} ({row[0].num}) | {cells} |"
    totals = [sum((task.drafts for task in tasks[1:]), tasks[0].drafts) for tasks in found.values()]
    alls = (TaskResult("all", 0, {}, total) for total in totals)
    yield "| all | " + " | ".join(each.acceptance_text.replace(" | ", " / ") for each in alls) + " |"


def _agreement_table(found: Mapping[str, PredictionScores]) -> Iterator[str]:
    names = next(iter(found.values())).counts
    yield "| build | perplexity | mean KL to the master | same most likely token | perplexity of documents |"
    yield "|---|---|---|---|---|"
    for name, each in found.items():
        documents = each.perplexities["documents"] if "documents" in names else float("nan")
        yield (
            f"| {name} | {each.perplexity:.4f} | {each.mean_divergence:.5f} | {each.top_agreement:.2%} "
            f"| {documents:.3f} |"
        )
    first = next(iter(found.values()))
    yield ""
    yield f"{first.num_tokens:,} predicted tokens of {first.num_passages} passages."


def _agreements(made: Mapping[str, Path], passages: Iterable[HeldOutPassage]) -> dict[str, PredictionScores]:
    kv, device = KVFormat.parse("bf16"), torch.device("cpu")
    models = {name: load_model(path, device, torch.float32) for name, path in made.items()}
    return compare({name: ModelVariant(model, kv) for name, model in models.items()}, passages)


def _tables(master: Path, num_examples: int) -> Iterator[str]:
    tokenizer, template = Tokenizer.load(master), ChatTemplate.load(master)
    with tempfile.TemporaryDirectory(prefix="pocket-formats-") as scratch:
        (Path(scratch) / "heads").mkdir()
        heads = _make(HEADS, master, Path(scratch) / "heads")
        found = {}
        for name, directory in heads.items():
            found[name] = list(_drafted(directory, num_examples))
            log_progress(f"drafted with the head in {name}")
        yield from acceptance_table(found)
        yield ""
        (Path(scratch) / "shared").mkdir()
        bodies = _make(SHARED, master, Path(scratch) / "shared")
        answers = example_passages(tokenizer, template, num_examples, _PASSAGE_TOKENS)
        yield from _agreement_table(_agreements(bodies, [*_documents(tokenizer), *answers]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.formats", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL_DIRECTORY, help="the BF16 checkpoint")
    parser.add_argument("--examples", type=int, default=24, help="answers to each workload")
    given = parser.parse_args(arguments)

    def run() -> int:
        torch.set_num_threads(1)
        for line in _tables(given.directory, given.examples):
            sys.stdout.write(f"{line}\n")
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
