"""Calibration text: which files are read and how they become sequences."""

import json
from pathlib import Path

import pytest

from onebox.model.random_text import text_files
from onebox.quantize.documents import index_files
from onebox.quantize.settings import CalibrationSettings
from onebox.spec.errors import UnreadableError, UsageError
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer

SETTINGS = CalibrationSettings(num_sequences=4, sequence_tokens=32, num_held_out=0)
QUESTION, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seventeen."}


TEMPLATE = ChatTemplate(text_files()["chat_template.jinja"])


def lines(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def read(tokenizer: Tokenizer, *paths: Path, settings: CalibrationSettings = SETTINGS) -> list[str]:
    found = index_files(paths).tokens(tokenizer, TEMPLATE, settings)
    assert found.token_ids.shape == (len(found.token_ids), settings.sequence_tokens)
    return [tokenizer.decode(ids) for ids in found.token_ids.tolist()]


def test_a_text_file_of_any_length_becomes_whole_sequences_of_its_text(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {number} of the book.\n" for number in range(4000)))
    found = read(tokenizer, path)
    assert len(found) == 4
    assert all("book" in text for text in found)


def test_the_same_seed_reads_the_same_tokens_and_another_does_not(tokenizer, tmp_path):
    path = lines(tmp_path / "texts.jsonl", *({"text": f"Text {number}, and no other."} for number in range(60)))
    one, same, other = (
        index_files([path]).tokens(tokenizer, None, CalibrationSettings(4, 32, seed=seed)).token_ids.tolist()
        for seed in (0, 0, 1)
    )
    assert one == same != other


def test_what_is_held_out_comes_behind_what_is_tuned_on_and_is_little_of_little_text(tokenizer, tmp_path):
    path = lines(tmp_path / "texts.jsonl", *({"text": f"Text {number}, and no other."} for number in range(200)))
    alone, more, all_there_is = (
        index_files([path]).tokens(tokenizer, None, CalibrationSettings(count, 32, num_held_out=held_out))
        for count, held_out in ((4, 0), (4, 3), (1000, 500))
    )
    assert (alone.num_tuned_on, alone.num_held_out) == (4, 0)
    assert (more.num_tuned_on, more.num_held_out) == (4, 3)
    assert more.token_ids[:4].tolist() == alone.token_ids.tolist()
    assert 1 <= all_there_is.num_held_out <= len(all_there_is.token_ids) / 8


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [QUESTION, ANSWER]},
        {"request": {"model": "m", "messages": [QUESTION]}, "response": {"choices": [{"message": ANSWER}]}},
    ],
    ids=["messages", "recorded"],
)
def test_conversations_are_rendered_with_their_answers(tokenizer, tmp_path, line):
    ids = tokenizer.encode(TEMPLATE.render([QUESTION, ANSWER]))
    text = index_files([lines(tmp_path / "log.jsonl", line)])
    found = text.tokens(tokenizer, TEMPLATE, CalibrationSettings(1, len(ids)))
    assert tuple(found.token_ids[0].tolist()) == ids
    assert "Seventeen." in TEMPLATE.render([QUESTION, ANSWER])


def test_conversations_with_pictures_are_counted_and_left_out(tokenizer, tmp_path):
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    path = lines(tmp_path / "log.jsonl", {"messages": [picture]}, {"text": "long enough " * 40})
    assert index_files([path]).tokens(tokenizer, TEMPLATE, SETTINGS).num_left_out == 1


@pytest.mark.parametrize("line", ["no JSON", '{"prompt": "x"}', '{"text": 3}', '{"messages": 3}', "[1]"])
def test_a_line_of_another_kind_is_named_by_its_place(tokenizer, tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(
        UnreadableError, match=r"The line at byte 17 of .*log.jsonl is neither a text nor a conversation"
    ):
        index_files([path]).tokens(tokenizer, TEMPLATE, SETTINGS)


def test_too_little_text_and_a_missing_file_are_said(tokenizer, tmp_path):
    with pytest.raises(UsageError, match="less than one sequence of 32: give more text with --data"):
        index_files([lines(tmp_path / "short.jsonl", {"text": "Short."})]).tokens(tokenizer, TEMPLATE, SETTINGS)
    with pytest.raises(UnreadableError, match=r"none.txt cannot be read: No such file"):
        index_files([tmp_path / "none.txt"])


def test_a_file_with_a_changed_byte_has_another_digest(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a" * 100_000)
    before = index_files([path]).digests
    path.write_text("a" * 99_999 + "b")
    assert index_files([path]).digests != before
