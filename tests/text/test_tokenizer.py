"""Text and ids, there and back."""

import ctypes
import json
import random
import shutil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.text import tokenizer as module
from onebox.text.tokenizer import Tokenizer, TooManyTokensError

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


WORDS = st.lists(
    st.sampled_from(
        [
            *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "\x1c", "a", "Word", "'s", "'LL", "1", "23"),
            *(
                "é",
                "e\u0301",
                "=",
                "\u0338",
                "\u1100",
                "\u1161",
                "\u11a8",
                "世",
                "界",
                "，",
                "。",
                "テ",
                "\u3099",
                "한",
            ),
            *("!", "...", "<", "<think>", "</think>", "<|im_end|>", "_", "-", "🙂", "\u200d", "\u0660", "²", "ⅷ", "ͅ"),
        ]
    ),
    max_size=30,
).map("".join) | st.text(max_size=30)


@settings(max_examples=300)
@given(WORDS, st.integers(1, 5))
@example("a \u0301b  1", 1)
def test_a_long_text_in_pieces_has_the_ids_of_the_whole(merging_tokenizer, text, piece_chars):
    whole = merging_tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CHARS", piece_chars)
        patch.setattr(module, "_SEARCH_CHARS", 3)
        assert list(merging_tokenizer.encode(text)) == whole


def test_ordinary_text_is_cut_into_pieces(merging_tokenizer):
    texts = (
        "<|im_end|>x"[1:],
        "if(a){b()}else{c()};",
        "SGVsbG8sIHdvcmxkIQ",
        "The quick brown fox. ",
        "世界，你好。",
        "0123456789",
        "line\n",
        "def f(x): return x\n",
    )
    for text in texts:
        pieces = list(merging_tokenizer._pieces(text * 20_000, is_bounded=True))
        assert max(map(len, pieces)) < 2 * module._PIECE_CHARS
        assert "".join(pieces) == text * 20_000


def test_a_text_beyond_a_limit_is_refused_before_all_of_it_is_encoded(merging_tokenizer, monkeypatch):
    encoded = []
    encode_words = merging_tokenizer._encode_words
    monkeypatch.setattr(merging_tokenizer, "_encode_words", lambda text: (encoded.append(text), encode_words(text))[1])
    with pytest.raises(TooManyTokensError, match="more than 20000 tokens"):
        merging_tokenizer.encode("one two three " * 100_000, max_tokens=20_000)
    assert len(encoded) < 5
    for text, count in (("a b", 2), ("<|im_end|>" * 3, 3)):
        assert len(merging_tokenizer.encode(text, max_tokens=count)) == count
        with pytest.raises(TooManyTokensError):
            merging_tokenizer.encode(text, max_tokens=count - 1)


def test_no_text_is_longer_than_its_tokens_allow(merging_tokenizer):
    for token_id in range(0, 8192, 7):
        # A character of four characters that compose to one is the worst case.
        assert 4 * len(merging_tokenizer.shown_bytes(token_id).decode(errors="replace")) <= merging_tokenizer.max_chars(
            1
        )
    with pytest.raises(TooManyTokensError):
        merging_tokenizer.encode("a" * (merging_tokenizer.max_chars(5) + 1), max_tokens=5)


def test_an_endless_word_is_refused_where_the_time_is_bounded(merging_tokenizer):
    for text in ("a" * 2_000_000, "<" * 2_000_000, " " * 2_000_000, "x " + "ß" * 2_000_000):
        with pytest.raises(UsageError, match="without a place where a word ends"):
            merging_tokenizer.encode(text, max_tokens=10**6)
    assert len(merging_tokenizer.encode("a" * 200_000, max_tokens=10**6)) > 1000


def test_a_token_that_depends_on_the_text_around_it_is_refused(checkpoint, tmp_path):
    source = json.loads((checkpoint / "tokenizer.json").read_text())
    source["added_tokens"][0]["lstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(UnsupportedError, match="depends on the text around it"):
        Tokenizer.load(tmp_path)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="memory in use is asked of glibc")
def test_many_long_words_are_not_kept():
    """The library's own cache would hold 10,000 of them, 7 kB each."""
    tokenizer = Tokenizer.load(MODEL_DIRECTORY)
    words = random.Random(0)
    before = _used_bytes()
    for _ in range(12):
        text = " ".join("".join(words.choices("abcdefgh", k=200)) for _ in range(1000))
        tokenizer.encode(text)
    assert _used_bytes() - before < 20e6


class _Use(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "mapped", "e", "f", "used", "g", "h"))


def _used_bytes():
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Use
    use = library.mallinfo2()
    return use.used + use.mapped
