"""All that is claimed of the pocket model, measured: `python -m onebox.pocket.evaluate [DIR] [--quick]`.

Prints Markdown tables and, as the last line, the same as JSON. Answers come from the engine, greedily, with two drafts
of the MTP head a step. Perplexity, divergence (KL over the whole vocabulary) and agreement are computed on the logits
of the engine's model, in every build that `onebox build` makes and over every KV format.
"""

import argparse
import datetime
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import onebox
from onebox.model.assemble import load_model
from onebox.pocket.agree import Agreement, Variant, compare
from onebox.pocket.builds import BUILDS, build
from onebox.pocket.filler import use_documents
from onebox.pocket.passages import Passage, example_passages, text_passages
from onebox.pocket.synthetic import WORKLOADS
from onebox.pocket.tasks import TaskResult, continue_text, recall_task, workload_task
from onebox.pocket.tokenizer import MODEL_DIRECTORY
from onebox.spec.kv import KVFormat
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer

__all__ = ["FULL", "QUICK", "Sizes", "evaluate", "main"]

NUM_DRAFTS = 2
KV_FORMATS = ("bf16", "fp8", "turboquant", "turboquant_k3v3")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    num_examples: int
    recall_lengths: tuple[int, ...]
    num_keys: int
    num_passages: int
    passage_tokens: int
    max_tokens: int
    builds: tuple[str, ...]


FULL = Sizes(200, (1024, 2048, 4096), 50, 12, 2048, 768, tuple(BUILDS))
QUICK = Sizes(8, (1024, 4096), 5, 1, 1024, 512, ("hybrid",))


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured of one checkpoint, and where."""

    where: dict[str, str]
    tasks: list[TaskResult]
    agreements: dict[str, Agreement]
    """By "build / KV format"; the first is the checkpoint itself with a bf16 cache."""


def evaluate(directory: Path, data: Path, kv_formats: Sequence[str], sizes: Sizes) -> Evaluation:
    """Measures the checkpoint in `directory`; `data` has the held-out text, where it was collected."""
    tokenizer = Tokenizer.load(directory)
    if (data / "index.json").exists():
        use_documents(data, tokenizer)
    texts = list(text_passages(data, tokenizer, sizes.num_passages, sizes.passage_tokens))
    template = ChatTemplate.load(directory)
    examples = list(example_passages(tokenizer, template, sizes.num_passages, sizes.passage_tokens))
    tasks = list(_tasks(directory, texts, sizes))
    return Evaluation(_where(directory), tasks, _agreements(directory, [*texts, *examples], kv_formats, sizes.builds))


def _tasks(directory: Path, texts: Sequence[Passage], sizes: Sizes) -> Iterator[TaskResult]:
    sequences = 64 if torch.cuda.is_available() else 8
    options = {"speculation": "mtp", "num_speculative_tokens": NUM_DRAFTS, "max_num_seqs": sequences}
    with onebox.LLM(directory, **options) as llm:
        for name in WORKLOADS:
            yield workload_task(llm, directory, name, sizes.num_examples, sizes.max_tokens)
        for length in sizes.recall_lengths:
            yield recall_task(llm, directory, length, sizes.num_keys, sizes.max_tokens)
        for name, passages in groupby(texts, lambda passage: passage.name):
            yield continue_text(llm, name, list(passages), min(64, sizes.max_tokens))


def _agreements(
    directory: Path, passages: Sequence[Passage], kv_formats: Sequence[str], builds: Sequence[str]
) -> dict[str, Agreement]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    variants: dict[str, Variant] = {}
    with tempfile.TemporaryDirectory(prefix="pocket-builds-") as scratch:
        for name in ("master", *builds):
            made = directory if name == "master" else Path(scratch) / name
            if name != "master":
                build(name, directory, made)
            model = load_model(made, device, dtype)
            # A cheaper cache matters in each build alike, so it is told apart on the first two.
            formats = kv_formats if name in ("master", "hybrid") else kv_formats[:1]
            variants |= {f"{name} / {kv}": Variant(model, KVFormat.parse(kv)) for kv in formats}
    return compare(variants, passages)


def _where(directory: Path) -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "checkpoint": directory.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "onebox": onebox.__version__,
        "torch": torch.__version__,
        "device": device,
    }


def as_markdown(found: Evaluation) -> str:
    where = ", ".join(f"{key} {value}" for key, value in found.where.items())
    lines = [f"Measured: {where}.", "", *_task_table(found.tasks), ""]
    first = next(iter(found.agreements.values()))
    lines += ["| held-out | perplexity | tokens |", "|---|---|---|"]
    lines += [f"| {name} | {value:.2f} | {first.counts[name]:,} |" for name, value in first.perplexities.items()]
    lines += [
        "",
        "| build / KV cache | perplexity | mean KL to the first | same likeliest token |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {each.perplexity:.3f} | {each.mean_divergence:.5f} | {each.top_agreement:.2%} |"
        for name, each in found.agreements.items()
    ]
    return "\n".join(lines)


def _task_table(tasks: Sequence[TaskResult]) -> Iterator[str]:
    yield "| task | answers | prompt tokens | scores | 1st draft kept | 2nd draft kept after it |"
    yield "|---|---|---|---|---|---|"
    for task in tasks:
        scores = ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in task.scores.items()) or "-"
        kept = (task.kept(place) for place in range(NUM_DRAFTS))
        shares = " | ".join("-" if share is None else f"{share:.1%}" for share in kept)
        yield f"| {task.name} | {task.num} | {task.mean_prompt_tokens:.0f} | {scores} | {shares} |"


def as_json(found: Evaluation) -> str:
    """One line with all numbers of the tables."""
    agreements: dict[str, Any] = {
        name: {
            "perplexity": each.perplexity,
            "mean_kl": each.mean_divergence,
            "top_agreement": each.top_agreement,
            "perplexities": each.perplexities,
        }
        for name, each in found.agreements.items()
    }
    return json.dumps({**found.where, "tasks": [asdict(task) for task in found.tasks], "agreements": agreements})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m onebox.pocket.evaluate", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL_DIRECTORY, help="the checkpoint")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="what `prepare` made; default .pocket")
    parser.add_argument(
        "--kv", nargs="+", default=list(KV_FORMATS), help="KV formats; the first is the one compared to"
    )
    parser.add_argument("--quick", action="store_true", help="a few of everything")
    given = parser.parse_args(arguments)
    found = evaluate(given.directory, given.data, given.kv, QUICK if given.quick else FULL)
    print(as_markdown(found))  # noqa: T201
    print(as_json(found))  # noqa: T201


if __name__ == "__main__":
    main()
