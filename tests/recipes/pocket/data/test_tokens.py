"""The pocket model's tokenizer and the token files."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from onebox.model.random_text import text_files
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import DoesNotFitError, MismatchError
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.data.sources import TextSource
from recipes.pocket.data.tokens import (
    NUM_TOKENS,
    balance_groups,
    check_token_files,
    read_documents,
    split_held_out,
    train_tokenizer,
    write_text_files,
    write_token_files,
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock.",
    "Árvíztűrő tükörfúrógép, 12 500 Ft — „idézet”.",
    "Pijamalı hasta yağız şoföre çabucak güvendi. İIıi",
    'def f(x: int) -> dict[str, int]:\n    return {"a": x + 1}\n\n\n\tend  ',
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "日本語 🙂 Ω हिन्दी q̂x̌",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIRECTORY)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_reads_the_same_ids(tokenizer):
    theirs = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    for text in (*TEXTS, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"):
        assert theirs(text)["input_ids"] == list(tokenizer.encode(text))


def test_the_vocabulary_has_its_size_and_control_tokens_at_its_end():
    tokenizer = json.loads((MODEL_DIRECTORY / "tokenizer.json").read_text())
    family = json.loads(text_files()["tokenizer.json"])["added_tokens"]
    added = tokenizer["added_tokens"]
    assert [token["content"] for token in added] == [token["content"] for token in family]
    assert [token["special"] for token in added] == [token["special"] for token in family]
    assert [token["id"] for token in added] == list(range(NUM_TOKENS - len(family), NUM_TOKENS))
    assert NUM_TOKENS % 128 == 0


def test_digits_stand_alone(tokenizer):
    assert len(tokenizer.encode("20250417")) == 8


def test_the_template_is_the_familys():
    assert (MODEL_DIRECTORY / "chat_template.jinja").read_text() == text_files()["chat_template.jinja"]


def test_generation_ends_at_the_end_of_a_message(tokenizer):
    generation = json.loads((MODEL_DIRECTORY / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [*tokenizer.encode("<|im_end|>"), *tokenizer.encode("<|endoftext|>")]


def test_a_small_group_is_repeated_until_it_weighs_as_much():
    chosen = balance_groups({"a": ["x" * 10] * 100, "b": ["y" * 10]}, characters=50)
    assert sorted(chosen) == ["x" * 10] * 5 + ["y" * 10] * 5


def sample(name: str) -> TextSource:
    return TextSource(name, "en", "none", "text", ())


def test_packed_documents_are_all_there_once_and_held_out_ones_apart(tmp_path):
    documents = {"one": [f"Document {number} of the árvíz." for number in range(300)]}
    tokenizer = train_tokenizer(documents["one"], num_tokens=320)
    index = write_token_files(documents, [sample("one")], tokenizer, tmp_path)
    end = tokenizer.token_to_id("<|endoftext|>")

    def texts(name: str) -> list[str]:
        return [tokenizer.decode(ids.tolist()) for ids in read_documents(tmp_path / "tokens" / name, end)]

    held_out = texts("heldout-one.bin")
    assert 0 < len(held_out) < 20
    assert sorted(held_out + texts("one.bin")) == sorted(documents["one"])
    assert index == json.loads((tmp_path / "index.json").read_text())
    assert index["one"]["tokens"] == len(np.fromfile(tmp_path / "tokens" / "one.bin", np.uint16))


def test_a_document_is_held_out_in_every_run_and_each_source_has_one():
    documents = [f"Document {number}." for number in range(300)]
    training, held_out = split_held_out(documents)
    again, held_out_again = split_held_out(documents[::-1])
    assert set(training) == set(again)
    assert set(held_out) == set(held_out_again)
    assert split_held_out(training[:2]) == (training[1:2], training[:1])


def test_more_than_may_travel_is_refused_with_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.pocket.data.tokens.MAX_BYTES", 10)
    tokenizer = train_tokenizer(["abc"], num_tokens=300)
    with pytest.raises(DoesNotFitError, match="the limit is 10"):
        write_token_files({"one": ["a long document"]}, [sample("one")], tokenizer, tmp_path)


def test_token_files_of_another_tokenizer_are_refused_with_the_command_that_makes_them_again(tmp_path):
    documents = {"one": [f"Document {number} of the árvíz." for number in range(60)]}
    own, other = train_tokenizer(documents["one"], num_tokens=320), train_tokenizer(["quite another"], num_tokens=320)
    for name, tokenizer in (("own", own), ("other", other)):
        write_text_files(tokenizer, tmp_path / name)
    write_token_files(documents, [sample("one")], own, tmp_path)
    check_token_files(tmp_path, tmp_path / "own")
    with pytest.raises(MismatchError, match=r"not made with the tokenizer in .*other.*prepare --tokenizer"):
        check_token_files(tmp_path, tmp_path / "other")
    (tmp_path / "tokenizer.sha256").unlink()
    with pytest.raises(MismatchError):
        check_token_files(tmp_path, tmp_path / "own")
