"""Missing and broken files beside the weights: said with advice, fatal where `onebox serve` could not start."""

import json

import pytest

from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.side_files import side_file_problems
from onebox.spec.model import read_config
from tests.synthetic import write_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12807982\n"


@pytest.fixture
def directory(tmp_path):
    return write_checkpoint(tmp_path / "model", "bf16-fused")


def found(directory, **given):
    return {problem.tensor: problem for problem in side_file_problems(directory, read_config(directory), **given)}


def test_a_missing_tokenizer_is_not_servable_and_said_with_where_to_take_it_from(directory, run_cli):
    (directory / "tokenizer.json").unlink()
    result = run_cli("inspect", directory)
    assert result.code == 1
    assert "problem: tokenizer.json is missing, so no text can be served" in result.out
    assert "copy it from the model that this one was made from" in result.out


def test_a_vocabulary_in_older_files_is_said_not_to_be_read(directory):
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text("{}")
    assert "vocab.json and merges.txt are not read" in found(directory)["tokenizer.json"].message


@pytest.mark.parametrize(
    ("text", "words"), [(POINTER, "is a Git LFS pointer"), ("{", "is not valid JSON"), ("[]", "holds a list")]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "preprocessor_config.json"])
def test_a_file_that_is_there_and_broken_is_said(directory, name, text, words):
    (directory / name).write_text(text)
    problem = found(directory)[name]
    assert words in problem.message
    assert problem.is_fatal == (name != "preprocessor_config.json")


def test_a_template_counts_wherever_it_is_kept(directory):
    assert "chat_template.jinja" not in found(directory)
    (directory / "chat_template.jinja").unlink()
    assert found(directory)["chat_template.jinja"].is_fatal
    assert "chat_template.jinja" not in found(directory, has_template=True)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert "chat_template.jinja" not in found(directory)


def test_missing_preprocessors_are_notes_of_a_model_with_a_tower_only(directory):
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (directory / name).unlink()
    notes = found(directory)
    assert "images are refused and text works" in notes["preprocessor_config.json"].message
    assert "videos are refused and text works" in notes["video_preprocessor_config.json"].message
    assert inspect_checkpoint(directory).is_servable
    assert "preprocessor_config.json" not in found(directory, has_tower=False)
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": {}}))
    assert "preprocessor_config.json" not in found(directory)
    assert "video_preprocessor_config.json" in found(directory)


def test_a_whole_checkpoint_has_nothing_to_say(checkpoint):
    assert found(checkpoint) == {}
