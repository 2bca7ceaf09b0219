"""`onebox quantize`: builds a checkpoint whose integer matrices are rounded by a calibration on given text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.build import FormatOptions, SourceOptions, print_plan
from onebox.cli.options import grouped, option_group
from onebox.cli.progress import byte_progress, step_progress

if TYPE_CHECKING:
    from onebox.quantize.run import QuantizePlan
    from onebox.quantize.settings import CalibrationSettings

__all__ = ["quantize"]

_SMALL_HIDDEN_SIZE = 512


@option_group("Calibration")
class CalibrationOptions:
    """The text and how long each block is tuned on it."""

    data: Annotated[
        list[Path],
        typer.Option(
            help="A text file, or .jsonl with a text, messages, or a recorded request and response a line; repeatable."
        ),
    ]
    num_sequences: Annotated[int, typer.Option(help="Sequences taken of the text.")] = 128
    sequence_tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048
    num_steps: Annotated[int, typer.Option(help="Tuning steps of a mixer, and of a group of experts.")] = 200
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 8192
    experts_at_once: Annotated[int, typer.Option(help="Experts that are tuned together; memory grows with it.")] = 16
    min_tokens: Annotated[int, typer.Option(help="Experts that fewer tokens reach are rounded to nearest.")] = 64
    num_held_out: Annotated[
        int, typer.Option(metavar="SEQUENCES", help="Further sequences to measure on, which nothing is tuned on.")
    ] = 8
    seed: Annotated[int, typer.Option(help="Determines the order of the text and the batches.")] = 0

    def settings(self) -> "CalibrationSettings":
        from onebox.quantize.settings import CalibrationSettings

        names = CalibrationSettings.__dataclass_fields__
        return CalibrationSettings(**{name: getattr(self, name) for name in names})


@grouped
def quantize(
    sources: SourceOptions,
    formats: FormatOptions,
    calibration: CalibrationOptions,
    out: Annotated[Path, typer.Option(help="The output directory.")],
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    shard_gib: Annotated[float, typer.Option(help="Size of an output file in GiB.")] = 2.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the planned output, memory and steps, and exit.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an earlier, interrupted run left.")] = False,
) -> None:
    """Build a checkpoint as `onebox build` does, its integer matrices rounded by a calibration on your text.

    Works through the model block by block, so it may be larger than memory. Running the same command again goes on at
    the last finished block. Needs the auto-round library, which onebox's extra `quantize` installs.
    """
    from onebox.quantize.documents import index_files
    from onebox.quantize.run import build_calibrated, calibrate, plan_quantize
    from onebox.quantize.sign_round import library_version

    settings = calibration.settings()
    if shard_gib <= 0:
        raise typer.BadParameter("must be above 0", param_hint="--shard-gib")
    chosen = _device(device)
    library_version()  # what is missing is said before anything is read
    recipe = formats.recipe(has_fp8=sources.fp8 is not None)
    text = index_files(calibration.data)
    opened = sources.opened(recipe)
    _use_threads(opened.base.checkpoint.spec.hidden_size)
    plan = plan_quantize(recipe, opened, text, settings, chosen, int(shard_gib * 2**30))
    print_plan(plan.build, out)
    _print_calibration(plan)
    if dry_run:
        return
    with step_progress("calibrating", plan.num_steps(plan.blocks)) as on_step:
        build = calibrate(plan, out, restart=restart, on_step=on_step)
    with byte_progress("building", build.nbytes) as on_bytes:
        manifest = build_calibrated(build, out, restart=restart, on_bytes=on_bytes)
    _print_report(manifest.calibration)
    typer.echo(f"{out}: {len(manifest.tensors):,} tensors, {plan.build.nbytes / 1e9:.2f} GB, each with its sha256.")


def _device(name: str) -> Any:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is not one of auto, cpu, cuda", param_hint="--device")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise typer.BadParameter("torch finds no GPU here", param_hint="--device")
    if has_gpu and name != "cpu":
        # Products of float32 matrices in TF32: eight times as fast, and far more exact than what is being rounded.
        torch.set_float32_matmul_precision("high")
        return torch.device("cuda")
    return torch.device("cpu")


def _use_threads(hidden_size: int) -> None:
    """One thread for a small model: its matrices are computed sooner than threads can wait for each other."""
    import torch

    if hidden_size <= _SMALL_HIDDEN_SIZE:
        torch.set_num_threads(1)


def _print_calibration(plan: "QuantizePlan") -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    count, tokens = plan.tokens.num_tuned_on, plan.settings.sequence_tokens
    asked = plan.settings.num_sequences
    console.print(
        f"Calibration on {count:,} sequences of {tokens:,} tokens"
        + (f" (the text has no more; {asked:,} were asked for)" if count < asked else "")
        + f", {plan.tokens.num_held_out:,} more held out; "
        f"{plan.num_steps(plan.blocks):,} steps over {len(plan.blocks)} blocks on {plan.device.type}."
    )
    if plan.tokens.num_left_out:
        console.print(f"{plan.tokens.num_left_out:,} conversations with pictures were left out.")
    memory = plan.memory
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in {**memory.host, **memory.device}.items())
    if plan.device.type == "cuda":
        planned = f"{memory.host_bytes / 1e9:.2f} GB of host memory, {memory.device_bytes / 1e9:.2f} GB of the GPU's"
    else:
        planned = f"{(memory.host_bytes + memory.device_bytes) / 1e9:.2f} GB of memory"
    console.print(f"At most {planned} ({parts}), {memory.disk_bytes / 1e9:.2f} GB of disk beside the output.")


def _print_report(blocks: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    errors = ("rounded_error", "tuned_error", "held_out_rounded_error", "held_out_tuned_error")
    counts = ("num_tuned", "num_rounded", "num_not_better", "fewest_tokens")
    # Fits into a terminal of 80 columns.
    names = ("block", "rounded", "tuned", "held out", "tuned", "matrices", "few", "worse", "fewest")
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for block in blocks:
        table.add_row(
            block["name"].removeprefix("model.").removeprefix("language_model."),
            *(f"{block[key]:.1e}" for key in errors),
            *(f"{block[key]:,}" for key in counts),
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        "Errors of each block, rounded to nearest and tuned, then both on what was held out: squares relative to the "
        "stream, behind the last layer and the MTP head the KL divergence of the predictions; matrices tuned, of "
        "experts that few tokens reach, and worse tuned; the fewest tokens of an expert:"
    )
    console.print(table)
    tuned, few, kept = (sum(block[key] for block in blocks) for key in ("num_tuned", "num_rounded", "num_not_better"))
    console.print(
        f"{tuned:,} matrices calibrated; rounded to nearest: {few:,} of experts that too few tokens reach, {kept:,} "
        "that calibration did not improve."
    )
