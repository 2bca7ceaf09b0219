"""The tiny checkpoint is whole, the same every time, and there or not there."""

import os

import pytest
import torch
from safetensors.torch import load_file

from onebox.model import random
from onebox.model.random import random_checkpoint, write_random_checkpoint
from onebox.model.reference_weights import load_weights
from onebox.spec.errors import WriteError
from onebox.spec.model import read_config
from onebox.spec.modules import modules


def test_it_is_written_once_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = random_checkpoint()
    assert directory.parent == tmp_path / "onebox"
    assert sorted(path.name for path in directory.parent.iterdir()) == [directory.name]
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in directory.iterdir()} == names | {"chat_template.jinja", "generation_config.json"}
    monkeypatch.setattr(random, "write_random_checkpoint", lambda _: pytest.fail("it was written again"))
    assert random_checkpoint() == directory


def test_the_seed_decides_every_byte(tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_random_checkpoint(tmp_path / name, seed)
    first, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == same != other


def test_it_has_every_weight_and_loads_strictly(tmp_path):
    write_random_checkpoint(tmp_path / "tiny")
    spec = read_config(tmp_path / "tiny")
    loaded = load_weights(tmp_path / "tiny")
    assert sum(w.numel() for w in loaded.weights.values()) == sum(module.numel for module in modules(spec))
    stored = load_file(tmp_path / "tiny" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    assert all(torch.equal(loaded.weights[name], tensor.float()) for name, tensor in stored.items())


def test_another_writer_that_was_faster_is_no_harm(tmp_path):
    write_random_checkpoint(tmp_path / "tiny")
    write_random_checkpoint(tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_stop_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(random, "save_file", full_disk)
    with pytest.raises(WriteError, match="No space left"):
        write_random_checkpoint(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "onebox").write_text("a file in the way")
    with pytest.raises(WriteError, match="cannot hold the tiny random model"):
        random_checkpoint(tmp_path)
