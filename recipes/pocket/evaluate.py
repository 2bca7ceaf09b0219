"""Stage 5, `python -m recipes.pocket.evaluate [DIR] [--quick] [--out DIR]`: measures the pocket model.

Prints Markdown tables and, as the last line, the same figures as JSON. The exit code is 1 if the model misses a
requirement. Answers come from the engine: greedy, with two drafts of the MTP head per step. Perplexity, divergence (KL
over the whole vocabulary) and agreement are computed on the logits of the engine's model, for every build that `onebox
build` can make and every KV format.
"""

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import torch

import onebox
from onebox.checkpoint.recipe import Recipe, TargetFormat
from onebox.checkpoint.source import open_checkpoint
from onebox.model.load import load_model
from onebox.pocket.builds import BUILDS, build
from onebox.pocket.ready import MODEL_DIRECTORY, SERVED_BUILD
from onebox.spec.kv import KVFormat
from onebox.spec.model import read_config
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.data.tokens import check_token_files
from recipes.pocket.evaluation.pictures import picture_task
from recipes.pocket.evaluation.predictions import (
    HeldOutPassage,
    ModelVariant,
    PredictionScores,
    compare,
    example_passages,
    text_passages,
)
from recipes.pocket.evaluation.report import BuildResult, PocketEvaluation
from recipes.pocket.evaluation.tasks import TaskResult, continue_text, recall_task, workload_task
from recipes.pocket.pictures.workloads import PICTURES
from recipes.pocket.synthetic.filler import use_documents
from recipes.pocket.synthetic.workloads import MEASURED

__all__ = ["FULL", "QUICK", "TOY", "EvaluationSizes", "agreements", "evaluate", "main", "write"]

NUM_DRAFTS = 2
KV_FORMATS = ("bf16", "fp8", "turboquant", "turboquant_k3v3")
_MASTER = "master"
_BUILD_TASKS = ("invoice", "code")
"""The workloads that every build answers: JSON and code."""


@dataclass(frozen=True)
class EvaluationSizes:
    """Numbers of examples, passages and builds to measure."""

    num_examples: int
    """Answers of the master to each workload."""
    num_served: int
    """Answers of the served build to each workload."""
    num_pictures: int
    """Questions about pictures of each kind, for the master; the served build gets half as many."""
    recall_lengths: tuple[int, ...]
    num_keys: int
    """Hidden keys per length for the master; the served build gets half as many."""
    num_texts: int
    """Texts of each source that the master predicts and continues."""
    num_right_answers: int
    """Right answers of each workload that the master predicts."""
    num_compared: int
    """Texts of each source and right answers of each workload that every build predicts."""
    passage_tokens: int
    max_tokens: int
    builds: tuple[str, ...]
    num_build_examples: int


FULL = EvaluationSizes(
    num_examples=100,
    num_served=30,
    num_pictures=60,
    recall_lengths=(4096, 30_000),
    num_keys=50,
    num_texts=8,
    num_right_answers=24,
    num_compared=2,
    passage_tokens=768,
    max_tokens=512,
    builds=tuple(BUILDS),
    num_build_examples=20,
)
QUICK = EvaluationSizes(
    num_examples=8,
    num_served=4,
    num_pictures=6,
    recall_lengths=(1024, 4096),
    num_keys=5,
    num_texts=2,
    num_right_answers=2,
    num_compared=1,
    passage_tokens=512,
    max_tokens=512,
    builds=("hybrid", SERVED_BUILD),
    num_build_examples=4,
)
_COUNTS = [each.name for each in fields(EvaluationSizes) if each.name.startswith("num_")]
TOY = replace(QUICK, **dict.fromkeys(_COUNTS, 1), recall_lengths=(256,), max_tokens=4, builds=())
"""One of everything, in four tokens: for a model that cannot answer."""


def evaluate(directory: Path, data: Path, kv_formats: Sequence[str], sizes: EvaluationSizes) -> PocketEvaluation:
    """Measures the checkpoint in `directory`; `data` has the held-out text, if it was collected."""
    started = time.monotonic()
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    if (data / "index.json").exists():
        check_token_files(data, directory)
        use_documents(data, tokenizer)
    else:
        log_progress(f"no text in {data}: texts are skipped, and keys are hidden in generated sentences")
    with tempfile.TemporaryDirectory(prefix="pocket-builds-") as scratch:
        made = _make_builds(directory, Path(scratch), sizes.builds)
        longest = sizes.passage_tokens
        texts = list(text_passages(data, tokenizer, sizes.num_texts, longest))
        answers = list(example_passages(tokenizer, template, sizes.num_right_answers, longest))
        fonts = _held_out_fonts(directory, data)
        tasks = list(_answers(directory, fonts, (sizes.num_examples, sizes.num_keys, sizes.num_pictures), sizes))
        continuations = list(_continuations(directory, texts, sizes))
        served = list(_served(made, fonts, sizes))
        builds = [_build_result(name, path, sizes) for name, path in made.items()]
        held_out = agreements({_MASTER: directory}, [*texts, *answers], kv_formats[:1])
        few = [
            *text_passages(data, tokenizer, sizes.num_compared, longest),
            *example_passages(tokenizer, template, sizes.num_compared, longest),
        ]
        compared = agreements(made, few, kv_formats)
    spec = open_checkpoint(directory).spec
    kv_bytes = {name: KVFormat.parse(name).bytes_per_token(spec, with_mtp=False) for name in kv_formats}
    where = _where(directory, time.monotonic() - started)
    (perplexities,) = held_out.values()
    return PocketEvaluation(where, tasks, served, continuations, perplexities, builds, compared, kv_bytes)


def _make_builds(directory: Path, scratch: Path, names: Sequence[str]) -> dict[str, Path]:
    """The directory of the master and of each build of it, by name."""
    made = {_MASTER: directory}
    for name in names:
        build(name, directory, scratch / name)
        made[name] = scratch / name
    log_progress(f"made {len(names)} builds")
    return made


def _open(directory: Path) -> "onebox.LLM":
    sequences = 64 if torch.cuda.is_available() else 32
    # From all tokens: what was counted before must not decide what is measured.
    options = {"num_speculative_tokens": NUM_DRAFTS, "max_num_seqs": sequences, "draft_vocab": "full"}
    return onebox.LLM(directory, speculation="mtp", **options)


def _answers(
    directory: Path, fonts: Path | None, numbers: tuple[int, int, int], sizes: EvaluationSizes
) -> Iterator[TaskResult]:
    """Examples of every workload, keys by length of the text around them, and pictures drawn with `fonts`.

    `numbers` are those of examples, keys and pictures of each kind.
    """
    num_examples, num_keys, num_pictures = numbers
    with _open(directory) as llm:
        for name in MEASURED:
            yield _logged(workload_task(llm, directory, name, num_examples, sizes.max_tokens))
        for length in sizes.recall_lengths:
            yield _logged(recall_task(llm, directory, length, num_keys, sizes.max_tokens))
        if fonts:
            for name in PICTURES:
                yield _logged(picture_task(llm, directory, fonts, name, num_pictures, sizes.max_tokens))


def _served(made: dict[str, Path], fonts: Path | None, sizes: EvaluationSizes) -> Iterator[TaskResult]:
    """The same for the served build, if it was made."""
    if SERVED_BUILD in made:
        numbers = (sizes.num_served, -(-sizes.num_keys // 2), -(-sizes.num_pictures // 2))
        yield from _answers(made[SERVED_BUILD], fonts, numbers, sizes)


def _held_out_fonts(directory: Path, data: Path) -> Path | None:
    """The fonts to draw pictures with: None for a model without a tower, or where there are none."""
    fonts = data / "fonts" / "held-out"
    if read_config(directory).vision is None:
        return None
    if not fonts.exists():
        log_progress(f"no fonts in {fonts}: pictures are skipped")
        return None
    return fonts


def _continuations(directory: Path, prompts: Sequence[HeldOutPassage], sizes: EvaluationSizes) -> Iterator[TaskResult]:
    with _open(directory) as llm:
        for name, passages in groupby(prompts, lambda passage: passage.name):
            yield continue_text(llm, name, list(passages), min(64, sizes.max_tokens))
    log_progress(f"continued {len(prompts)} texts")


def _build_result(name: str, directory: Path, sizes: EvaluationSizes) -> BuildResult:
    num_bytes = sum(entry.nbytes for entry in open_checkpoint(directory).tensors.values())
    with _open(directory) as llm:
        tasks = [
            workload_task(llm, directory, task, sizes.num_build_examples, sizes.max_tokens) for task in _BUILD_TASKS
        ]
    log_progress(f"measured the build {name}")
    return BuildResult(name, num_bytes, tasks)


def _logged(task: TaskResult) -> TaskResult:
    log_progress(f"{task.name}: {task.num} answers, {task.scores_text}; drafts accepted {task.acceptance_text}")
    return task


def agreements(
    made: dict[str, Path], passages: Sequence[HeldOutPassage], kv_formats: Sequence[str]
) -> dict[str, PredictionScores]:
    """The scores of every build with every KV format."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # The MTP head is not used in these predictions: builds that differ only in it are computed once.
    alike = {name: _without_mtp(name) for name in made}
    first = {recipe: name for name, recipe in reversed(alike.items())}
    models = {name: load_model(made[name], device, dtype) for name in first.values()}
    variants = {
        f"{name} / {kv}": ModelVariant(models[name], KVFormat.parse(kv))
        for name in made
        if name in models
        for kv in kv_formats
    }
    log_progress(f"{len(passages)} passages for {len(variants)} pairs of build and KV format")
    found = compare(variants, _counted(passages))
    return {f"{name} / {kv}": found[f"{first[alike[name]]} / {kv}"] for name in made for kv in kv_formats}


def _without_mtp(name: str) -> Recipe:
    return replace(BUILDS.get(name, Recipe()), mtp=TargetFormat.KEEP)


def _counted(passages: Sequence[HeldOutPassage]) -> Iterator[HeldOutPassage]:
    for number, passage in enumerate(passages):
        if number % 10 == 0:
            log_progress(f"passage {number} of {len(passages)}")
        yield passage


def _where(directory: Path, seconds: float) -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "checkpoint": directory.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "onebox": onebox.__version__,
        "torch": torch.__version__,
        "device": f"{device}, {os.cpu_count()} cores",
        "minutes": f"{seconds / 60:.1f}",
    }


def write(found: PocketEvaluation, out: Path) -> None:
    """Writes evaluation.md and then evaluation.json to `out`: if the latter exists, so does the former."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.md").write_text(found.as_markdown() + "\n", encoding="utf-8")
    scratch = out / "evaluation.json.partial"
    scratch.write_text(found.as_json() + "\n", encoding="utf-8")
    scratch.rename(out / "evaluation.json")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.evaluate", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL_DIRECTORY, help="the checkpoint")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="output of `prepare`; default .pocket")
    parser.add_argument(
        "--kv", nargs="+", default=list(KV_FORMATS), help="KV formats; the others are compared with the first"
    )
    parser.add_argument("--quick", action="store_true", help="a few examples of everything")
    parser.add_argument("--out", type=Path, help="also write evaluation.md and evaluation.json to this directory")
    given = parser.parse_args(arguments)

    def run() -> int:
        for name in given.kv:
            KVFormat.parse(name)  # refuses a wrong name before anything is measured
        if not torch.cuda.is_available():
            # The matrices are too small for parallel work: two threads take longer than one.
            torch.set_num_threads(1)
        found = evaluate(given.directory, given.data, given.kv, QUICK if given.quick else FULL)
        if given.out:
            write(found, given.out)
        sys.stdout.write(f"{found.as_markdown()}\n\n{found.as_json()}\n")
        return 0 if all(claim.holds for claim in found.claims) else 1

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
