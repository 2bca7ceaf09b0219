"""`onebox pull`: downloads a checkpoint from the Hugging Face hub, resumable, after checking disk space."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["pull"]


def pull(
    repo: Annotated[str, typer.Argument(help="A repository on the hub, such as Qwen/Qwen3.5-122B-A10B-FP8.")],
    out: Annotated[Path | None, typer.Option(help="Target directory; default: models/NAME.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
) -> None:
    """Download a checkpoint. Run it again to resume after an interruption."""
    from onebox.checkpoint.pull import pull_checkpoint

    directory = out or Path("models") / repo.rpartition("/")[2]
    typer.echo(f"{repo} -> {directory}")
    size = pull_checkpoint(repo, directory, revision)
    typer.echo(f"{directory}: {size / 1e9:.2f} GB. Check it with `onebox inspect {directory}`.")
