"""API keys from files: what each may be, and what is refused without repeating a key."""

import json

import pytest

from onebox.server.keys import ApiKey, callers_of, plain_keys, read_key_file, unique_keys
from onebox.spec.errors import OneboxError, UnreadableError, UsageError


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_toml_json_and_lines_hold_keys(tmp_path):
    toml = '[[keys]]\nname = "a"\nkey = "sk-1"\npriority = -2\nmax_share = 0.25\n[[keys]]\nkey = "sk-2"\n'
    expected = [ApiKey("a", "sk-1", -2, 0.25), ApiKey("key-2", "sk-2")]
    assert read_key_file(written(tmp_path, "k.toml", toml)) == expected
    entries = [{"name": "a", "key": "sk-1", "priority": -2, "max_share": 0.25}, {"key": "sk-2"}]
    assert read_key_file(written(tmp_path, "k.json", json.dumps(entries))) == expected
    assert read_key_file(written(tmp_path, "l.json", json.dumps({"keys": entries}))) == expected
    assert read_key_file(written(tmp_path, "keys", "# ours\nsk-1\n\n  sk-2\n")) == plain_keys(["sk-1", "sk-2"])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("k", "", "holds no key"),
        ("k", "# none\n", "holds no key"),
        ("k", "two words", "spaces"),
        ("k", "schl\u00fcssel", "printable ASCII"),
        ("k.json", "[", "is not valid JSON"),
        ("k.json", "[" * 100_000, "is not valid JSON"),
        ("k.json", "3", "a list named keys"),
        ("k.json", "{}", "a list named keys"),
        ("k.json", "[]", "holds no key"),
        ("k.json", "[3]", "must be a table"),
        ("k.json", '[{"name": "a"}]', "needs a key"),
        ("k.json", '[{"key": ""}]', "is empty"),
        ("k.json", '[{"key": " "}]', "is empty"),
        ("k.json", '[{"key": 3}]', "needs a key"),
        ("k.json", '[{"key": "s", "name": ""}]', "empty or not printable"),
        ("k.json", '[{"key": "s", "prio": 1}]', "holds 'prio'"),
        ("k.json", '[{"key": "s", "priority": 1.5}]', "whole number"),
        ("k.json", '[{"key": "s", "priority": true}]', "whole number"),
        ("k.json", '[{"key": "s", "max_share": 0}]', "above 0 and at most 1"),
        ("k.json", '[{"key": "s", "max_share": NaN}]', "above 0 and at most 1"),
        ("k.json", '[{"key": "s", "max_share": "all"}]', "above 0 and at most 1"),
        ("k.toml", "key = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path, name, text, said):
    with pytest.raises(OneboxError, match=said) as error:
        read_key_file(written(tmp_path, name, text))
    assert str(error.value).endswith(".")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UnreadableError, match="cannot be read"):
            read_key_file(path)


def test_keys_are_never_shown():
    keys = (ApiKey("a", "sk-1"), ApiKey("b", "sk-1"))
    assert "sk-1" not in repr(keys) + repr(callers_of(keys))
    with pytest.raises(UsageError, match="the same key, that of 'a'") as error:
        unique_keys(keys)
    assert "sk-1" not in str(error.value)
    with pytest.raises(UsageError, match="the same name"):
        unique_keys((ApiKey("a", "x"), ApiKey("a", "y")))


def test_keys_without_a_share_have_an_equal_one():
    shares = [caller.max_share for caller in callers_of((ApiKey("a", "x", max_share=0.7), ApiKey("b", "y")))]
    assert shares == [0.7, 0.5]
    assert callers_of((ApiKey("a", "x"),))[0].max_share == 1
