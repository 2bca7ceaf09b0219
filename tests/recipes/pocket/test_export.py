"""The exported model is one file that computes what was trained."""

import itertools
import re

import pytest
import torch

from onebox.model.reference_weights import load_weights
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import MismatchError
from onebox.spec.model import read_json, spec_from_config
from onebox.text.generation import GenerationDefaults
from recipes.pocket import train
from recipes.pocket.config import TOY
from recipes.pocket.data.sources import SOURCES
from recipes.pocket.export import export, largest_difference, model_card
from recipes.pocket.training.checkpoint import write_checkpoint
from recipes.pocket.training.network import draw_weights
from recipes.pocket.training.schedule import RunClock

SPEC = spec_from_config(TOY)


def test_the_artefact_is_one_file_with_configs_and_a_card(tmp_path):
    trained, out, data = (tmp_path / name for name in ("trained", "out", "data"))
    write_checkpoint(trained, TOY, draw_weights(SPEC))
    out.mkdir()
    (out / "generation_config.json").write_text('{"eos_token_id": [104, 102], "temperature": 1.0}')
    data.mkdir()
    (data / "index.json").write_text('{"handbook-hu": {"language": "hu", "licence": "GPL-2+", "tokens": 1234}}')
    export(trained, out, data)
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert load_weights(out).spec == SPEC
    defaults = GenerationDefaults.load(out)
    assert defaults.eos_token_ids == (104, 102)
    assert defaults.temperature < 0.5
    assert "| handbook-hu | hu | GPL-2+ | 1,234 |" in (out / "README.md").read_text()


def test_weights_that_differ_from_the_reference_are_refused(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, TOY, draw_weights(SPEC))
    monkeypatch.setattr("recipes.pocket.export.plain_delta_rule", lambda *parts: torch.zeros_like(parts[2]))
    with pytest.raises(MismatchError, match="logits"):
        export(tmp_path, tmp_path)


def test_toy_run_leaves_a_checkpoint_that_equals_the_reference(tmp_path, monkeypatch, capsys):
    looks = itertools.count()
    monkeypatch.setattr(RunClock, "elapsed", property(lambda _: 0.05 * next(looks)))  # the same steps on any machine
    train.main(["--toy", "--minutes", "0.05", "--out", str(tmp_path)])
    assert largest_difference(tmp_path, num_tokens=70) < 1e-3
    assert "loss" in capsys.readouterr().out


def test_the_card_that_ships_is_what_the_recipe_writes():
    card = (MODEL_DIRECTORY / "README.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\w+) \| (.+) \| ([\d,]+) \|$", card, re.MULTILINE)
    sources = {
        name: {"language": language, "licence": licence, "tokens": int(tokens.replace(",", ""))}
        for name, language, licence, tokens in rows
    }
    assert len(sources) == len(SOURCES)
    assert model_card(spec_from_config(read_json(MODEL_DIRECTORY / "config.json")), sources) == card
