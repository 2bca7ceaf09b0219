"""`onebox verify`: re-reads a built checkpoint and compares it with its manifest."""

from pathlib import Path
from typing import Annotated

import typer

from onebox.cli.progress import byte_progress

__all__ = ["verify"]


def verify(
    directory: Annotated[Path, typer.Argument(help="A checkpoint that `onebox build` wrote, or its id on the hub.")],
) -> None:
    """Re-read a built checkpoint and compare every tensor with the manifest's sha256.

    Exit code: 0 all tensors match, 1 a tensor differs, 2 unreadable.
    """
    from onebox.checkpoint.hub import resolve_source
    from onebox.checkpoint.manifest import read_manifest
    from onebox.checkpoint.verify import verify_checkpoint

    directory = resolve_source(directory)
    manifest = read_manifest(directory)
    total = sum(record.nbytes for record in manifest.tensors.values())
    with byte_progress("verifying", total) as on_bytes:
        problems = verify_checkpoint(directory, on_bytes)
    for problem in problems:
        typer.echo(f"problem: {problem.message}")
    if problems:
        typer.echo(f"{len(problems):,} of {len(manifest.tensors):,} tensors differ from the manifest.")
        raise typer.Exit(1)
    typer.echo(f"{len(manifest.tensors):,} tensors, {total / 1e9:.2f} GB: all match the manifest.")
