"""The draft vocabulary of a starting engine: its size and first list, and the counts that earlier engines kept.

`auto` takes the list of the checkpoint, or the lowest token ids, and follows what the model says; a number does so with
a list of that size; a file is taken as it is.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onebox.engine.config import SpeculationConfig
from onebox.engine.draft.vocabulary import DraftVocabulary, KeepCounts
from onebox.engine.remote.messages import DraftVocabOpened, ReportStart
from onebox.spec.cache import user_cache_directory
from onebox.spec.draft_vocab import default_draft_vocab_size, first_tokens
from onebox.spec.errors import UnreadableError, UsageError
from onebox.spec.token_counts import KeptCounts, counts_path, read_kept_counts, read_token_list, write_kept_counts

if TYPE_CHECKING:
    from onebox.engine.plan import EnginePlan
    from onebox.model.footprint import Footprint
    from onebox.model.load import LoadFormat

__all__ = [
    "DraftVocabPlan",
    "foreseen_draft_vocab_size",
    "kept_counts_path",
    "new_draft_vocabulary",
    "open_draft_vocabulary",
    "plan_draft_vocab",
]

_FLAG = "--draft-vocab"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftVocabPlan:
    """What is decided before loading."""

    size: int
    vocab_size: int
    prior: tuple[int, ...] = ()
    """The list of the checkpoint or of a file, the commonest first; empty: the lowest ids."""
    is_fixed: bool = False
    """The list is not renewed from counts."""
    keeps_counts: bool = True
    """Not with dummy weights, whose tokens mean nothing."""


def plan_draft_vocab(
    asked: str, found: "Footprint", speculation: SpeculationConfig, load_format: "LoadFormat"
) -> DraftVocabPlan | None:
    """As asked; None: drafts are chosen from all tokens."""
    vocab_size, is_dummy = found.spec.vocab_size, load_format.value == "dummy"
    if not (speculation.with_mtp or speculation.with_dflash):
        if asked not in ("auto", "full"):
            raise UsageError(f"{_FLAG} {asked} has nothing to act on: drafts by {speculation.method} read no head.")
        return None
    if asked == "full":
        return None
    if asked == "auto" and found.draft_vocab:
        prior = tuple(found.draft_vocab)
        return DraftVocabPlan(len(prior), vocab_size, prior, keeps_counts=not is_dummy)
    size = _size(asked, vocab_size)
    if size is not None:
        prior = tuple(found.draft_vocab or ())[:size]
        return DraftVocabPlan(size, vocab_size, prior, keeps_counts=not is_dummy)
    if asked == "auto":
        return None
    listed = _listed(Path(asked), vocab_size)
    return DraftVocabPlan(len(listed), vocab_size, tuple(listed), is_fixed=True, keeps_counts=not is_dummy)


def foreseen_draft_vocab_size(asked: str, vocab_size: int) -> int | None:
    """The size for a checkpoint that is not here yet, and whose own list is not known."""
    if asked == "full":
        return None
    if asked == "auto" or asked.isdecimal():
        return _size(asked, vocab_size)
    return len(_listed(Path(asked), vocab_size))


def _size(asked: str, vocab_size: int) -> int | None:
    """None where it is no number and where all tokens are to be drafted."""
    if asked == "auto":
        return default_draft_vocab_size(vocab_size)
    if not asked.isdecimal():
        return None
    if not 1 <= int(asked) <= vocab_size:
        raise UsageError(f"{_FLAG} {asked} is no number of tokens from 1 to {vocab_size:,}, of which the model has.")
    return int(asked)


def _listed(path: Path, vocab_size: int) -> list[int]:
    try:
        return read_token_list(path, vocab_size)
    except FileNotFoundError:
        raise UsageError(f"{_FLAG} {path} is neither auto, full nor a number, and there is no such file.") from None


def new_draft_vocabulary(plan: DraftVocabPlan, added_token_ids: tuple[int, ...] = ()) -> DraftVocabulary:
    """That of a model of which nothing was counted; its counts are not kept."""
    return _vocabulary(plan, added_token_ids, {}, None)


def open_draft_vocabulary(
    plan: "EnginePlan", added_token_ids: tuple[int, ...], report: ReportStart = lambda _: None
) -> DraftVocabulary | None:
    """With what was counted of this model before. Counts that cannot be used are left alone, with a line in the log."""
    if plan.draft_vocab is None:
        return None
    counts: dict[int, int] = {}
    keep: KeepCounts | None = None
    if plan.draft_vocab.keeps_counts:
        counts, keep = _kept(plan.directory, plan.draft_vocab.vocab_size)
    vocabulary = _vocabulary(plan.draft_vocab, added_token_ids, counts, keep)
    total = sum(counts.values())
    report(DraftVocabOpened(plan.draft_vocab.size, plan.draft_vocab.vocab_size, total, vocabulary.coverage))
    return vocabulary


def kept_counts_path(directory: Path) -> tuple[Path, str]:
    """(the file with what was counted of the checkpoint in `directory`, the model's fingerprint).

    RuntimeError where the user has no cache directory.
    """
    from onebox.model.identity import weights_identity
    from onebox.model.load import LoadFormat
    from onebox.spec.conversion import AS_STORED

    # How the weights are loaded makes no other model of it.
    model = weights_identity(directory, LoadFormat.AUTO, {}, AS_STORED)
    return counts_path(user_cache_directory(), model), model


def _kept(directory: Path, vocab_size: int) -> tuple[dict[int, int], KeepCounts | None]:
    """What was counted before, and what stores the counts from now on."""
    try:
        path, model = kept_counts_path(directory)
    except (OSError, RuntimeError) as error:
        _log.warning("the counts behind the draft vocabulary are not kept: %s", error)
        return {}, None
    counts: dict[int, int] = {}
    try:
        counts = read_kept_counts(path, model, vocab_size)
    except FileNotFoundError:
        pass
    except UnreadableError as error:
        _log.warning("the counts behind the draft vocabulary begin anew: %s", error)
    return counts, lambda counted: write_kept_counts(path, KeptCounts(model, vocab_size, counted))


def _vocabulary(
    plan: DraftVocabPlan, added_token_ids: tuple[int, ...], counts: dict[int, int], keep: KeepCounts | None
) -> DraftVocabulary:
    added = [token_id for token_id in added_token_ids if token_id < plan.vocab_size][: plan.size]
    first = plan.prior if plan.is_fixed else dict.fromkeys([*plan.prior, *added])
    prior = first_tokens(plan.vocab_size, plan.vocab_size, first)
    # A list that was made for the model knows which added tokens it says.
    always = () if plan.prior else added
    return DraftVocabulary(prior, plan.size, plan.vocab_size, counts, always=always, keep=keep, is_fixed=plan.is_fixed)
