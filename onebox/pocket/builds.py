"""The builds of the pocket model that `onebox build` can make, by name."""

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
"""hybrid: INT4 experts, other matrices in FP8; then also the LM head in INT8; then also the MTP head in INT4.

fp8 and nvfp4 are as in the published checkpoints (in nvfp4, DeltaNet, the MTP head and the LM head stay BF16);
nvfp4-int8-head-nvfp4-mtp also quantizes both heads; int4 is INT4 in all layers.
"""


def build(name: str, master: Path, out: Path) -> None:
    """Makes the build of this name from the BF16 master in `out`, unless it is there already."""
    run_build(plan_build(BUILDS[name], BuildSources(base=open_source("base", master))), out)
