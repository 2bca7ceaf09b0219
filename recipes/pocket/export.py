"""Trained weights to a checkpoint and back: Qwen3.5's own tensor names, BF16.

The trainer writes several small files, which are easy to carry. `python -m recipes.pocket.export TRAINED` makes the
artefact that ships of them: one safetensors file beside the tokenizer, the configs and the model card, after checking
that it computes what was trained.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from onebox.model import reference
from onebox.model.load import load_weights
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec, read_json, spec_from_config
from onebox.spec.modules import fused_experts
from recipes.pocket.card import model_card
from recipes.pocket.command import run_command
from recipes.pocket.training.delta_rule import plain_delta_rule
from recipes.pocket.training.network import Network, Places, Weights

__all__ = ["LARGEST_FILE_BYTES", "export", "largest_difference", "main", "read_weights", "write_checkpoint"]

LARGEST_FILE_BYTES = 15 * 2**20
TOLERANCE = 1e-3
"""Largest difference of logits between the network that was trained and the reference, both in float32."""
_GENERATION = {"do_sample": True, "temperature": 0.2, "top_k": 20, "top_p": 0.9}
"""A small model is surest close to its likeliest tokens."""


def write_checkpoint(directory: Path, config: Mapping[str, Any], weights: Weights) -> None:
    """config.json and the weights in files of at most LARGEST_FILE_BYTES; what is there is replaced file by file."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(checkpoint_tensors(spec_from_config(config), weights)))
    for number, part in enumerate(parts, 1):
        _write_whole(directory / f"model-{number:05}-of-{len(parts):05}.safetensors", part)
    _write_json(directory / "config.json", config)


def checkpoint_tensors(spec: ModelSpec, weights: Weights) -> dict[str, Tensor]:
    """The tensors of a checkpoint, BF16 on the CPU: the layers' experts fused and the MTP head's one by one."""
    tensors = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in weights.items()}
    for group in fused_experts(spec):
        if group.module_class.in_mtp:
            fused = tensors.pop(group.tensor)
            for expert in range(spec.num_experts):
                for part, rows in zip(group.parts, fused[expert].chunk(len(group.parts)), strict=True):
                    tensors[f"{group.experts_name}.{expert}.{part}.weight"] = rows
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def read_weights(directory: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The shape and float32 weights of a checkpoint under the names that the network reads: all experts fused."""
    loaded = load_weights(directory)
    weights = dict(loaded.weights)
    for group in fused_experts(loaded.spec):
        if group.tensor not in weights:
            experts = [
                torch.cat([weights.pop(f"{group.experts_name}.{expert}.{part}.weight") for part in group.parts])
                for expert in range(loaded.spec.num_experts)
            ]
            weights[group.tensor] = torch.stack(experts)
    return loaded.spec, weights


@torch.no_grad()
def largest_difference(directory: Path, num_tokens: int = 150) -> float:
    """Between the trained network's logits and the reference's, the model's own and its draft's, on random tokens."""
    spec, weights = read_weights(directory)
    loaded = load_weights(directory).weights
    tokens = torch.randint(spec.vocab_size, (num_tokens + 1,), generator=torch.Generator().manual_seed(0))
    network = Network(spec, plain_delta_rule)
    places = Places.of(spec, 1, num_tokens, torch.device("cpu"))
    hidden, _ = network.hidden(weights, tokens[:-1], places)
    drafted, _ = network.mtp(weights, tokens[1:], hidden, places)
    expected = reference.forward(spec, loaded, tokens[:-1], reference.Cache.empty(spec))
    expected_draft = reference.mtp_forward(spec, loaded, tokens[1:], expected, reference.KVRows.empty(spec))
    pairs = ((hidden, expected), (drafted, expected_draft))
    logits = [tuple(reference.lm_head(spec, loaded, states) for states in pair) for pair in pairs]
    return max(float((ours - theirs).abs().max()) for ours, theirs in logits)


def export(trained: Path, directory: Path = MODEL_DIRECTORY, data: Path | None = None) -> None:
    """Makes the artefact in `directory`, where the tokenizer's files are; `data` tells the card of the sources."""
    difference = largest_difference(trained)
    if difference > TOLERANCE:
        raise MismatchError(
            f"The weights in {trained} give logits that differ by {difference:.4f} between the trained network and the "
            f"reference; at most {TOLERANCE} is rounding. One of the two has changed since."
        )
    spec, weights = read_weights(trained)
    _write_whole(directory / "model.safetensors", checkpoint_tensors(spec, weights))
    _write_json(directory / "config.json", read_json(trained / "config.json"))
    generation = directory / "generation_config.json"
    _write_json(generation, {**read_json(generation), **_GENERATION})
    sources = read_json(data / "index.json") if data else {}
    (directory / "README.md").write_text(model_card(spec, sources), encoding="utf-8")


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > LARGEST_FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _write_whole(path: Path, tensors: dict[str, Tensor]) -> None:
    """Beside its place first, so that a file that is there is whole."""
    scratch = path.with_suffix(".partial")
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.chmod(0o644)
    scratch.rename(path)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.export", description=__doc__)
    parser.add_argument("trained", type=Path, help="the directory that the trainer wrote")
    parser.add_argument("--out", type=Path, default=MODEL_DIRECTORY, help="where the artefact goes")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="what `prepare` made; default .pocket")
    given = parser.parse_args(arguments)

    def run() -> int:
        export(given.trained, given.out, given.data)
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
