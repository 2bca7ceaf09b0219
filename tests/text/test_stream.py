"""Streamed pieces joined are the whole text, whatever the ids and the cuts."""

from hypothesis import example, given
from hypothesis import strategies as st

from onebox.text.marks import STAND_INS, with_spellings
from onebox.text.stream import Detokenizer, StopStrings
from tests.text.test_tokenizer import ORDINARY

# Some characters of several bytes, so that cuts fall inside them, beside arbitrary ids.
SMILE = "🙂世é"


def cut(sequence, lengths):
    """The sequence in pieces of the given lengths, and the rest."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(sequence[start : start + length])
        start += length
    return [*pieces, sequence[start:]]


@given(st.lists(st.integers(0, 383)), st.lists(st.integers(0, 5)))
def test_pieces_of_any_ids_join_to_the_whole_decoding(tokenizer, token_ids, lengths):
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(piece) for piece in cut(token_ids, lengths)]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(token_ids)


@given(ORDINARY, st.lists(st.integers(0, 5)))
@example(SMILE, [1] * 20)
def test_no_piece_of_valid_text_shows_half_a_character(tokenizer, text, lengths):
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(piece) for piece in cut(tokenizer.encode(text), lengths)]
    assert "".join(pieces) == text
    assert stream.flush() == ""


def stopped_text(text, stops):
    """What may be shown, found the slow way: the first stop string to be complete ends the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


LETTERS = st.text("abc", max_size=12)


@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 3)))
@example("abcd", ["abcd", "bc"], [1, 1, 1])
@example("abcd", ["abcd", "bc"], [])
def test_stop_strings_end_the_text_wherever_it_is_cut(text, stops, lengths):
    gate = StopStrings(stops)
    shown = "".join([gate.push(piece) for piece in cut(text, lengths)]) + gate.flush()
    assert (shown, gate.is_stopped) == stopped_text(text, stops)


@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_could_still_become_a_stop_string_is_not_shown(text, stops):
    gate, shown = StopStrings(stops), ""
    for end, letter in enumerate(text, start=1):
        shown += gate.push(letter)
        if gate.is_stopped:
            return
        undecided = [n for n in range(1, end + 1) if any(stop.startswith(text[end - n : end]) for stop in stops)]
        assert shown == text[: end - max(undecided, default=0)]
    assert shown + gate.flush() == text


@given(st.lists(st.integers(0, 383)), st.lists(st.integers(0, 5)))
@example([280, 255, 281, 270, 271], [1, 1, 1])
def test_tokens_that_are_marks_come_as_their_stand_ins_and_spellings_as_text(tokenizer, token_ids, lengths):
    stream = Detokenizer(tokenizer, has_marks=True)
    pieces = [stream.push(piece) for piece in cut(token_ids, lengths)]
    text = "".join(pieces) + stream.flush()
    assert with_spellings(text) == tokenizer.decode(token_ids)
    marks = [STAND_INS[tokenizer.mark_ids[i]] for i in token_ids if i in tokenizer.mark_ids]
    assert [char for char in text if char in STAND_INS.values()] == marks
