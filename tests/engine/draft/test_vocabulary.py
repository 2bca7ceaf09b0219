"""The list of tokens for drafts follows what was said, a few rows at a time, and is a valid list after every step."""

import numpy as np
import pytest

from onebox.engine.draft import vocabulary as module
from onebox.engine.draft.vocabulary import DraftVocabulary, best_list, renewal
from onebox.engine.prefix import PrefixStats
from onebox.engine.stats import DraftVocabStats, EngineStats, Totals, add_past

VOCAB, SIZE = 60, 10


def make(**options):
    return DraftVocabulary(range(VOCAB), SIZE, VOCAB, options.pop("counts", {}), **options)


def tend_until(vocabulary, put_rows, is_done):
    """As the engine does between steps; the review is on another thread."""
    for _ in range(100_000):
        if is_done():
            return
        review = vocabulary._review
        if review is not None:
            review.result()
        vocabulary.tend(put_rows)
    raise AssertionError("the list is never renewed")


def test_the_best_list_has_what_must_be_then_what_was_said_then_the_prior_list():
    counts = np.zeros(VOCAB, dtype=np.int64)
    counts[[50, 40, 3, 41]] = [9, 20, 5, 5]
    prior = np.array([7, 41, 3, 2, 1, 0])
    assert best_list(counts, prior, np.array([59]), 7).tolist() == [59, 40, 50, 41, 3, 7, 2]
    assert best_list(counts, prior, np.array([59]), 3).tolist() == [59, 40, 50]
    assert best_list(counts * 0, prior, np.array([], dtype=np.int64), 3).tolist() == [7, 41, 3]


def test_a_list_is_renewed_only_where_it_then_holds_clearly_more():
    counts, none = np.zeros(VOCAB, dtype=np.int64), np.array([], dtype=np.int64)
    prior, listed = np.arange(VOCAB), np.arange(SIZE)
    assert renewal(counts, listed, prior, none) is None
    counts[0], counts[30] = 10_000, 7
    assert renewal(counts, listed, prior, none) is None
    counts[30], counts[31] = 8, 500
    found = renewal(counts, listed, prior, none)
    assert found.token_ids == [31, 30]
    assert sorted(found.places) == [8, 9]


def test_counting_renews_the_list_in_pieces_and_rows_move_with_their_tokens(monkeypatch):
    monkeypatch.setattr(module, "ROWS_PER_STEP", 3)
    vocabulary = make(always=[59])
    rows, pieces = dict(enumerate(vocabulary.token_ids)), []
    assert sorted(rows.values()) == [*range(9), 59]

    def put_rows(places, token_ids):
        pieces.append(len(places))
        rows.update(zip(places, token_ids, strict=True))
        assert len(set(rows.values())) == SIZE

    said = [20, 21, 22, 23, 24, 25, 26, 27] * 40
    vocabulary.count(said)
    assert vocabulary.coverage == 0
    tend_until(vocabulary, put_rows, lambda: vocabulary.stats.num_renewals)
    assert pieces == [3, 3, 2]
    assert vocabulary.token_ids == [rows[place] for place in range(SIZE)]
    assert {*range(20, 28), 59} < {*vocabulary.token_ids}
    assert vocabulary.coverage == 1
    vocabulary.count([20, 59, 58])
    assert vocabulary.stats == DraftVocabStats(SIZE, VOCAB, len(said) + 3, 2, 1)
    vocabulary.close()


def test_a_list_that_has_what_is_said_is_left_alone():
    vocabulary = make()
    vocabulary.count([*range(SIZE)] * 10_000 + [40] * 15)
    vocabulary.tend(lambda *_: pytest.fail("the list was renewed"))
    assert vocabulary._review is None
    vocabulary.count([41])
    vocabulary.tend(lambda *_: None)
    assert vocabulary._review is not None
    vocabulary.close()


def test_a_fixed_list_is_counted_and_never_renewed():
    vocabulary = make(is_fixed=True)
    vocabulary.count([30] * 100_000)
    for _ in range(3):
        vocabulary.tend(lambda *_: pytest.fail("a fixed list was renewed"))
    assert vocabulary._review is None
    assert vocabulary.token_ids == [*range(SIZE)]
    vocabulary.close()


def test_counts_of_before_decide_the_first_list():
    vocabulary = make(counts={30: 5, 31: 50})
    assert vocabulary.token_ids == [31, 30, *range(8)]
    assert vocabulary.coverage == 1
    vocabulary.close()


def test_counts_are_kept_when_the_engine_closes_and_never_grow_beyond_a_bound(monkeypatch):
    monkeypatch.setattr(module, "_MAX_TOTAL", 1000)
    stored = []
    vocabulary = make(keep=stored.append)
    vocabulary.count([1] * 600 + [2] * 400 + [3] + [50] * 16)
    tend_until(vocabulary, lambda *_: None, lambda: vocabulary._review is not None)
    vocabulary.close()
    assert stored == [{1: 300, 2: 200, 50: 8}]


def test_counts_that_cannot_be_kept_are_told_once_and_go_on(monkeypatch, caplog):
    monkeypatch.setattr(module, "_KEEP_S", 0.0)

    def keep(_):
        raise OSError(30, "Read-only file system")

    vocabulary = make(keep=keep)
    for token_id in (30, 31, 32):
        vocabulary.count([token_id] * 5000)
        tend_until(vocabulary, lambda *_: None, lambda: vocabulary._review is not None)
        tend_until(vocabulary, lambda *_: None, lambda: vocabulary._review is None and vocabulary._pending is None)
    vocabulary.close()
    assert len(caplog.records) == 1
    assert "Read-only file system" in caplog.text
    assert {30, 31, 32} <= {*vocabulary.token_ids}


def test_an_engines_successor_adds_to_what_was_said_before():
    def stats(vocab):
        return EngineStats(True, 0, 0, 1, 1, Totals().frozen(), PrefixStats(*[0] * 7), draft_vocab=vocab)

    now, then = DraftVocabStats(10, 60, 5, 4, 1), DraftVocabStats(10, 60, 50, 40, 2)
    assert add_past(stats(now), stats(then)).draft_vocab == DraftVocabStats(10, 60, 55, 44, 3)
    assert add_past(stats(now), stats(None)).draft_vocab == now
