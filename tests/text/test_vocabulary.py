"""The table that the engine is handed says what the tokenizer says."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from onebox.text.vocabulary import token_table

EOS = (258, 256)


@given(st.lists(st.integers(0, 281)))
def test_the_bytes_of_the_table_are_the_decoded_text(tokenizer, token_ids):
    table = token_table(tokenizer, EOS)
    joined = b"".join(table.tokens[token_id] for token_id in token_ids)
    assert joined.decode(errors="replace") == tokenizer.decode(token_ids)


def test_control_tokens_are_marked_and_readable_tags_are_text(tokenizer):
    table = token_table(tokenizer, EOS)
    assert len(table.tokens) == 282
    assert table.special_ids == set(range(256, 270))
    assert all(table.tokens[token_id] == b"" for token_id in table.special_ids)
    assert table.tokens[280] == b"<think>"
    assert table.eos_token_ids == EOS


def test_the_table_crosses_a_process_boundary(tokenizer):
    table = token_table(tokenizer, EOS)
    assert pickle.loads(pickle.dumps(table)) == table  # noqa: S301
