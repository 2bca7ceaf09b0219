"""Small sources of one model, and a process to run commands in."""

from pathlib import Path

import pytest

from tests.setup.nursery import Nursery


@pytest.fixture(scope="session")
def small_sources(checkpoint, tmp_path_factory) -> Path:
    """A directory with one small model three times: `bf16`, `int4` (experts and projections) and `fp8`."""
    from onebox.checkpoint.build import plan_build, run_build
    from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source

    root = tmp_path_factory.mktemp("small_sources")
    (root / "bf16").symlink_to(checkpoint)
    int4, fp8 = TargetFormat.INT4, TargetFormat.FP8
    recipes = {
        "int4": Recipe(experts=int4, attention=int4, delta=int4),
        "fp8": Recipe(experts=fp8, attention=fp8, delta=fp8, shared=fp8, mtp=fp8),
    }
    for name, recipe in recipes.items():
        plan = plan_build(recipe, BuildSources(open_source("base", checkpoint)), shard_bytes=1 << 20)
        run_build(plan, root / name)
        (root / name / "onebox_manifest.json").unlink()
    return root


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery
