"""`onebox draft-vocab`: what was counted while a model was served, and the list of tokens that follows from it."""

from pathlib import Path
from typing import Annotated

import typer

from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["draft_vocab"]


def draft_vocab(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory, or owner/name on the hub, that was served.")],
    size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the list; default: as many as `onebox serve` takes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write the list to, for --draft-vocab of build and serve.")
    ] = None,
) -> None:
    """Show which share of a model's answers a draft vocabulary covers, as counted while it was served.

    Counts are kept without any text, in the user's cache directory.
    """
    from onebox.checkpoint.hub import resolve_source
    from onebox.engine.api import kept_counts_path
    from onebox.spec.draft_vocab import default_draft_vocab_size, first_tokens
    from onebox.spec.model import read_config
    from onebox.spec.token_counts import read_kept_counts, write_token_list
    from onebox.text.tokenizer import Tokenizer

    directory = resolve_source(model)
    vocab_size = read_config(directory).vocab_size
    size = size or default_draft_vocab_size(vocab_size) or vocab_size
    if size > vocab_size:
        raise UsageError(f"--size {size:,} is more than the model's {vocab_size:,} tokens.")
    path, fingerprint = kept_counts_path(directory)
    try:
        counts = read_kept_counts(path, fingerprint, vocab_size)
    except FileNotFoundError:
        raise UnreadableError(
            f"Nothing was counted of {directory} yet ({path}): serve it with drafts of its MTP head for a while."
        ) from None
    added = Tokenizer.load(directory).added_token_ids
    # What was said comes before what was not; added tokens that were never said are listed all the same.
    ranked = sorted(counts, key=lambda token_id: -counts[token_id])
    kept = [token_id for token_id in added if token_id < vocab_size and token_id not in counts]
    listed = [*ranked[: max(0, size - len(kept))], *kept]
    listed = first_tokens(vocab_size, size, listed)
    total, first = sum(counts.values()), first_tokens(vocab_size, size, added)
    typer.echo(f"{path}: {total:,} tokens of answers, {len(counts):,} different ones.")
    typer.echo(f"The {size:,} lowest of {vocab_size:,} ids, with added tokens, cover {_share(counts, first, total)}.")
    typer.echo(f"The {size:,} that were said most cover {_share(counts, listed, total)}.")
    if out:
        try:
            write_token_list(out, {token_id: counts.get(token_id, 0) for token_id in listed})
        except OSError as error:
            raise UnreadableError(f"{out} cannot be written: {error.strerror}.") from None
        typer.echo(f"{out}: {len(listed):,} token ids, for `onebox build --draft-vocab` or `onebox serve`.")


def _share(counts: dict[int, int], listed: list[int], total: int) -> str:
    return f"{sum(counts.get(token_id, 0) for token_id in listed) / total:.1%} of them" if total else "nothing yet"
