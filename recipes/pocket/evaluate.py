"""All that is claimed of the pocket model, measured: `python -m recipes.pocket.evaluate [DIR] [--quick] [--out DIR]`.

Prints Markdown tables and, as the last line, the same as JSON; exits with 1 if the model misses what it must reach.
Answers come from the engine, greedily, with two drafts of the MTP head a step. Perplexity, divergence (KL over the
whole vocabulary) and agreement are computed on the logits of the engine's model, in every build that `onebox build`
makes and over every KV format.
"""

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

import onebox
from onebox.checkpoint.recipe import Recipe, TargetFormat
from onebox.checkpoint.source import open_checkpoint
from onebox.model.assemble import load_model
from onebox.pocket.builds import BUILDS, build
from onebox.pocket.ready import MODEL_DIRECTORY, SERVED_BUILD
from onebox.spec.kv import KVFormat
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import run_command, say
from recipes.pocket.evaluation.agreement import Agreement, Variant, compare
from recipes.pocket.evaluation.passages import Passage, example_passages, text_passages
from recipes.pocket.evaluation.report import BuildResult, Evaluation
from recipes.pocket.evaluation.tasks import TaskResult, continue_text, recall_task, workload_task
from recipes.pocket.synthetic.filler import use_documents
from recipes.pocket.synthetic.workloads import MEASURED

__all__ = ["FULL", "QUICK", "Sizes", "agreements", "evaluate", "main", "write"]

NUM_DRAFTS = 2
KV_FORMATS = ("bf16", "fp8", "turboquant", "turboquant_k3v3")
_MASTER = "master"
_BUILD_TASKS = ("invoice", "code")
"""What each build is asked: JSON and code, for which its drafts are counted."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    num_examples: int
    """Answers to each workload by the master."""
    num_served: int
    """Answers to each workload by the build that is served."""
    recall_lengths: tuple[int, ...]
    num_keys: int
    """Keys hidden in each of these lengths; half as many are asked of the build that is served."""
    num_texts: int
    """Texts of each source that the master predicts and goes on with."""
    num_right_answers: int
    """Right answers of each workload that the master predicts."""
    num_compared: int
    """Texts of each source, and right answers of each workload, that every build predicts."""
    passage_tokens: int
    max_tokens: int
    builds: tuple[str, ...]
    num_build_examples: int


FULL = Sizes(
    num_examples=100,
    num_served=30,
    recall_lengths=(4096,),
    num_keys=50,
    num_texts=8,
    num_right_answers=24,
    num_compared=2,
    passage_tokens=768,
    max_tokens=512,
    builds=tuple(BUILDS),
    num_build_examples=20,
)
QUICK = Sizes(
    num_examples=8,
    num_served=4,
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


def evaluate(directory: Path, data: Path, kv_formats: Sequence[str], sizes: Sizes) -> Evaluation:
    """Measures the checkpoint in `directory`; `data` has the held-out text, where it was collected."""
    started = time.monotonic()
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    if (data / "index.json").exists():
        use_documents(data, tokenizer)
    else:
        say(f"no text in {data}: texts are left out, and keys are hidden in generated sentences")
    with tempfile.TemporaryDirectory(prefix="pocket-builds-") as scratch:
        made = _make_builds(directory, Path(scratch), sizes.builds)
        longest = sizes.passage_tokens
        texts = list(text_passages(data, tokenizer, sizes.num_texts, longest))
        answers = list(example_passages(tokenizer, template, sizes.num_right_answers, longest))
        tasks = list(_answers(directory, sizes.num_examples, sizes.num_keys, sizes))
        continuations = list(_continuations(directory, texts, sizes))
        served = list(_served(made, sizes))
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
    return Evaluation(where, tasks, served, continuations, perplexities, builds, compared, kv_bytes)


def _make_builds(directory: Path, scratch: Path, names: Sequence[str]) -> dict[str, Path]:
    """The directory of the master and of each build of it, by name."""
    made = {_MASTER: directory}
    for name in names:
        build(name, directory, scratch / name)
        made[name] = scratch / name
    say(f"made {len(names)} builds")
    return made


def _open(directory: Path) -> "onebox.LLM":
    sequences = 64 if torch.cuda.is_available() else 32
    return onebox.LLM(directory, speculation="mtp", num_speculative_tokens=NUM_DRAFTS, max_num_seqs=sequences)


def _answers(directory: Path, num_examples: int, num_keys: int, sizes: Sizes) -> Iterator[TaskResult]:
    """Examples of every workload, then keys by the length of what they are hidden in."""
    with _open(directory) as llm:
        for name in MEASURED:
            yield _told(workload_task(llm, directory, name, num_examples, sizes.max_tokens))
        for length in sizes.recall_lengths:
            yield _told(recall_task(llm, directory, length, num_keys, sizes.max_tokens))


def _served(made: dict[str, Path], sizes: Sizes) -> Iterator[TaskResult]:
    """The same of the build that is served, where it was made."""
    if SERVED_BUILD in made:
        yield from _answers(made[SERVED_BUILD], sizes.num_served, -(-sizes.num_keys // 2), sizes)


def _continuations(directory: Path, prompts: Sequence[Passage], sizes: Sizes) -> Iterator[TaskResult]:
    with _open(directory) as llm:
        for name, passages in groupby(prompts, lambda passage: passage.name):
            yield continue_text(llm, name, list(passages), min(64, sizes.max_tokens))
    say(f"went on with {len(prompts)} texts")


def _build_result(name: str, directory: Path, sizes: Sizes) -> BuildResult:
    num_bytes = sum(entry.nbytes for entry in open_checkpoint(directory).tensors.values())
    with _open(directory) as llm:
        tasks = [
            workload_task(llm, directory, task, sizes.num_build_examples, sizes.max_tokens) for task in _BUILD_TASKS
        ]
    say(f"asked the build {name}")
    return BuildResult(name, num_bytes, tasks)


def _told(task: TaskResult) -> TaskResult:
    say(f"{task.name}: {task.num} answers, {task.scores_text}; drafts kept {task.kept_text}")
    return task


def agreements(made: dict[str, Path], passages: Sequence[Passage], kv_formats: Sequence[str]) -> dict[str, Agreement]:
    """Every build over every KV format."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # The MTP head has no part in these predictions: builds that differ in it alone are computed once.
    alike = {name: _without_mtp(name) for name in made}
    first = {recipe: name for name, recipe in reversed(alike.items())}
    models = {name: load_model(made[name], device, dtype) for name in first.values()}
    variants = {
        f"{name} / {kv}": Variant(models[name], KVFormat.parse(kv))
        for name in made
        if name in models
        for kv in kv_formats
    }
    say(f"{len(passages)} passages through {len(variants)} pairs of build and KV format")
    found = compare(variants, _counted(passages))
    return {f"{name} / {kv}": found[f"{first[alike[name]]} / {kv}"] for name in made for kv in kv_formats}


def _without_mtp(name: str) -> Recipe:
    return replace(BUILDS.get(name, Recipe()), mtp=TargetFormat.KEEP)


def _counted(passages: Sequence[Passage]) -> Iterator[Passage]:
    for number, passage in enumerate(passages):
        if number % 10 == 0:
            say(f"passage {number} of {len(passages)}")
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


def write(found: Evaluation, out: Path) -> None:
    """evaluation.md and evaluation.json in `out`; the latter last, so that it is there only if both are."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.md").write_text(found.as_markdown() + "\n", encoding="utf-8")
    scratch = out / "evaluation.json.partial"
    scratch.write_text(found.as_json() + "\n", encoding="utf-8")
    scratch.rename(out / "evaluation.json")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.evaluate", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL_DIRECTORY, help="the checkpoint")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="what `prepare` made; default .pocket")
    parser.add_argument(
        "--kv", nargs="+", default=list(KV_FORMATS), help="KV formats; the first is the one compared to"
    )
    parser.add_argument("--quick", action="store_true", help="a few of everything")
    parser.add_argument("--out", type=Path, help="a directory for evaluation.md and evaluation.json as well")
    given = parser.parse_args(arguments)

    def run() -> int:
        for name in given.kv:
            KVFormat.parse(name)  # a wrong name is refused before half an hour has passed
        if not torch.cuda.is_available():
            # The matrices are too small to share out: two threads take longer than one.
            torch.set_num_threads(1)
        found = evaluate(given.directory, given.data, given.kv, QUICK if given.quick else FULL)
        if given.out:
            write(found, given.out)
        sys.stdout.write(f"{found.as_markdown()}\n\n{found.as_json()}\n")
        return 0 if all(claim.holds for claim in found.claims) else 1

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
