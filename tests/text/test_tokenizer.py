"""Text and ids, there and back."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.text.tokenizer import Tokenizer

# Control tokens written out become tokens without text; hypothesis finds their names in our source.
ORDINARY = st.text().filter(lambda text: "<|" not in text)


@given(ORDINARY)
def test_text_survives_the_way_there_and_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 400)))
def test_the_bytes_of_the_tokens_are_the_text(tokenizer, token_ids):
    joined = b"".join(map(tokenizer.token_bytes, token_ids))
    assert joined.decode(errors="replace") == tokenizer.decode(token_ids)


def test_control_tokens_are_read_and_have_no_text_but_think_has(tokenizer):
    token_ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|><think>")
    assert (token_ids[0], token_ids[-2], token_ids[-1]) == (257, 258, 256 + 24)
    assert tokenizer.decode(token_ids) == "user\nhi<think>"


def test_an_added_token_outside_the_byte_alphabet_is_its_own_text(checkpoint, tmp_path):
    source = json.loads((checkpoint / "tokenizer.json").read_text())
    source["added_tokens"].append(
        {"id": 282, "content": "é →", "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.token_bytes(282).decode() == tokenizer.decode([282]) == "é →"


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(UsageError, match=r"U\+D800 by itself"):
        tokenizer.encode("a\ud800")


def test_other_kinds_of_tokenizer_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "Metaspace"}}')
    with pytest.raises(UnsupportedError, match="not ByteLevel"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    with pytest.raises(UnreadableError, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)


def test_transformers_reads_the_same_tokenizer(checkpoint, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import PreTrainedTokenizerFast

    # Without tokenizer_config.json: its tokenizer class would rebuild the pre-tokenizer with rules of its own.
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>Grüße, 世界 🙂<|im_end|></think>\n"
    assert tuple(theirs.encode(text, add_special_tokens=False)) == tokenizer.encode(text)
    assert theirs.vocab_size + len(theirs.get_added_vocab()) >= 282
