"""generation_config.json is read or refused, never half read."""

import pytest

from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.text.generation import GenerationDefaults


def test_the_makers_defaults_are_read(checkpoint):
    assert GenerationDefaults.load(checkpoint) == GenerationDefaults((258, 256), 1.0, 0.95, 20)


def test_without_the_file_the_config_names_the_end(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults((256,))


def test_neutral_defaults_keep_the_checkpoints_end_tokens(checkpoint):
    assert GenerationDefaults.load(checkpoint, "vllm") == GenerationDefaults((258, 256))


def test_another_directorys_defaults_replace_the_checkpoints(checkpoint, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 5}')
    assert GenerationDefaults.load(checkpoint, str(tmp_path)) == GenerationDefaults((258, 256), 0.6, 1.0, 5)
    with pytest.raises(UnreadableError, match="give auto, vllm or a directory with generation_config"):
        GenerationDefaults.load(checkpoint, str(tmp_path / "gone"))


def test_no_sampling_is_temperature_zero_and_neutral_settings_pass():
    config = {"eos_token_id": 5, "do_sample": False, "temperature": 0.7, "repetition_penalty": 1.0, "min_p": 0}
    assert GenerationDefaults.from_config(config) == GenerationDefaults((5,), temperature=0.0)


def test_the_operators_numbers_come_before_the_makers():
    made = GenerationDefaults.from_config({"eos_token_id": 5, "temperature": 0.7, "repetition_penalty": 1.1})
    assert made.overridden({"temperature": 0, "top_k": 4}) == GenerationDefaults(
        (5,), 0.0, 1.0, 4, repetition_penalty=1.1
    )
    with pytest.raises(UsageError, match="'num_beams'"):
        made.overridden({"num_beams": 2})
    with pytest.raises(UsageError, match="must be a number"):
        made.overridden({"top_p": "high"})


@pytest.mark.parametrize("extra", [{"num_beams": 4}, {"unheard_of": None}])
def test_what_cannot_be_honoured_is_refused_by_name(extra):
    with pytest.raises(UnsupportedError, match=next(iter(extra))):
        GenerationDefaults.from_config({"eos_token_id": [1], **extra})
