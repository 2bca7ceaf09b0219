"""The engine's statistics: current counts, and totals since the start."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from onebox.engine.draft.kinds import Drafter, TextPart
from onebox.engine.prefix import PrefixStats
from onebox.engine.request import AcceptanceCounts, ClassCounts, FinishReason

__all__ = [
    "AcceptanceTally",
    "ClassTallies",
    "DiskStats",
    "DraftVocabStats",
    "EngineStats",
    "FrozenTotals",
    "Totals",
    "add_classes",
    "add_past",
]


class AcceptanceTally:
    """Counts drafts step by step; `counts` gives an AcceptanceCounts."""

    def __init__(self) -> None:
        self._num_steps = self._num_drafted = 0
        self._num_by_accepted: list[int] = []
        """How many steps accepted n drafts, for n from 0 on."""
        self._counts: AcceptanceCounts | None = AcceptanceCounts()
        """Cached since the last step with drafts: an engine reads its totals in every step."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Counts one step of a sequence; a step without drafts counts nothing."""
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"{num_accepted} of {num_drafted} drafts cannot have been accepted")
        if num_drafted:
            self._num_steps += 1
            self._num_drafted += num_drafted
            self._num_by_accepted += [0] * (num_accepted + 1 - len(self._num_by_accepted))
            self._num_by_accepted[num_accepted] += 1
            self._counts = None

    @property
    def counts(self) -> AcceptanceCounts:
        if self._counts is None:
            # A step that accepted three drafts accepted a first, a second and a third one.
            accepted = tuple(accumulate(reversed(self._num_by_accepted[1:])))[::-1]
            self._counts = AcceptanceCounts(self._num_steps, self._num_drafted, sum(accepted), accepted)
        return self._counts


class ClassTallies:
    """Counts drafts by who drafted, and for which part of the answer."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[Drafter, TextPart], AcceptanceTally] = {}

    def add(self, drafter: Drafter, part: TextPart, num_drafted: int, num_accepted: int) -> None:
        """Counts one step of a sequence; a step without drafts counts nothing."""
        if num_drafted:
            tally = self._tallies.get((drafter, part))
            if tally is None:
                tally = self._tallies[drafter, part] = AcceptanceTally()
            tally.add(num_drafted, num_accepted)

    @property
    def counts(self) -> ClassCounts:
        return {kind: tally.counts for kind, tally in self._tallies.items()}


def add_classes(one: ClassCounts, two: ClassCounts) -> ClassCounts:
    """The sums, class by class."""
    nothing = AcceptanceCounts()
    return {kind: one.get(kind, nothing) + two.get(kind, nothing) for kind in {**one, **two}}


@dataclass(frozen=True)
class FrozenTotals:
    """Totals since the start."""

    num_steps: int
    finished: dict[FinishReason, int]
    num_failed: int
    num_preempted: int
    prompt_tokens: int
    """Computed ones, without those from the prefix cache."""
    completion_tokens: int
    drafts: AcceptanceCounts
    head_samples: int = 0
    """First drafts of the MTP head that tell how good it is (`SequenceDrafts.takes_head_sample`)."""
    head_accepted: int = 0
    drafts_by_class: ClassCounts = field(default_factory=dict)


@dataclass
class Totals:
    """Counts up to now; `frozen` gives a FrozenTotals."""

    num_steps: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    num_failed: int = 0
    num_preempted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafts: AcceptanceTally = field(default_factory=AcceptanceTally)
    head_samples: int = 0
    head_accepted: int = 0
    drafts_by_class: ClassTallies = field(default_factory=ClassTallies)

    def frozen(self) -> FrozenTotals:
        return FrozenTotals(
            self.num_steps,
            dict(self.finished),
            self.num_failed,
            self.num_preempted,
            self.prompt_tokens,
            self.completion_tokens,
            self.drafts.counts,
            self.head_samples,
            self.head_accepted,
            self.drafts_by_class.counts,
        )


@dataclass(frozen=True)
class DiskStats:
    """Prefixes on disk: totals since the start; the last three are current."""

    num_hits: int = 0
    """Prompts that were admitted with a prefix that was read from disk for them."""
    hit_tokens: int = 0
    """Of PrefixStats.hit_tokens, those of these prompts."""
    read_bytes: int = 0
    written_bytes: int = 0
    saved_s: float = 0.0
    """What computing the hits would have taken, as measured, less what reading them took."""
    num_damaged: int = 0
    """Files that were torn, changed or missing: each a miss."""
    num_dropped: int = 0
    """Prefixes that were evicted from memory before they could be written."""
    num_evicted: int = 0
    """Prefixes removed from disk to keep within its bytes."""
    num_entries: int = 0
    used_bytes: int = 0
    is_writing: bool = True
    """False while the disk is full or cannot be written."""


@dataclass(frozen=True)
class DraftVocabStats:
    """The tokens that drafts are chosen from, and how many of those said were among them, since the start."""

    size: int
    vocab_size: int
    num_said: int = 0
    """Tokens of answers."""
    num_listed: int = 0
    """Of these, the ones that were listed when they were said."""
    num_renewals: int = 0
    """Times that the list was renewed from the counts."""


@dataclass(frozen=True)
class EngineStats:
    """The engine's state after a step."""

    is_alive: bool
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    totals: FrozenTotals
    prefix: PrefixStats
    disk: DiskStats | None = None
    """None without a prefix directory."""
    draft_vocab: DraftVocabStats | None = None
    """None where drafts are chosen from all tokens, or there are none."""

    @property
    def num_finished(self) -> int:
        return sum(self.totals.finished.values())


def add_past(stats: EngineStats, past: EngineStats | None) -> EngineStats:
    """The stats with the totals of earlier processes added, so that no counter ever falls."""
    if past is None:
        return stats
    now, then = stats.totals, past.totals
    totals = FrozenTotals(
        num_steps=now.num_steps + then.num_steps,
        finished=dict(Counter(now.finished) + Counter(then.finished)),
        num_failed=now.num_failed + then.num_failed,
        num_preempted=now.num_preempted + then.num_preempted,
        prompt_tokens=now.prompt_tokens + then.prompt_tokens,
        completion_tokens=now.completion_tokens + then.completion_tokens,
        drafts=now.drafts + then.drafts,
        head_samples=now.head_samples + then.head_samples,
        head_accepted=now.head_accepted + then.head_accepted,
        drafts_by_class=add_classes(now.drafts_by_class, then.drafts_by_class),
    )
    disk = _add_disk(stats.disk, past.disk) if stats.disk and past.disk else stats.disk
    vocab = _add_vocab(stats.draft_vocab, past.draft_vocab) if stats.draft_vocab and past.draft_vocab else None
    prefix = _add_prefix(stats.prefix, past.prefix)
    return replace(stats, totals=totals, prefix=prefix, disk=disk, draft_vocab=vocab or stats.draft_vocab)


def _add_prefix(now: PrefixStats, then: PrefixStats) -> PrefixStats:
    return replace(
        now,
        queried_tokens=now.queried_tokens + then.queried_tokens,
        num_hits=now.num_hits + then.num_hits,
        hit_tokens=now.hit_tokens + then.hit_tokens,
        saved=now.saved + then.saved,
        evicted=now.evicted + then.evicted,
    )


def _add_disk(now: DiskStats, then: DiskStats) -> DiskStats:
    totals = [field.name for field in fields(DiskStats)][:-3]
    return replace(now, **{name: getattr(now, name) + getattr(then, name) for name in totals})


def _add_vocab(now: DraftVocabStats, then: DraftVocabStats) -> DraftVocabStats:
    totals = [field.name for field in fields(DraftVocabStats)][2:]
    return replace(now, **{name: getattr(now, name) + getattr(then, name) for name in totals})
