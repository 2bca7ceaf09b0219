"""`onebox tune`: finds the kernels' fastest launch options on this GPU and stores them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from onebox.spec.errors import UnsupportedError, UsageError

__all__ = ["tune"]

_LAYERS = 8


def tune(
    shape: Annotated[str, typer.Option(help="The model whose layers are timed.")] = "qwen3.5-122b-a10b",
    seconds: Annotated[float, typer.Option(min=10, help="Time limit in seconds.")] = 100.0,
    layers: Annotated[int, typer.Option(min=4, help="Number of layers; more need more memory and time.")] = _LAYERS,
    weights: Annotated[
        str, typer.Option(help="Formats of the random weights: hybrid, hybrid-int3, nvfp4, ..., as in bench decode.")
    ] = "hybrid",
    steps: Annotated[
        str | None,
        typer.Option(help="Kinds of steps, comma-separated: streams x rows, and a KV format: 32x3,1x1:turboquant."),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="Only kernels whose names begin so, comma-separated, as in grouped,int4_many.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option(help="Write the table here; default: the path that onebox reads.")
    ] = None,
) -> None:
    """Try launch options of the decode kernels in complete steps and store the faster ones for this GPU.

    Only speed changes, never results. A table for the H200 ships with onebox; this makes one for another GPU, or
    adds another model's shapes to it.
    """
    import torch

    from onebox.kernels.common.tuning import user_table
    from onebox.spec.shapes import named_spec

    spec = named_spec(shape)
    if not torch.cuda.is_available():
        raise UnsupportedError("onebox tune needs a CUDA GPU, and torch finds none on this machine.")
    from onebox.lab.tune import STEPS, StepShape, Tuning, few_layers
    from onebox.lab.tune import tune as find
    from onebox.model.dummy import DUMMY_FORMATS

    if weights not in DUMMY_FORMATS:
        raise UsageError(f"--weights {weights} is not known: use {', '.join(DUMMY_FORMATS)}.")
    chosen = tuple(map(StepShape.parse, steps.split(","))) if steps else STEPS
    gpu = torch.cuda.get_device_name()
    tuning = Tuning(few_layers(spec, layers), seconds, DUMMY_FORMATS[weights], chosen, tuple(kernels.split(",")))
    found = find(tuning, lambda name, taken: typer.echo(f"  {taken:7.3f} ms  {name}"))
    for name, before in found.before_ms.items():
        typer.echo(f"{name} (streams x rows, KV format): {before:.3f} ms, now {found.after_ms[name]:.3f} ms")
    path = user_table(gpu) if output is None else output
    old = json.loads(path.read_text()) if path.is_file() else {"shapes": [], "options": {}}
    shapes, options = sorted({*old["shapes"], shape}), {**old["options"], **found.options}
    _write(path, {"gpu": gpu, "torch": torch.__version__, "shapes": shapes, "options": options})
    typer.echo(f"{len(found.options)} kernels of this model have options of their own on {gpu}: {path}")


def _write(path: Path, table: object) -> None:
    """Writes the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    part.replace(path)
