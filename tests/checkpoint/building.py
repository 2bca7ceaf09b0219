"""Builds from the small checkpoints, and the tensors that came out."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.verify import verify_checkpoint
from tests.synthetic import Tensors


def all_tensors(directory: Path) -> Tensors:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def sources(root: Path, base: str, fp8: str | None = None, mtp: str | None = None) -> BuildSources:
    return BuildSources(
        open_source("base", root / base),
        open_source("fp8", root / fp8) if fp8 else None,
        open_source("mtp", root / mtp) if mtp else None,
    )


def build(root: Path, out: Path, recipe: Recipe, base: str, shard_bytes: int = 1 << 30, **others: str) -> Tensors:
    run_build(plan_build(recipe, sources(root, base, **others), shard_bytes), out)
    assert verify_checkpoint(out) == []
    report = inspect_checkpoint(out, deep=True)
    assert report.is_servable, report.problems
    return all_tensors(out)


HYBRID = Recipe(shared=TargetFormat.FP8, lm_head=TargetFormat.INT8)
