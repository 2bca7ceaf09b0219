"""The draft vocabulary's size, from the flag."""

import pytest

from onebox.spec.draft_vocab import default_draft_vocab_size, draft_head_bytes, parse_draft_vocab
from onebox.spec.errors import UsageError


@pytest.mark.parametrize(("vocab", "rows"), [(248_320, 40_960), (8_192, 1_344), (480, None)])
def test_the_default_is_a_sixth_at_most(vocab, rows):
    assert default_draft_vocab_size(vocab) == rows


def test_the_flag_takes_auto_full_and_a_number():
    assert parse_draft_vocab("auto", 8192) == 1344
    assert parse_draft_vocab("full", 8192) is None
    assert parse_draft_vocab("8192", 8192) is None
    assert parse_draft_vocab("17", 8192) == 17


@pytest.mark.parametrize("text", ["", "0", "8193", "-1", "1e3", "all", "٣"])
def test_anything_else_is_refused_by_flag(text):
    with pytest.raises(UsageError, match="--draft-vocab"):
        parse_draft_vocab(text, 8192)


def test_a_draft_reads_its_rows_alone():
    assert draft_head_bytes(1000, 100, None) == 1000
    assert draft_head_bytes(1000, 100, 10) == 100
    assert draft_head_bytes(1001, 100, 10) == 101
