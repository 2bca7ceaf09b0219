"""`python -m recipes.pocket.expert_bits [DIR] [--sensitivity FILE]`: what fewer bits in experts cost.

Two Markdown tables. The first has each layer's sensitivity: the KL of the model whose experts have 3 bits in this layer
and are BF16 in all others; `--sensitivity` writes it as the JSON file that `onebox build --expert-layers` reads. The
second has perplexity and KL of builds whose experts have 4, 3 and 2 bits, alone and mixed, with every KV format. Texts
are this repository's documents, which the pocket model was not trained on: no data has to be collected.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.layer_targets import parse_layer_target
from onebox.checkpoint.recipe import BuildSources, LayerTarget, Recipe, TargetFormat, open_source
from onebox.checkpoint.source import open_checkpoint
from onebox.model.load import load_model
from onebox.pocket.builds import BUILDS
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.kv import KVFormat
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.evaluate import KV_FORMATS
from recipes.pocket.evaluation.predictions import (
    HeldOutPassage,
    ModelVariant,
    PredictionScores,
    compare,
    example_passages,
)

__all__ = ["main"]

_DOCUMENTS = Path(__file__).parents[2] / "docs"
_SENSITIVE = 2
"""Layers that keep 4 bits in the build by sensitivity."""


def _passages(master: Path, num_examples: int, num_tokens: int) -> list[HeldOutPassage]:
    """The first tokens of each document, and right answers to examples of each workload that are no longer."""
    tokenizer, template = Tokenizer.load(master), ChatTemplate.load(master)
    texts = (path.read_text(encoding="utf-8") for path in sorted(_DOCUMENTS.glob("*.md")))
    documents = [HeldOutPassage("documents", tuple(tokenizer.encode(text)[:num_tokens]), 1) for text in texts]
    return [*documents, *example_passages(tokenizer, template, num_examples, num_tokens)]


def _scores(
    recipes: Mapping[str, Recipe], master: Path, passages: Sequence[HeldOutPassage], kv_formats: Sequence[str]
) -> tuple[dict[str, PredictionScores], dict[str, int]]:
    """Of every build with every KV format, compared with the first; and the bytes of each build's tensors."""
    variants: dict[str, ModelVariant] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="pocket-bits-") as scratch:
        for number, (name, recipe) in enumerate(recipes.items()):
            made = Path(scratch) / str(number)
            run_build(plan_build(recipe, BuildSources(base=open_source("base", master))), made)
            sizes[name] = sum(entry.nbytes for entry in open_checkpoint(made).tensors.values())
            model = load_model(made, torch.device("cpu"), torch.float32, with_mtp=False)
            variants |= {f"{name} / {kv}": ModelVariant(model, KVFormat.parse(kv)) for kv in kv_formats}
    log_progress(f"{len(passages)} passages for {len(variants)} pairs of build and KV format")
    return compare(variants, passages), sizes


def _sensitivity(master: Path, passages: Sequence[HeldOutPassage]) -> dict[int, PredictionScores]:
    num_layers = open_checkpoint(master).spec.num_hidden_layers
    recipes = {"master": Recipe()} | {
        str(layer): Recipe(expert_layers=(LayerTarget((layer,), TargetFormat.INT3),)) for layer in range(num_layers)
    }
    found, _ = _scores(recipes, master, passages, ("bf16",))
    return {layer: found[f"{layer} / bf16"] for layer in range(num_layers)}


def _builds(sensitivity: Path) -> dict[str, Recipe]:
    most = parse_layer_target(f"{_SENSITIVE} of {sensitivity}=int4")
    layers = " and ".join(map(str, most.layers))
    return {
        "master": Recipe(),
        "hybrid-int8-head-int4-mtp": BUILDS["hybrid-int8-head-int4-mtp"],
        "hybrid-int34": BUILDS["hybrid-int34"],
        f"hybrid-int3, layers {layers} INT4": replace(BUILDS["hybrid-int3"], expert_layers=(most,)),
        "hybrid-int3": BUILDS["hybrid-int3"],
        "hybrid-int2": BUILDS["hybrid-int2"],
    }


def _tables(master: Path, passages: Sequence[HeldOutPassage], sensitivity: Path) -> Iterator[str]:
    layers = _sensitivity(master, passages)
    sensitivity.write_text(json.dumps({layer: round(each.mean_divergence, 6) for layer, each in layers.items()}))
    yield "| layer with experts of 3 bits | perplexity | mean KL to the master |"
    yield "|---|---|---|"
    for layer, each in layers.items():
        yield f"| {layer} | {each.perplexity:.3f} | {each.mean_divergence:.5f} |"
    yield ""
    found, sizes = _scores(_builds(sensitivity), master, passages, KV_FORMATS)
    yield "| build / KV cache | MB | perplexity | mean KL to the master | same most likely token |"
    yield "|---|---|---|---|---|"
    for name, each in found.items():
        size = sizes[name.rpartition(" / ")[0]] / 1e6
        yield f"| {name} | {size:.1f} | {each.perplexity:.3f} | {each.mean_divergence:.5f} | {each.top_agreement:.2%} |"
    first = next(iter(found.values()))
    yield ""
    yield f"{first.num_tokens:,} predicted tokens of {first.num_passages} passages."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.expert_bits", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL_DIRECTORY, help="the BF16 checkpoint")
    parser.add_argument("--examples", type=int, default=8, help="right answers of each workload")
    parser.add_argument("--tokens", type=int, default=768, help="of each passage")
    parser.add_argument("--sensitivity", type=Path, help="also write each layer's sensitivity to this file")
    given = parser.parse_args(arguments)

    def run() -> int:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="pocket-sensitivity-") as scratch:
            file = given.sensitivity or Path(scratch) / "sensitivity.json"
            passages = _passages(given.directory, given.examples, given.tokens)
            for line in _tables(given.directory, passages, file):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
