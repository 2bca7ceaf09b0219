"""A run's checkpoint reads back as it was written, and its progress with it."""

import pytest
import torch

from onebox.spec.errors import MismatchError
from onebox.spec.model import spec_from_config
from recipes.pocket.config import TOY
from recipes.pocket.training.checkpoint import MAX_FILE_BYTES, PROGRESS, read_progress, read_weights, write_checkpoint
from recipes.pocket.training.network import draw_weights

SPEC = spec_from_config(TOY)


def test_a_written_checkpoint_reads_back_rounded_and_in_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.pocket.training.checkpoint.MAX_FILE_BYTES", 60_000)
    weights = draw_weights(SPEC)
    write_checkpoint(tmp_path, TOY, weights)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 100_000 < MAX_FILE_BYTES for file in files)
    _, back = read_weights(tmp_path)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight.bfloat16().float()) for name, weight in weights.items())


def test_progress_that_cannot_be_read_is_a_sentence(tmp_path):
    assert read_progress(tmp_path) == 0
    (tmp_path / PROGRESS).write_text('{"progress": "far"}')
    with pytest.raises(MismatchError, match="has no progress between 0 and 1"):
        read_progress(tmp_path)
