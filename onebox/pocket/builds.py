"""What `onebox build` makes of the pocket model, by name."""

from pathlib import Path

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import Recipe, Sources, Target, open_source

__all__ = ["BUILDS", "build"]

_HYBRID = {"experts": Target.INT4, "attention": Target.FP8, "delta": Target.FP8, "shared": Target.FP8}

BUILDS: dict[str, Recipe] = {
    "hybrid": Recipe(**_HYBRID),
    "hybrid-int8-head": Recipe(**_HYBRID, lm_head=Target.INT8),
    "hybrid-int8-head-int4-mtp": Recipe(**_HYBRID, lm_head=Target.INT8, mtp=Target.INT4),
    "fp8": Recipe(experts=Target.FP8, attention=Target.FP8, delta=Target.FP8, shared=Target.FP8, mtp=Target.FP8),
    "nvfp4": Recipe(experts=Target.NVFP4, attention=Target.NVFP4, shared=Target.NVFP4),
    "nvfp4-int8-head-nvfp4-mtp": Recipe(
        experts=Target.NVFP4,
        attention=Target.NVFP4,
        shared=Target.NVFP4,
        mtp=Target.NVFP4,
        lm_head=Target.INT8,
    ),
    "int4": Recipe(
        experts=Target.INT4,
        attention=Target.INT4,
        delta=Target.INT4,
        shared=Target.INT4,
        mtp=Target.INT4,
        lm_head=Target.INT8,
    ),
}
"""INT4 experts with other matrices in FP8; then the LM head in INT8; then the MTP head in INT4.

Beside them FP8 as the official FP8 checkpoints have it, NVFP4 as the published ones have it (DeltaNet, the MTP head and
the LM head in BF16), NVFP4 with the heads rounded as well, and INT4 throughout.
"""


def build(name: str, master: Path, out: Path) -> None:
    """Makes the build of this name from the BF16 master in `out`; one that is there already is kept."""
    run_build(plan_build(BUILDS[name], Sources(base=open_source("base", master))), out)
