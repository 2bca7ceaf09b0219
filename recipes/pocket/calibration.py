"""`python -m recipes.pocket.calibration text|compare`: text to calibrate on, and what calibration is worth.

`text FILE` writes what the model was trained on, of fixed seeds, as JSON Lines for `onebox quantize --data`: generated
examples and, where text was collected, documents of the training part. `compare NAME=DIR ...` prints two Markdown
tables of the named checkpoints, each compared with the first: perplexity and KL over held-out passages, then scores and
accepted drafts in answers to held-out examples.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import torch

import onebox
from onebox.checkpoint.source import open_checkpoint
from onebox.model.load import load_model
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import UsageError
from onebox.spec.kv import KVFormat
from onebox.spec.model import read_json
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.data.tokens import check_token_files, read_documents
from recipes.pocket.evaluation.predictions import HeldOutPassage, ModelVariant, compare, example_passages, text_passages
from recipes.pocket.evaluation.tasks import workload_task
from recipes.pocket.synthetic.filler import use_documents
from recipes.pocket.synthetic.workloads import MEASURED, SHARES, WORKLOADS, prompt_text

__all__ = ["main"]

_END = "<|im_end|>"
_MAX_CHARACTERS = 6000
"""Of an example."""
_NUM_DRAFTS = 2


def _examples(directory: Path, count: int) -> Iterator[str]:
    """Prompts with their right answers, each workload as often as in training."""
    template, rng = ChatTemplate.load(directory), Random(0)  # noqa: S311
    for seed in range(count):
        (name,) = rng.choices(list(SHARES), list(SHARES.values()))
        example = WORKLOADS[name](Random(seed))  # noqa: S311
        text = prompt_text(example, template) + example.answer + _END
        if len(text) <= _MAX_CHARACTERS:
            yield text


def _documents(data: Path, tokenizer: Tokenizer, num_tokens: int) -> Iterator[str]:
    """Documents of the training part of each source, up to `num_tokens` tokens each; none if no text was collected."""
    if not (data / "index.json").exists():
        return
    (end_token,) = tokenizer.encode("<|endoftext|>")
    for source in read_json(data / "index.json"):
        documents = read_documents(data / "tokens" / f"{source}.bin", end_token)
        Random(0).shuffle(documents)  # noqa: S311
        left = num_tokens
        for document in documents:
            if left <= 0:
                break
            yield tokenizer.decode(list(map(int, document)))
            left -= len(document)


def _write_text(given: argparse.Namespace) -> None:
    tokenizer = Tokenizer.load(given.directory)
    if (given.data / "index.json").exists():
        check_token_files(given.data, given.directory)
        use_documents(given.data, tokenizer)
    texts = [*_examples(given.directory, given.examples), *_documents(given.data, tokenizer, given.tokens)]
    with given.file.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    log_progress(f"{len(texts):,} texts in {given.file}")


def _passages(given: argparse.Namespace) -> list[HeldOutPassage]:
    tokenizer, template = Tokenizer.load(given.directory), ChatTemplate.load(given.directory)
    texts = text_passages(given.data, tokenizer, given.passages, given.tokens)
    return [*texts, *example_passages(tokenizer, template, given.passages, given.tokens)]


def _prediction_table(builds: Mapping[str, Path], passages: Sequence[HeldOutPassage]) -> Iterator[str]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    variants = {
        name: ModelVariant(load_model(path, device, dtype, with_mtp=False), KVFormat.parse("bf16"))
        for name, path in builds.items()
    }
    found = compare(variants, passages)
    yield "| build | MB | perplexity | mean KL to the first | same most likely token |"
    yield "|---|---|---|---|---|"
    for name, each in found.items():
        size = sum(entry.nbytes for entry in open_checkpoint(builds[name]).tensors.values()) / 1e6
        yield f"| {name} | {size:.1f} | {each.perplexity:.3f} | {each.mean_divergence:.5f} | {each.top_agreement:.2%} |"
    first = next(iter(found.values()))
    yield ""
    yield f"{first.num_tokens:,} predicted tokens of {first.num_passages} passages."


def _task_table(builds: Mapping[str, Path], workloads: Sequence[str], count: int) -> Iterator[str]:
    yield "| build | task | answers | scores | 1st draft accepted | 2nd draft accepted after it |"
    yield "|---|---|---|---|---|---|"
    for name, path in builds.items():
        with onebox.LLM(path, speculation="mtp", num_speculative_tokens=_NUM_DRAFTS, max_num_seqs=32) as llm:
            for number, workload in enumerate(workloads):
                task = workload_task(llm, path, workload, count, 512)
                cells = (name if number == 0 else "", workload, str(count), task.scores_text, task.acceptance_text)
                yield f"| {' | '.join(cells)} |"


def _compare(given: argparse.Namespace) -> None:
    builds: dict[str, Path] = {}
    for pair in given.builds:
        name, equals, path = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair} is not NAME=DIR.")
        builds[name] = Path(path)
    unknown = set(given.workloads) - set(MEASURED)
    if unknown:
        raise UsageError(f"{', '.join(sorted(unknown))} is no workload; there are {', '.join(MEASURED)}.")
    tables = [_prediction_table(builds, _passages(given))] if given.passages else []
    if given.workloads:
        tables.append(_task_table(builds, given.workloads, given.answers))
    for table in tables:
        for line in table:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        sys.stdout.write("\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.calibration", description=__doc__)
    parser.add_argument("--directory", type=Path, default=MODEL_DIRECTORY, help="the BF16 checkpoint")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="output of `prepare`; default .pocket")
    kinds = parser.add_subparsers(dest="kind", required=True)
    text = kinds.add_parser("text")
    text.add_argument("file", type=Path, help="the .jsonl file to write")
    text.add_argument("--examples", type=int, default=1600)
    text.add_argument("--tokens", type=int, default=60_000, help="of documents, by source")
    measured = kinds.add_parser("compare")
    measured.add_argument("builds", nargs="+", help="NAME=DIR")
    measured.add_argument(
        "--passages", type=int, default=2, help="texts of each source, answers of each workload; 0: no predictions"
    )
    measured.add_argument("--tokens", type=int, default=768, help="of a passage")
    measured.add_argument("--workloads", nargs="*", default=list(MEASURED))
    measured.add_argument("--answers", type=int, default=20)
    given = parser.parse_args(arguments)

    def run() -> int:
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        (_write_text if given.kind == "text" else _compare)(given)
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
