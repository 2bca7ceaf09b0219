"""The draft vocabulary's size, from the flag of `plan`."""

import pytest

from onebox.spec.draft_vocab import parse_draft_vocab
from onebox.spec.errors import UsageError


def test_the_flag_takes_auto_full_and_a_number():
    assert parse_draft_vocab("auto", 8192) == 1344
    assert parse_draft_vocab("full", 8192) is None
    assert parse_draft_vocab("8192", 8192) is None
    assert parse_draft_vocab("17", 8192) == 17


@pytest.mark.parametrize("text", ["", "0", "8193", "-1", "1e3", "all", "٣"])
def test_anything_else_is_refused_by_flag(text):
    with pytest.raises(UsageError, match="--draft-vocab"):
        parse_draft_vocab(text, 8192)
