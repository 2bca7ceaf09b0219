"""Files of token ids and counts: what a user writes is read, what the engine kept is read only if it is whole."""

import pytest

from onebox.spec.errors import UnreadableError
from onebox.spec.token_counts import (
    KeptCounts,
    counts_path,
    read_kept_counts,
    read_token_list,
    write_kept_counts,
    write_token_list,
)

MODEL = "a" * 64
COUNTS = {7: 30, 3: 12, 90: 1}


@pytest.fixture
def kept(tmp_path):
    path = counts_path(tmp_path, MODEL)
    write_kept_counts(path, KeptCounts(MODEL, 100, COUNTS))
    return path


def test_kept_counts_come_back_and_are_a_list_for_users(kept):
    assert read_kept_counts(kept, MODEL, 100) == COUNTS
    assert read_token_list(kept, 100) == [7, 3, 90]
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_a_file_that_is_replaced_is_never_there_in_part(kept, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_kept_counts(kept, KeptCounts(MODEL, 100, {1: 1}))
    assert read_kept_counts(kept, MODEL, 100) == COUNTS
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-3],
        lambda text: text.replace("7 30", "7 31"),
        lambda text: text + "4 1\n",
        lambda _: "",
        lambda text: text.partition("\n")[2],
    ],
)
def test_damaged_counts_are_not_believed(kept, damage):
    kept.write_text(damage(kept.read_text()))
    with pytest.raises(UnreadableError):
        read_kept_counts(kept, MODEL, 100)


def test_counts_of_another_model_or_vocabulary_are_not_believed(kept):
    for model, vocab_size in (("b" * 64, 100), (MODEL, 101)):
        with pytest.raises(UnreadableError):
            read_kept_counts(kept, model, vocab_size)
    with pytest.raises(FileNotFoundError):
        read_kept_counts(kept.with_name("none"), MODEL, 100)


def test_a_list_without_counts_keeps_its_order(tmp_path):
    path = tmp_path / "list"
    path.write_text("# mine\n\n 9\n4 # no count\n".replace(" # no count", "") + "0\n")
    assert read_token_list(path, 10) == [9, 4, 0]
    write_token_list(path, {5: 0, 1: 8, 2: 9})
    assert read_token_list(path, 10) == [2, 1, 5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no token id"),
        ("1\n2\n1\n", "line 3: token 1 is listed twice"),
        ("10\n", "line 1: '10' is beyond the 10 tokens"),
        ("-1\n", "neither `id` nor `id count`"),
        ("1 2 3\n", "neither"),
        ("[1, 2]\n", "neither"),
        ("\u00e9\n", "no list of tokens"),
    ],
)
def test_what_is_no_list_is_refused_with_its_line(tmp_path, text, said):
    path = tmp_path / "list"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UnreadableError, match=said):
        read_token_list(path, 10)
