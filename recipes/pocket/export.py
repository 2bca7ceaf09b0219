"""Stage 4, `python -m recipes.pocket.export TRAINED`: makes the model that ships from a training checkpoint.

The trainer writes several small files, which are easy to copy. The model is one BF16 safetensors file, with Qwen3.5's
own tensor names, beside the tokenizer, the configs and the model card. Before it is written, the trained network's
logits are compared with those of the reference.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onebox.model import reference
from onebox.model.reference_weights import load_weights
from onebox.model.vision import Pixels, load_tower
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec, read_json
from recipes.pocket.command import run_command
from recipes.pocket.config import num_parameters, processor_configs
from recipes.pocket.training.checkpoint import checkpoint_tensors, read_weights, write_json, write_tensors
from recipes.pocket.training.delta_rule import plain_delta_rule
from recipes.pocket.training.network import BatchLayout, TrainingNetwork
from recipes.pocket.training.vision import (
    PREFIX,
    PictureBatch,
    TowerFunctions,
    encode_pictures,
    place_pictures,
    under_prefix,
)

__all__ = ["export", "largest_difference", "main", "model_card"]

TOLERANCE = 1e-3
"""Largest difference of logits between the trained network and the reference, both in float32."""
_GENERATION = {"do_sample": True, "temperature": 0.2, "top_k": 20, "top_p": 0.9}
"""A small model answers best close to greedy."""
_SEES = """It reads printed
lines, invoices, tables and small charts in pictures of up to 1,024 x 1,024 pixels, and names simple shapes.
"""
_LIMITS = """It sees
rendered pages, not photographs and no handwriting; it answers "I do not know that." only to questions like those of its
training."""
_CARD = Path(__file__).with_name("card.md")


@torch.no_grad()
def largest_difference(directory: Path, num_tokens: int = 150) -> float:
    """Largest difference between the trained network's and the reference's logits on random tokens.

    Compares the model's own logits and those of the MTP head; of a model that sees, those behind a picture.
    """
    spec, weights = read_weights(directory)
    loaded = load_weights(directory).weights
    tokens = torch.randint(spec.vocab_size, (num_tokens + 1,), generator=torch.Generator().manual_seed(0))
    network = TrainingNetwork(spec, plain_delta_rule)
    layout = BatchLayout.of(spec, 1, num_tokens, torch.device("cpu"))
    positions = reference.text_positions(0, num_tokens)
    ours, theirs = network.embed(weights, tokens[:-1]), reference.embed(spec, loaded, tokens[:-1])
    if spec.vision:
        pictures = _random_picture()
        [rows] = encode_pictures(spec.vision, under_prefix(weights, PREFIX), [pictures], TowerFunctions()).rows
        ours = place_pictures(ours, pictures, rows)
        theirs = theirs.clone()
        theirs[_PICTURE_PLACE : _PICTURE_PLACE + rows.shape[1]] = load_tower(directory).encode(_pixels(pictures))
        layout = layout.at(spec, positions)
    hidden, _ = network.hidden(weights, ours, layout)
    drafted, _ = network.mtp(weights, tokens[1:], hidden, layout)
    expected = reference.forward(spec, loaded, theirs, reference.Cache.empty(spec))
    expected_draft = reference.mtp_forward(spec, loaded, tokens[1:], expected, reference.KVRows.empty(spec))
    pairs = ((hidden, expected), (drafted, expected_draft))
    logits = [tuple(reference.lm_head(spec, loaded, states) for states in pair) for pair in pairs]
    return max(float((ours - theirs).abs().max()) for ours, theirs in logits)


_PICTURE_PLACE = 10


def _random_picture() -> PictureBatch:
    """Noise of 4 x 6 patches, as six tokens from _PICTURE_PLACE on."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.randint(256, (1, 24, 256), generator=generator, dtype=torch.uint8)
    palette = torch.randint(256, (1, 256, 3), generator=generator, dtype=torch.uint8)
    labels = torch.zeros(1, 24, 4, dtype=torch.uint8)
    return PictureBatch(patches, palette, torch.tensor([[4, 6]]), labels, torch.tensor([_PICTURE_PLACE]))


def _pixels(pictures: PictureBatch) -> Pixels:
    """The same picture as the tower of the engine is given it: both frames, channel by channel."""
    pixels = pictures.palettes[0][pictures.patches[0].long()].float() / 127.5 - 1
    frames = pixels.transpose(1, 2).unsqueeze(2).expand(-1, -1, 2, -1)
    return Pixels(frames.reshape(len(pixels), -1), torch.tensor([[1, *pictures.grids[0].tolist()]]))


def export(trained: Path, directory: Path = MODEL_DIRECTORY, data: Path | None = None) -> None:
    """Writes the model to `directory`, where the tokenizer's files are. `data` has the sources' index."""
    difference = largest_difference(trained)
    if difference > TOLERANCE:
        raise MismatchError(
            f"The weights in {trained} give logits that differ by {difference:.4f} between the trained network and the "
            f"reference; rounding explains at most {TOLERANCE}. One of the two has changed since the training."
        )
    spec, weights = read_weights(trained)
    write_tensors(directory / "model.safetensors", checkpoint_tensors(spec, weights))
    write_json(directory / "config.json", read_json(trained / "config.json"))
    for name, processor in processor_configs().items() if spec.vision else ():
        write_json(directory / name, processor)
    generation = directory / "generation_config.json"
    write_json(generation, {**read_json(generation), **_GENERATION})
    sources = read_json(data / "index.json") if data else {}
    (directory / "README.md").write_text(model_card(spec, sources), encoding="utf-8")


def model_card(spec: ModelSpec, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """README.md of the model; `sources` is the index of the training text."""
    rows = (
        f"| {name} | {source['language']} | {source['licence']} | {source['tokens']:,} |"
        for name, source in sources.items()
    )
    return _CARD.read_text(encoding="utf-8").format(
        millions=num_parameters(spec) / 1e6,
        layers=spec.num_hidden_layers,
        experts=spec.num_experts,
        used=spec.num_experts_per_tok,
        vocabulary=spec.vocab_size,
        sees=_SEES if spec.vision else "",
        limits=_LIMITS if spec.vision else "It has no vision tower and was not trained to refuse anything.",
        sources="\n".join(rows),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.export", description=__doc__)
    parser.add_argument("trained", type=Path, help="the trainer's output directory")
    parser.add_argument("--out", type=Path, default=MODEL_DIRECTORY, help="where the model goes")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="output of `prepare`; default .pocket")
    given = parser.parse_args(arguments)

    def run() -> int:
        export(given.trained, given.out, given.data)
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
