"""`onebox verify`: re-reads a built checkpoint and compares it with its manifest."""

from pathlib import Path
from typing import Annotated

import typer

from onebox.cli.progress import byte_progress

__all__ = ["verify"]


def verify(
    directory: Annotated[Path, typer.Argument(help="A checkpoint that `onebox build` wrote, or its id on the hub.")],
) -> None:
    """Re-read a built checkpoint and compare every file and every tensor with the manifest.

    Exit code: 0 all match, 1 something differs, 2 unreadable.
    """
    from onebox.checkpoint.hub import resolve_source
    from onebox.checkpoint.manifest import read_manifest
    from onebox.checkpoint.verify import unproved, verify_checkpoint
    from onebox.spec.draft_vocab import D2T_TENSOR

    directory = resolve_source(directory)
    manifest = read_manifest(directory)
    total = sum(record.nbytes for record in manifest.tensors.values())
    with byte_progress("verifying", total) as on_bytes:
        problems = verify_checkpoint(directory, on_bytes)
    for problem in problems:
        typer.echo(f"problem: {problem.message}")
    unknown = unproved(directory, manifest)
    if unknown:
        typer.echo(f"note: {unknown}")
    if problems:
        num_tensors = sum(problem.tensor in manifest.tensors for problem in problems)
        typer.echo(
            f"{num_tensors:,} of {len(manifest.tensors):,} tensors and {len(problems) - num_tensors:,} files or other "
            "tensors differ from the manifest."
        )
        raise typer.Exit(1)
    listed = manifest.tensors.get(D2T_TENSOR)
    if listed and listed.shape:
        typer.echo(f"The MTP head drafts from {listed.shape[0]:,} listed tokens ({D2T_TENSOR}).")
    num_files = len(manifest.files) + len(manifest.shards)
    what = "all tensors" if unknown else f"all tensors, headers and {num_files} files"
    typer.echo(f"{len(manifest.tensors):,} tensors, {total / 1e9:.2f} GB: {what} match the manifest.")
