"""What `onebox build` makes of the pocket model, by name."""

from pathlib import Path

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source

__all__ = ["BUILDS", "build"]

_HYBRID = {
    "experts": TargetFormat.INT4,
    "attention": TargetFormat.FP8,
    "delta": TargetFormat.FP8,
    "shared": TargetFormat.FP8,
}

BUILDS: dict[str, Recipe] = {
    "hybrid": Recipe(**_HYBRID),
    "hybrid-int8-head": Recipe(**_HYBRID, lm_head=TargetFormat.INT8),
    "hybrid-int8-head-int4-mtp": Recipe(**_HYBRID, lm_head=TargetFormat.INT8, mtp=TargetFormat.INT4),
    "fp8": Recipe(
        experts=TargetFormat.FP8,
        attention=TargetFormat.FP8,
        delta=TargetFormat.FP8,
        shared=TargetFormat.FP8,
        mtp=TargetFormat.FP8,
    ),
    "nvfp4": Recipe(experts=TargetFormat.NVFP4, attention=TargetFormat.NVFP4, shared=TargetFormat.NVFP4),
    "nvfp4-int8-head-nvfp4-mtp": Recipe(
        experts=TargetFormat.NVFP4,
        attention=TargetFormat.NVFP4,
        shared=TargetFormat.NVFP4,
        mtp=TargetFormat.NVFP4,
        lm_head=TargetFormat.INT8,
    ),
    "int4": Recipe(
        experts=TargetFormat.INT4,
        attention=TargetFormat.INT4,
        delta=TargetFormat.INT4,
        shared=TargetFormat.INT4,
        mtp=TargetFormat.INT4,
        lm_head=TargetFormat.INT8,
    ),
}
"""INT4 experts with other matrices in FP8; then the LM head in INT8; then the MTP head in INT4.

Beside them FP8 as the official FP8 checkpoints have it, NVFP4 as the published ones have it (DeltaNet, the MTP head and
the LM head in BF16), NVFP4 with the heads rounded as well, and INT4 throughout.
"""


def build(name: str, master: Path, out: Path) -> None:
    """Makes the build of this name from the BF16 master in `out`; one that is there already is kept."""
    run_build(plan_build(BUILDS[name], BuildSources(base=open_source("base", master))), out)
