"""Rows of examples and of text: whole, marked, and from where they should be."""

import json
from random import Random

import numpy as np
import pytest

from onebox.spec.errors import UnreadableError
from recipes.pocket.training.feed import ANSWER_WEIGHT, ExamplePool, MixedFeed, Rendered, TextRows, WorkerTask, fill_row


def draw(random: Random, room: int) -> Rendered:
    """Three tokens 7 and then an answer of tokens 8."""
    length = random.randrange(4, 9)
    return Rendered([7] * 3 + [8] * (length - 3), 3, "work")


def data(directory):
    (directory / "tokens").mkdir()
    for name, token in (("large", 20), ("small", 30)):
        np.full(500 if name == "large" else 10, token, np.uint16).tofile(directory / "tokens" / f"{name}.bin")
    (directory / "index.json").write_text(json.dumps({"large": {}, "small": {}}))
    return directory


def test_rows_hold_whole_examples_with_their_answers_marked():
    ids, kinds = np.empty(40, np.uint16), np.empty(40, np.uint8)
    fill_row(draw, Random(0), 1, {"work": 5}, ids, kinds)
    assert set(ids) == {1, 7, 8}
    assert ids[0] == 7
    assert ((kinds == 5) == (ids == 8)).all()


def test_an_example_longer_than_the_row_is_cut():
    ids, kinds = np.empty(10, np.uint16), np.empty(10, np.uint8)
    fill_row(lambda *_: Rendered(list(range(30)), 20, "work"), Random(0), 1, {"work": 5}, ids, kinds)
    assert ids.tolist() == list(range(10))
    assert not kinds.any()


def test_an_example_that_does_not_fit_is_redrawn():
    lengths = iter([50, 50, 12])
    ids, kinds = np.empty(13, np.uint16), np.empty(13, np.uint8)
    fill_row(lambda *_: Rendered([next(lengths, 1)] * 12, 2, "work"), Random(0), 1, {"work": 5}, ids, kinds)
    assert len(set(ids[:12])) == 1


def test_text_rows_come_from_all_sources_and_short_ones_repeat(tmp_path):
    rows = TextRows(data(tmp_path))
    seen = {}
    for _ in range(200):
        source, ids = rows.row(30)
        assert len(ids) == 32
        seen.setdefault(rows.sources[source], set()).update(ids.tolist())
    assert seen == {"large": {20}, "small": {30}}


def test_text_without_an_index_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(UnreadableError, match="prepare"):
        TextRows(tmp_path)


def test_a_batch_mixes_rows_of_the_pool_with_rows_of_text(tmp_path):
    pool = ExamplePool({30: 8, 60: 4})
    feed = MixedFeed(TextRows(data(tmp_path)), pool, ("work",))
    work = WorkerTask(lambda: draw, 1, {"work": feed.kinds.index("work")})
    assert not pool.is_ready()
    for seed in range(12):
        for length in (30, 60):
            pool.make_row(length, draw, Random(seed), work)
    assert pool.is_ready()
    batch = feed.batch(20, 60)
    assert batch.tokens.shape == batch.kinds.shape == (20, 62)
    is_example = np.isin(batch.tokens, (1, 7, 8)).all(1)
    assert is_example.sum() == 12
    assert set(batch.kinds[~is_example].flatten()) <= {1, 2}
    assert {feed.kinds[kind] for kind in set(batch.kinds[is_example].flatten())} == {"prompts", "work"}
    assert feed.weights == {3: ANSWER_WEIGHT}
