"""Which tokens drafts are chosen from: a list that follows what the model says.

Every token of an answer is counted, and nothing else of it: no text, no order. Now and then the counts are reviewed on
a thread of their own. If another list would have held clearly more of what was said, its rows of the LM head
replace others, a bounded number before each step, in the memory that captured graphs read. Each row and its token are
replaced together, so that the list is a valid one after every step. No answer depends on it: a token that is not
listed is not drafted.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.engine.stats import DraftVocabStats

__all__ = ["ROWS_PER_STEP", "DraftVocabulary", "KeepCounts", "PutRows", "Renewal", "best_list", "renewal"]

PutRows = Callable[[Sequence[int], Sequence[int]], None]
"""Called with places of the list and the tokens that they get."""
KeepCounts = Callable[[dict[int, int]], None]
"""Called on another thread with all counts that are not 0, the largest first. Raises OSError."""
Ids = NDArray[np.int64]

ROWS_PER_STEP = 512
"""Rows that are replaced before one step: 1.6 MB of an INT8 head of 3,072 columns, microseconds on a GPU."""
_MISSES = 16
"""Tokens that were said and not listed, before the counts are reviewed: what is new is seen at once, and a list that
fits is hardly looked at. A review of 248,320 tokens takes some 5 ms of another thread."""
_LEAST_GAIN = 8
"""By how many of the counted tokens another list must hold more."""
_MAX_TOTAL = 1 << 21
"""Counts are halved when they reach it: what was said long ago counts less and less."""
_KEEP_S = 60.0
"""Between two writings of the counts."""

_log = logging.getLogger(__name__)


class Renewal(NamedTuple):
    """Places of the list and the tokens that they get, those that are said most first."""

    places: list[int]
    token_ids: list[int]


class _Review(NamedTuple):
    renewal: Renewal | None
    was_kept: bool


class DraftVocabulary:
    """The list, the counts behind it, and its renewal. Used by the engine's thread."""

    def __init__(
        self,
        prior: Sequence[int],
        size: int,
        vocab_size: int,
        counts: dict[int, int],
        *,
        always: Sequence[int] = (),
        keep: KeepCounts | None = None,
        is_fixed: bool = False,
    ) -> None:
        """`prior` has at least `size` tokens in the order in which they are listed before anything is counted.

        `always` are listed whatever is counted. `is_fixed`: the list stays the prior one. `keep` stores the counts.
        """
        self._prior = np.array(prior, dtype=np.int64)
        self._always = np.array(list(dict.fromkeys(always)), dtype=np.int64)
        self._is_fixed = is_fixed
        self._keep = keep
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        if counts:
            self._counts[list(counts)] = list(counts.values())
        self._total = int(self._counts.sum())
        self._num_missed = 0
        """Since the last review."""
        self._each = self._counts.data
        """The same memory, quicker for one number at a time."""
        listed = self._prior[:size] if is_fixed else best_list(self._counts, self._prior, self._always, size)
        self._token_ids = listed.copy()
        self._is_listed = bytearray(vocab_size)
        for token_id in listed.tolist():
            self._is_listed[token_id] = 1
        self._num_said = self._num_listed = self._num_renewals = 0
        self._pending: Renewal | None = None
        self._worker = ThreadPoolExecutor(1, "onebox-draft-vocab")
        self._review: Future[_Review] | None = None
        self._kept_total, self._kept_at = self._total, time.monotonic()

    @property
    def token_ids(self) -> list[int]:
        """The list, by the place of each token's row."""
        return [int(token_id) for token_id in self._token_ids]

    @property
    def coverage(self) -> float | None:
        """The share of all counted tokens that are listed now; None before any was counted."""
        return float(self._counts[self._token_ids].sum() / self._total) if self._total else None

    @property
    def stats(self) -> DraftVocabStats:
        sizes = len(self._token_ids), len(self._counts)
        return DraftVocabStats(*sizes, self._num_said, self._num_listed, self._num_renewals)

    def count(self, token_ids: Sequence[int]) -> None:
        """Counts tokens of an answer."""
        each, is_listed, num_listed = self._each, self._is_listed, 0
        for token_id in token_ids:
            each[token_id] += 1
            num_listed += is_listed[token_id]
        self._num_listed += num_listed
        self._num_missed += len(token_ids) - num_listed
        self._num_said += len(token_ids)
        self._total += len(token_ids)

    def tend(self, put_rows: PutRows) -> None:
        """Called between two steps: replaces a few rows, or has the counts reviewed where that is due."""
        if self._pending:
            self._put_some(self._pending, put_rows)
        elif self._review:
            if self._review.done():
                self._take_review(self._review)
        elif self._is_review_due():
            self._start_review()

    def close(self) -> None:
        """Waits for a review and stores what was counted since."""
        self._worker.shutdown()
        if self._keep and self._total != self._kept_total:
            _store(self._keep, self._counts)

    def _is_review_due(self) -> bool:
        return (self._num_missed >= _MISSES and not self._is_fixed) or self._is_keeping_due()

    def _is_keeping_due(self) -> bool:
        return bool(self._keep) and self._total != self._kept_total and time.monotonic() - self._kept_at >= _KEEP_S

    def _start_review(self) -> None:
        if self._total >= _MAX_TOTAL:
            self._counts >>= 1
            self._total = int(self._counts.sum())
        self._num_missed = 0
        keep = self._keep if self._is_keeping_due() else None
        if keep:
            self._kept_total, self._kept_at = self._total, time.monotonic()
        self._review = self._worker.submit(self._look, self._counts.copy(), self._token_ids.copy(), keep)

    def _look(self, counts: Ids, token_ids: Ids, keep: KeepCounts | None) -> _Review:
        """On the other thread."""
        found = None if self._is_fixed else renewal(counts, token_ids, self._prior, self._always)
        return _Review(found, keep is None or _store(keep, counts))

    def _take_review(self, review: "Future[_Review]") -> None:
        self._review = None
        self._pending, was_kept = review.result()
        if not was_kept:
            self._keep = None  # said once; the counts go on in memory

    def _put_some(self, pending: Renewal, put_rows: PutRows) -> None:
        places, token_ids = pending.places[:ROWS_PER_STEP], pending.token_ids[:ROWS_PER_STEP]
        put_rows(places, token_ids)
        for old in self._token_ids[places].tolist():
            self._is_listed[old] = 0
        self._token_ids[places] = token_ids
        for new in token_ids:
            self._is_listed[new] = 1
        rest = Renewal(pending.places[ROWS_PER_STEP:], pending.token_ids[ROWS_PER_STEP:])
        self._pending = rest if rest.places else None
        if self._pending is None:
            self._num_renewals += 1


def best_list(counts: Ids, prior: Ids, always: Ids, size: int) -> Ids:
    """The tokens `always`, then those that were said, the commonest first, then the prior list's: int64 [size]."""
    is_taken = np.zeros(len(counts), dtype=bool)
    rank = np.full(len(counts), len(prior), dtype=np.int64)
    rank[prior] = np.arange(len(prior))
    said = np.flatnonzero(counts)
    said = said[np.argsort(rank[said] - counts[said] * (len(prior) + 1))]
    parts: list[Ids] = []
    for part in (always, said, prior):
        new = part[~is_taken[part]][:size]
        is_taken[new] = True
        size -= len(new)
        parts.append(new)
    return np.concatenate(parts)


def renewal(counts: Ids, token_ids: Ids, prior: Ids, always: Ids) -> Renewal | None:
    """How the list becomes the best one; None where that would not hold clearly more of what was counted."""
    best = best_list(counts, prior, always, len(token_ids))
    if counts[best].sum() - counts[token_ids].sum() < _LEAST_GAIN:
        return None
    is_best, is_listed = np.zeros((2, len(counts)), dtype=bool)
    is_best[best], is_listed[token_ids] = True, True
    places = np.flatnonzero(~is_best[token_ids])
    places = places[np.argsort(counts[token_ids[places]], kind="stable")]
    return Renewal(places.tolist(), best[~is_listed[best]].tolist())


def _store(keep: KeepCounts, counts: Ids) -> bool:
    """Whether the counts could be stored."""
    said = np.flatnonzero(counts)
    said = said[np.argsort(-counts[said], kind="stable")]
    try:
        keep({int(token_id): int(counts[token_id]) for token_id in said})
    except OSError as error:
        _log.warning("the counts behind the draft vocabulary cannot be kept (%s); a restart begins anew", error)
        return False
    return True
