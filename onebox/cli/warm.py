"""`onebox warm`: compiles a model's kernels for this GPU, so that the first start is as quick as the later ones."""

import time
from pathlib import Path
from typing import Annotated

import typer

from onebox.cli.options import grouped
from onebox.cli.serve_options import MediaOptions, MemoryOptions, ModelOptions, engine_options
from onebox.cli.settings import configurable
from onebox.spec.errors import UnsupportedError

__all__ = ["warm"]


@configurable
@grouped
def warm(
    model_options: ModelOptions,
    memory: MemoryOptions,
    media: MediaOptions,
    model: Annotated[Path, typer.Argument(help="Checkpoint directory, or owner/name on the hub. No weights are read.")],
) -> None:
    """Compile the kernels of a model for this GPU, in parallel; give the options that serve will be given.

    `onebox serve` does the same at its first start. The kernels are stored in Triton's cache, about 100 for one
    model.
    """
    from onebox.checkpoint.hub import resolve_source
    from onebox.engine.api import TokenInfo, compile_ahead, plan_engine

    plan = plan_engine(resolve_source(model), engine_options(model_options, memory, media), TokenInfo())
    if plan.device.type != "cuda":
        raise UnsupportedError(
            "onebox warm compiles kernels for a GPU; this model would run on the CPU, which has none."
        )
    began = time.perf_counter()
    count = compile_ahead(plan, lambda done: typer.echo(f"{done} kernels"))
    seconds = time.perf_counter() - began
    typer.echo(
        f"{count} kernels compiled in {seconds:.1f} s." if count else "All kernels are in Triton's cache already."
    )
