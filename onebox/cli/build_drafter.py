"""`onebox build` of a DFlash drafter."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from onebox.cli.progress import byte_progress
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.checkpoint.recipe import TargetFormat
    from onebox.cli.build import FormatOptions, SourceOptions

__all__ = ["build_drafter", "refuse_model_options"]


def refuse_model_options(
    sources: "SourceOptions", formats: "FormatOptions", draft_vocab: str, shard_gib: float
) -> None:
    """Raises a usage error if an option is given that only a model's build has."""
    from onebox.cli.build import DEFAULT_SHARD_GIB

    defaults = type(formats)()
    given = [name for name, value in vars(formats).items() if (value or None) != vars(defaults)[name]]
    given += [name for name in ("fp8", "mtp_from") if getattr(sources, name) is not None]
    given += ["draft_vocab"] if draft_vocab != "keep" else []
    given += ["shard_gib"] if shard_gib != DEFAULT_SHARD_GIB else []
    if given:
        flag = given[0].replace("_", "-")
        raise UsageError(
            f"--{flag} has nothing to act on: {sources.base} is a DFlash drafter; its format is --drafter."
        )


def build_drafter(directory: Path, target: "TargetFormat", out: Path, *, dry_run: bool) -> None:
    from collections import Counter

    from onebox.checkpoint.drafter_build import plan_drafter_build, run_drafter_build

    plan = plan_drafter_build(directory, target)
    before = sum(entry.nbytes for entry in plan.source.tensors.values())
    ways = ", ".join(f"{count} x {way}" for way, count in sorted(Counter(map(str, plan.stored.values())).items()))
    typer.echo(f"{out}: a DFlash drafter of {plan.nbytes / 1e9:.3f} GB (before {before / 1e9:.3f} GB): {ways}.")
    if dry_run:
        return
    with byte_progress("building", plan.nbytes) as on_bytes:
        manifest = run_drafter_build(plan, out, on_bytes)
    typer.echo(f"{out}: {len(manifest.tensors):,} tensors, {plan.nbytes / 1e9:.3f} GB, each with its sha256.")
