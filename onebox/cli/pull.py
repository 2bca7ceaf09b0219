"""`onebox pull`: fetches a checkpoint, or the parts of one that a build needs, from the Hugging Face hub; resumable."""

from pathlib import Path
from typing import Annotated

import typer

from onebox.cli.progress import byte_progress
from onebox.spec.errors import UsageError
from onebox.spec.places import remember_place

__all__ = ["pull"]


def pull(
    repo: Annotated[str, typer.Argument(help="A repository on the hub: owner/name or owner/name@revision.")],
    out: Annotated[
        Path | None, typer.Option(help="Target directory; default: models/NAME, with --only models/NAME-PARTS.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Fetch only these tensors, by range, for `onebox build`: "
            "experts, attention, delta, shared, lm-head or mtp, separated by commas."
        ),
    ] = None,
) -> None:
    """Fetch a checkpoint from the hub. Run it again to resume after an interruption."""
    from onebox.checkpoint.fetch import plan_tensors, plan_whole, run_fetch
    from onebox.checkpoint.hub import HubId, default_directory
    from onebox.checkpoint.partial import classes_named

    hub_id = HubId.checked(repo)
    if revision is not None:
        if hub_id.revision not in (None, revision):
            raise UsageError(f"{repo} and --revision {revision} name two revisions; give one of them.")
        hub_id = HubId(hub_id.repo, revision)
    words = tuple(only.split(",")) if only else ()
    directory = out or default_directory(hub_id, words)
    typer.echo(f"{hub_id} -> {directory}")
    plan = plan_tensors(hub_id, classes_named(words), directory) if words else plan_whole(hub_id, directory)
    typer.echo(f"{plan.missing_bytes / 1e9:.2f} of {plan.nbytes / 1e9:.2f} GB to fetch, commit {plan.origin.commit}.")
    with byte_progress("fetching", plan.nbytes) as on_bytes:
        run_fetch(plan, on_bytes, lambda sentence: typer.echo(sentence, err=True))
    remember_place(directory)
    check = "" if words else f" Check it with `onebox inspect {directory}`."
    typer.echo(f"{directory}: {plan.nbytes / 1e9:.2f} GB.{check}")
