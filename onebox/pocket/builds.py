"""The builds of the pocket model that `onebox build` can make, by name.

As a program, with a name, the master's directory and an output directory, it makes one of them.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.spec.errors import DoesNotFitError

__all__ = ["BUILDS", "NO_ROOM", "build"]

NO_ROOM = 3
"""The program's exit status where the disk is too small. What else the system refuses is printed, with status 1."""

_FP8, _INT8, _INT4, _INT3 = TargetFormat.FP8, TargetFormat.INT8, TargetFormat.INT4, TargetFormat.INT3
_HYBRID = Recipe(experts=_INT4, attention=_FP8, delta=_FP8, shared=_FP8)
_HEAD, _MTP = replace(_HYBRID, lm_head=_INT8), replace(_HYBRID, lm_head=_INT8, mtp=_INT4)
_NVFP4 = Recipe(experts=TargetFormat.NVFP4, attention=TargetFormat.NVFP4, shared=TargetFormat.NVFP4)

BUILDS: dict[str, Recipe] = {
    "hybrid": _HYBRID,
    "hybrid-int8-head": _HEAD,
    "hybrid-int8-head-int4-mtp": _MTP,
    "hybrid-int34": replace(_MTP, experts=_INT3, experts_down=_INT4),
    "hybrid-int3": replace(_MTP, experts=_INT3),
    "hybrid-int2": replace(_MTP, experts=TargetFormat.INT2),
    "fp8": Recipe(_FP8, _FP8, _FP8, _FP8, _FP8),
    "nvfp4": _NVFP4,
    "nvfp4-int8-head-nvfp4-mtp": replace(_NVFP4, mtp=TargetFormat.NVFP4, lm_head=_INT8),
    "int4": Recipe(_INT4, _INT4, _INT4, _INT4, _INT4, _INT8),
}
"""hybrid: INT4 experts, other matrices in FP8; then also the LM head in INT8; then also the MTP head in INT4.

The last of these with fewer bits in its experts: hybrid-int34 (gate and up of 3 bits, down of 4), hybrid-int3,
hybrid-int2.

fp8 and nvfp4 are as in the published checkpoints (in nvfp4, DeltaNet, the MTP head and the LM head stay BF16);
nvfp4-int8-head-nvfp4-mtp also quantizes both heads; int4 is INT4 in all layers.
"""


def build(name: str, master: Path, out: Path) -> None:
    """Makes the build of this name from the BF16 master in `out`, unless it is there already."""
    run_build(plan_build(BUILDS[name], BuildSources(base=open_source("base", master))), out)


def _main() -> int:
    # The matrices are too small for parallel work: with one thread per core a build takes five times as long.
    torch.set_num_threads(1)
    name, master, out = sys.argv[1:]
    try:
        build(name, Path(master), Path(out))
    except DoesNotFitError:
        return NO_ROOM
    except OSError as error:
        sys.stdout.write(f"{error.strerror or error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
