"""`onebox bench decode`: decode speed of the complete engine at a model's full shape, random weights, on this GPU."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.spec.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from onebox.lab.decode import DecodeRow, Measured
    from onebox.model.qwen3_5 import Qwen35
    from onebox.spec.model import ModelSpec

__all__ = ["decode"]

_DEFAULT_ROWS = "plain,mtp2,plain-8k,mtp2-8k,plain-x4,mtp2-x4"


def decode(
    shape: Annotated[str, typer.Option(help="A known model, such as qwen3.5-122b-a10b.")] = "qwen3.5-122b-a10b",
    weights: Annotated[str, typer.Option(help="dummy: random weights in the formats of the hybrid build.")] = "dummy",
    rows: Annotated[
        str,
        typer.Option(help="Rows, comma-separated: plain, mtp2, either with -8k or -x4, {plain,turboquant,fp8}-128k."),
    ] = _DEFAULT_ROWS,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also print the GPU time of each kernel, measured last.")
    ] = False,
) -> None:
    """Time decode steps of the complete engine at full size, compared with this GPU's memory bandwidth limit.

    The limit is printed first, the last line is JSON. Forced acceptance: random weights predict nothing, so the first
    draft is accepted in 0.9 and the second in 0.72 of all steps, independent of the model's output.
    """
    from onebox.spec.shapes import named_spec

    if weights != "dummy":
        raise UsageError(f"--weights {weights} is not known: use dummy; a checkpoint is measured by onebox bench run.")
    spec, chosen = named_spec(shape), _chosen(rows)
    versions = _gpu()
    from onebox.lab.decode import copy_speed, measure, random_model, start_seconds

    model = random_model(spec)
    start = start_seconds(model)
    typer.echo(f"{versions['gpu']}, torch {versions['torch']}, triton {versions['triton']}")
    typer.echo(
        f"first token {start:.2f} s after the start of this process; including kernel compilation not in the cache"
    )
    ceiling = copy_speed()
    _print_ceiling(spec, chosen, ceiling)
    found = []
    for row in chosen:
        measured = measure(model, row, ceiling)
        _print_row(measured)
        found.append(measured.as_dict())
    if profile:
        _print_kernels(model, chosen)
    figures = {"copy_tb_per_s": round(ceiling / 1e12, 3), "start_to_first_token_s": round(start, 2)}
    typer.echo(json.dumps({"shape": shape, **versions, **figures, "rows": found}))


def _chosen(rows: str) -> "list[DecodeRow]":
    from onebox.lab.decode import ROWS

    known = {row.name: row for row in ROWS}
    for name in rows.split(","):
        if name not in known:
            raise UsageError(f"--rows has {name!r}, which is not a row: use {', '.join(known)}.")
    return [known[name] for name in rows.split(",")]


def _gpu() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("onebox bench decode needs a CUDA GPU, and torch finds none on this machine.")
    import triton

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def _print_ceiling(spec: "ModelSpec", rows: "list[DecodeRow]", ceiling: float) -> None:
    from onebox.lab.decode import ACCEPTANCE, row_bytes

    typer.echo(f"ceiling: a copy moves {ceiling / 1e12:.2f} TB/s; at that speed")
    for row in rows:
        seconds = row_bytes(spec, row) / ceiling
        most = row.streams * (1 + sum(ACCEPTANCE[: row.drafts])) / seconds
        typer.echo(f"  {row.name:16} {row_bytes(spec, row) / 1e9:6.2f} GB a step, {most:7.0f} tok/s")


def _print_row(measured: "Measured") -> None:
    typer.echo(
        f"{measured.row:16} {measured.step_ms:8.3f} ms a step  {measured.tokens_per_second:8.1f} tok/s  "
        f"{measured.bytes_per_step / 1e9:6.2f} GB  {measured.share_of_copy:6.1%} of the copy  "
        f"{measured.tokens_per_step:.2f} tokens a step  {measured.kernels_per_step} kernels  "
        f"first token {measured.first_token_s:.3f} s"
    )


def _print_kernels(model: "Qwen35", rows: "list[DecodeRow]") -> None:
    """After all timing: a profiled process stays slower."""
    from onebox.lab.decode import kernel_times

    for row in rows:
        typer.echo(f"{row.name}: by GPU time a step, prefill included")
        for kernel, microseconds, calls in list(kernel_times(model, row))[:24]:
            typer.echo(f"  {microseconds:9.1f} us {calls:7.1f} calls  {kernel[:80]}")
